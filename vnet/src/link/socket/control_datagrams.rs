//! What a host sends besides frames: questions and answers between controls, keepalives. Rare, so one datagram a call.

use std::io;
use std::sync::Arc;

use crate::link::inquiry::MAGIC;
use crate::link::path::prober;
use crate::link::rendezvous::choice::Via;
use crate::link::sealed::aead::TAG_LEN;
use crate::link::sealed::session::Seal;
use crate::link::socket::udp::{Name, Socket};
use crate::link::{Encapsulation, Link};
use crate::wire::native::{Header, Kind};

/// Sends from a dispatcher's socket, beside the dispatcher.
#[derive(Clone)]
pub struct Courier {
    socket: Arc<Socket>,
}

impl Courier {
    pub(in crate::link) fn new(socket: Arc<Socket>) -> Courier {
        Courier { socket }
    }

    /// Sends a question, or an answer, as [`inquiry`](crate::link::inquiry) describes them.
    ///
    /// # Errors
    /// The link carries none, `text` is longer than [`Link::inquiry_text`], there is no key for it, or the kernel refuses.
    pub fn send(&self, link: &Link, answer: bool, text: &[u8]) -> io::Result<()> {
        if link.options.encapsulation != Encapsulation::Native {
            return Err(unfit("only links of encapsulation native carry questions"));
        }
        if text.len() > link.inquiry_text() {
            return Err(unfit("too long for the link's path"));
        }
        let kind = if answer { Kind::ProbeReply } else { Kind::Probe };
        self.post(link, kind, &[&MAGIC, text].concat())
    }

    /// Sends a keepalive on a sealed link. One that cannot be sent is like one that got lost.
    pub(in crate::link) fn keepalive(&self, link: &Link, seal: &Seal, asks: bool) {
        let Some(via) = &link.via else {
            let _ = self.post(link, Kind::Keepalive, &seal.keepalive(asks, false));
            return;
        };
        // By every way there may be.
        let (hears, besides) = via.besides(link.remote());
        let body = seal.keepalive(asks, hears);
        let _ = self.post(link, Kind::Keepalive, &body);
        for name in besides.into_iter().filter_map(|way| self.socket.name_of(way)) {
            let _ = self.post_to(&name, link, Kind::Keepalive, &body);
        }
    }

    /// Tells the host between where this one is, on a link that needs one.
    pub(in crate::link) fn register(&self, link: &Link) {
        let registration = link.via.as_ref().and_then(Via::registration);
        if let Some((relay, bytes)) = registration
            && let Some(name) = self.socket.name_of(relay)
        {
            // One that cannot be sent is like one that got lost.
            let sent = self.socket.send(&bytes, &name).is_ok();
            link.stats.out_datagrams.add(u64::from(sent));
        }
    }

    /// Sends a probe with a payload of `len` bytes, at least 16. One that cannot be sent is like one that got lost.
    pub(in crate::link) fn probe(&self, link: &Link, id: &[u8; 8], len: usize) {
        let mut payload = vec![0; len];
        payload[..8].copy_from_slice(&prober::MAGIC);
        payload[8..16].copy_from_slice(id);
        let _ = self.post(link, Kind::Probe, &payload);
    }

    /// Sends one datagram of no network, sealed where the link is. A keepalive has a tag there, see place.rs.
    fn post(&self, link: &Link, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let name = self.socket.name(link, 0).ok_or_else(|| unfit("no socket for its address"))?;
        self.post_to(&name, link, kind, payload)
    }

    fn post_to(&self, name: &Name, link: &Link, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let keyring = link.seal().map(Seal::keyring);
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
        self.socket.send(&datagram, name)?;
        link.stats.out_datagrams.add(1);
        Ok(())
    }
}

fn unfit(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, why)
}
