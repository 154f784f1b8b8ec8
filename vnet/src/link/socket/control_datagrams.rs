//! What a host sends besides frames: questions and answers between controls, keepalives. Rare, so one datagram a call.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::link::inquiry::MAGIC;
use crate::link::socket::udp::{Name, Socket};
use crate::link::{Encapsulation, Link};
use crate::wire::native::{Header, Kind, TAG_LEN};

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

    /// Sends a probe. One that cannot be sent is like one that got lost.
    pub(in crate::link) fn probe(&self, link: &Link, payload: &[u8]) {
        let _ = self.post(link, Kind::Probe, payload);
    }

    /// Sends a keepalive with this body, to `to` where that is not the link's present address. One that cannot be sent is like one
    /// that got lost.
    pub(in crate::link) fn post_keepalive(&self, link: &Link, to: Option<SocketAddr>, body: &[u8]) {
        let Some(to) = to else {
            let _ = self.post(link, Kind::Keepalive, body);
            return;
        };
        if let Some(name) = self.socket.name_of(to) {
            let _ = self.post_to(&name, link, Kind::Keepalive, body);
        }
    }

    /// Sends bytes that are no native datagram to `to`. If they cannot be sent, they are like lost ones.
    pub(in crate::link) fn post_raw(&self, link: &Link, to: SocketAddr, bytes: &[u8]) {
        if let Some(name) = self.socket.name_of(to) {
            link.stats.out_datagrams.add(u64::from(self.socket.send(bytes, &name).is_ok()));
        }
    }

    /// Sends one datagram of no network, sealed where the link is. A keepalive has a tag there, see sealed/roaming.rs.
    fn post(&self, link: &Link, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let name = self.socket.name(link, 0).ok_or_else(|| unfit("no socket for its address"))?;
        self.post_to(&name, link, kind, payload)
    }

    fn post_to(&self, name: &Name, link: &Link, kind: Kind, payload: &[u8]) -> io::Result<()> {
        let keyring = link.seal().map(|seal| seal.keyring());
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
