//! An offer of an engine: an abstract Unix socket by which applications see that they are to take that engine by themselves.
//!
//! It carries nothing: connecting a datagram socket to it succeeds as long as the offer stands. Whether who offers can be trusted shows when an
//! application asks at the meeting point for an attachment.

use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use rustix::net::{SocketAddrUnix, bind};

/// Who offers an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// The helper of a virtual machine, as long as it runs.
    Vm,
    /// The daemon, to a container whose network prefers its engine.
    Daemon,
}

impl Offer {
    /// Name of the socket: the meeting point's with a suffix.
    fn name(self, meeting: &str) -> String {
        match self {
            Offer::Vm => format!("{meeting}-vm"),
            Offer::Daemon => format!("{meeting}-daemon"),
        }
    }

    /// Whether it stands in this network namespace.
    pub(crate) fn is_seen(self, meeting: &str) -> bool {
        let address = || SocketAddr::from_abstract_name(self.name(meeting));
        let seen = || UnixDatagram::unbound()?.connect_addr(&address()?);
        seen().is_ok()
    }
}

/// An offer that stands until it is dropped.
#[must_use]
#[derive(Debug)]
pub struct Presence {
    _socket: OwnedFd,
}

impl Presence {
    /// Makes an offer in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The name is taken.
    pub fn new(meeting: &str, offer: Offer) -> io::Result<Self> {
        Self::on(UnixDatagram::unbound()?.into(), meeting, offer)
    }

    /// The same with a Unix socket (`SOCK_DGRAM`), in whose network namespace the name is.
    ///
    /// # Errors
    /// The name is taken.
    pub fn on(socket: OwnedFd, meeting: &str, offer: Offer) -> io::Result<Self> {
        bind(&socket, &SocketAddrUnix::new_abstract_name(offer.name(meeting).as_bytes())?)?;
        Ok(Self { _socket: socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Node, Options};

    #[test]
    fn an_offer_is_seen_while_it_stands() {
        let meeting = format!("vnet-test-presence-{}", std::process::id());
        for (offer, other) in [(Offer::Vm, Offer::Daemon), (Offer::Daemon, Offer::Vm)] {
            assert!(!offer.is_seen(&meeting));
            let presence = Presence::new(&meeting, offer).unwrap();
            assert!(Presence::new(&meeting, offer).is_err());
            // They fill no backlog, as they would a listener's.
            assert!((0..1000).all(|_| offer.is_seen(&meeting)));
            assert!(!other.is_seen(&meeting));
            drop(presence);
            assert!(!offer.is_seen(&meeting));
        }
    }

    /// Nobody listens at the meeting point itself.
    #[test]
    fn without_the_hosts_engine_the_process_runs_one() {
        for (offer, attachment) in [(Offer::Vm, "vm"), (Offer::Daemon, "daemon")] {
            let meeting = format!("vnet-test-presence-best-{attachment}-{}", std::process::id());
            let _presence = Presence::new(&meeting, offer).unwrap();
            let bind = "127.0.0.1:0".parse().unwrap();
            let options = Options {
                bind,
                meeting: Some(meeting),
                attachment: None,
                own_memory: false,
                ..Options::default()
            };
            assert!(Node::open(&options).unwrap().counters().is_some(), "the process has the counters");
            let asked = Options { attachment: Some(attachment.into()), ..options };
            assert!(matches!(Node::open(&asked), Err(Error::Daemon(_))));
        }
    }
}
