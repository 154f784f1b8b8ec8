//! Datagrams without frames: keepalives, probes, inquiries between controls, and registrations at a rendezvous relay. They are
//! rare, so each takes one call.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use super::link_part::Native;
use super::wire_state::WireTerms;
use crate::link::common::Common;
use crate::link::path::probe_health::probe_payload;
use crate::link::sealed::session::Seal;
use crate::link::socket::name::Name;
use crate::link::socket::udp::Socket;
use crate::wire::native::{Header, Kind, TAG_LEN};
use crate::wire::translation::Conversation;

/// A native link.
type Of<'a> = (&'a Common, &'a Native);

/// Sends on a dispatcher's socket from other threads.
#[derive(Clone)]
pub struct Courier {
    socket: Arc<Socket>,
}

impl Courier {
    pub(in crate::link) fn new(socket: Arc<Socket>) -> Courier {
        Courier { socket }
    }

    /// Sends a question or answer with payload `text` behind [`inquiry::MAGIC`](crate::link::inquiry::MAGIC).
    pub(in crate::link) fn inquiry(&self, link: Of<'_>, is_answer: bool, payload: &[u8]) -> io::Result<()> {
        self.post(link, if is_answer { Kind::ProbeReply } else { Kind::Probe }, payload)
    }

    /// Sends a keepalive with this body to `to`, or to the link's current address if `to` is absent. A send error counts as
    /// packet loss.
    pub(in crate::link) fn post_keepalive(&self, link: Of<'_>, to: Option<SocketAddr>, body: &[u8]) {
        let Some(to) = to else {
            let _ = self.post(link, Kind::Keepalive, body);
            return;
        };
        if let Some(name) = self.socket.name_of(to) {
            let _ = self.post_to(&name, link, Kind::Keepalive, body);
        }
    }

    /// Sends raw bytes, without a native header, to `to`. A send error counts as packet loss.
    pub(in crate::link) fn post_raw(&self, (link, _): Of<'_>, to: SocketAddr, bytes: &[u8]) {
        if let Some(name) = self.socket.name_of(to) {
            link.stats.out_datagrams.add(u64::from(self.socket.send(bytes, &name).is_ok()));
        }
    }

    /// Sends a probe with a payload of `len` bytes, or of the least that it needs. A send error counts as packet loss.
    pub(in crate::link) fn probe(&self, link: Of<'_>, id: &[u8; 8], len: usize) {
        let tag = link.1.host_tag.get().copied();
        let _ = self.post(link, Kind::Probe, &probe_payload(id, tag, len));
    }

    /// Announces the wire: this host's terms, and whether the other host's trials arrive. Sends nothing until that is known. A send error
    /// counts as packet loss.
    pub(in crate::link) fn wire_announcement(&self, link: Of<'_>, terms: WireTerms, now_ms: u64) {
        if let Some(announcement) = link.1.wire.announcement(terms, now_ms) {
            let _ = self.post(link, Kind::Probe, &announcement);
        }
    }

    /// Sends the offers of translations that are due. A send error counts as packet loss.
    pub(in crate::link) fn translation_offers(&self, link: Of<'_>, now_ms: u64) {
        let (common, native) = link;
        for offer in native.translations.offers(native.payload_of(common.path_mtu()), now_ms) {
            let _ = self.post(link, Kind::Probe, &offer);
        }
    }

    /// Accepts the offered conversations that programs know. `seen`: whether packets with an index have arrived lately, `None` if programs do
    /// not know it; `proved`: translated packets of TCP, and of UDP, arrive. A send error counts as packet loss.
    pub(in crate::link) fn translation_acceptance(
        &self,
        link: Of<'_>,
        seen: impl Fn(u16, &Conversation) -> Option<bool>,
        proved: [bool; 2],
        now_ms: u64,
    ) {
        let (common, native) = link;
        let len_max = native.payload_of(common.path_mtu());
        if let Some(acceptance) = native.translations.acceptance(seen, proved, len_max, now_ms) {
            let _ = self.post(link, Kind::Probe, &acceptance);
        }
    }

    /// Announces this host's direct ports and tries those of the other host, as far as it is time. A send error counts as packet
    /// loss.
    pub(in crate::link) fn direct(&self, link: Of<'_>, now_ms: u64) {
        let (common, native) = link;
        let may_seal = |seal: &Seal| seal.keyring().sealing(common.next_number()).is_some();
        let has_key = native.seal.as_deref().is_none_or(may_seal);
        if native.via.is_some() || !has_key {
            return;
        }
        if let Some(announcement) = native.direct.announcement(native.payload_of(common.path_mtu()), now_ms) {
            let _ = self.post(link, Kind::Probe, &announcement);
        }
        for address in native.direct.trials(native.place.remote(), now_ms) {
            if let Some(name) = self.socket.name_of(address) {
                let _ = self.post_to(&name, link, Kind::Probe, &native.direct.trial());
            }
        }
    }

    /// Sends one datagram outside any network, encrypted on a sealed link. A keepalive on a sealed link carries a tag, see
    /// sealed/roaming.rs.
    fn post(&self, (link, native): Of<'_>, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let name = native.name(0, &self.socket).ok_or_else(|| unfit("no socket for its address"))?;
        self.post_to(&name, (link, native), kind, payload)
    }

    fn post_to(&self, name: &Name, (link, native): Of<'_>, kind: Kind, payload: &[u8]) -> io::Result<()> {
        // Until the datagram has left, so that the next vnetd goes on with a later number.
        let turn = native
            .seal
            .as_deref()
            .map(|seal| seal.turn().ok_or_else(|| unfit("the next vnetd has the keys")));
        let _turn = turn.transpose()?;
        let keyring = native.seal.as_deref().map(Seal::keyring);
        let tag = keyring.as_ref().filter(|_| kind == Kind::Keepalive).map_or(0, |keyring| keyring.tag());
        let key = match &keyring {
            None => None,
            Some(keyring) => {
                Some(keyring.sealing(link.next_number()).ok_or_else(|| unfit("the link has no keys yet"))?)
            }
        };
        let header = Header {
            kind,
            last: true,
            offload: false,
            sealed: key.is_some(),
            hops: 0,
            epoch: key.map_or(0, |key| key.epoch()),
            index: 0,
            network: tag >> 8,
            queue: tag as u8,
            number: link.take_numbers(1),
        };
        let mut datagram = [&header.to_bytes()[..], payload].concat();
        if let Some(key) = key {
            datagram.resize(datagram.len() + TAG_LEN, 0);
            key.seal(&mut datagram);
        }
        self.socket.set_oversize(native.oversize());
        self.socket.send(&datagram, name)?;
        link.stats.out_datagrams.add(1);
        Ok(())
    }
}

pub(in crate::link) fn unfit(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}
