//! The helper's presence: an abstract Unix socket by which applications of a virtual machine see that its helper runs.
//!
//! It carries nothing: connecting a datagram socket to it succeeds as long as the helper runs. Whether the helper can be trusted shows when an
//! application asks it for an attachment.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Address of the socket: the meeting point's name with a suffix.
fn name(meeting: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("{meeting}-vm"))
}

/// Shows that the helper runs, until it is dropped.
pub struct Presence {
    _socket: UnixDatagram,
}

impl Presence {
    /// Shows that the helper with this meeting point runs.
    ///
    /// # Errors
    /// Another helper has the address.
    pub fn new(meeting: &str) -> io::Result<Self> {
        Ok(Self { _socket: UnixDatagram::bind_addr(&name(meeting)?)? })
    }

    /// Whether the helper with this meeting point runs.
    pub(crate) fn is_seen(meeting: &str) -> bool {
        let seen = || UnixDatagram::unbound()?.connect_addr(&name(meeting)?);
        seen().is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, Node, Options};

    #[test]
    fn a_helper_is_seen_while_it_runs() {
        let meeting = format!("vnet-test-presence-{}", std::process::id());
        assert!(!Presence::is_seen(&meeting));
        let presence = Presence::new(&meeting).unwrap();
        assert!(Presence::new(&meeting).is_err());
        // They fill no backlog, as they would a listener's.
        assert!((0..1000).all(|_| Presence::is_seen(&meeting)));
        drop(presence);
        assert!(!Presence::is_seen(&meeting));
    }

    /// Nobody listens at the meeting point itself.
    #[test]
    fn without_the_hosts_engine_the_process_runs_one() {
        let meeting = format!("vnet-test-presence-best-{}", std::process::id());
        let _presence = Presence::new(&meeting).unwrap();
        let bind = "127.0.0.1:0".parse().unwrap();
        let options = Options {
            bind,
            meeting: Some(meeting),
            attachment: None,
            own_memory: false,
            ..Options::default()
        };
        assert!(Node::open(&options).unwrap().counters().is_some(), "the process has the counters");
        let asked = Options { attachment: Some("vm".into()), ..options };
        assert!(matches!(Node::open(&asked), Err(Error::Daemon(_))));
    }
}
