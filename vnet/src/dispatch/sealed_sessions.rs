//! Sessions of applications that seal their packets from end to end (docs/interconnect.md): their datagrams are all that the kernel's
//! own path carries across sealed links.
//!
//! vnetd knows a session because it derives its keys, for both addresses and ports, as the other host's vnetd does. Their packets are
//! encrypted and authenticated when they leave the application, so the link need not do it again: the wire carries them as they are,
//! and no vnetd wakes up for them. A packet of any other kind never takes a sealed link's wire, and what arrives by it is dropped.
//!
//! A session is known by its datagrams and by the stations at both ends, whose flow the router decides. It ends with the
//! application's connection to vnetd; its flows end within two seconds then.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::thread::Thread;

use parking_lot::{Mutex, RwLock};

use crate::frame::{NetworkId, PortId};
use crate::route::Flow;
use crate::wire::ethernet::{Mac, addresses};
use crate::wire::sealed_datagram::SealedDatagram;

/// Maximum number of sessions, of one application and in all. Each takes two of the kernel path's 65 536 flows. Packets of further
/// sessions take the link.
const OF_APPLICATION_MAX: usize = 1024;
const SESSIONS_MAX: usize = 16_384;

/// An application by its connection to vnetd.
pub type Application = u128;

/// A session between an application of this host and one behind a sealed link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedSession {
    /// The network of both.
    pub network: NetworkId,
    /// Station of the application of this host, and its port.
    pub own: (Mac, PortId),
    /// Station of the other one, and the link's port.
    pub peer: (Mac, PortId),
    /// What this host sends.
    pub out: SealedDatagram,
}

impl SealedSession {
    /// The flows of both directions, as the router decides about them.
    fn flows(&self) -> [Flow; 2] {
        let flow = |(src, from): (Mac, PortId), dst: Mac| Flow { network: self.network, src, dst, from };
        [flow(self.own, self.peer.0), flow(self.peer, self.own.0)]
    }
}

/// Network, source and destination of frames.
type Stations = (NetworkId, Mac, Mac);

#[derive(Default)]
struct Book {
    /// Datagrams of one direction between two stations, with their applications. The other direction has an entry of its own.
    datagrams: HashMap<Stations, Vec<(SealedDatagram, Application)>>,
    of: HashMap<Application, Vec<SealedSession>>,
    sessions: usize,
}

/// All sessions of a core.
#[derive(Default)]
pub struct SealedSessions {
    book: RwLock<Book>,
    /// Flows of new sessions, which the renewer decides about at once.
    fresh: Mutex<Vec<Flow>>,
    renewer: OnceLock<Thread>,
}

impl SealedSessions {
    /// Has `thread` be unparked when there is something [`fresh`](Self::fresh).
    pub(super) fn wake(&self, thread: Thread) {
        let _ = self.renewer.set(thread);
    }

    /// Lets the datagrams of a session take the wire of a sealed link. Returns false at a limit.
    pub fn admit(&self, application: Application, session: SealedSession) -> bool {
        let is_new = self.book.write().admit(application, session);
        if is_new == Some(true) {
            let mut fresh = self.fresh.lock();
            // Without the kernel's path nobody takes them.
            if fresh.len() < SESSIONS_MAX {
                fresh.extend(session.flows());
            }
            drop(fresh);
            self.renewer.get().inspect(|thread| thread.unpark());
        }
        is_new.is_some()
    }

    /// Ends the sessions of an application that is gone.
    pub fn end(&self, application: Application) {
        let mut book = self.book.write();
        for session in book.of.remove(&application).unwrap_or_default() {
            book.remove(application, &session);
        }
    }

    /// The flows of sessions that are new since the last call.
    pub(super) fn fresh(&self) -> Vec<Flow> {
        std::mem::take(&mut *self.fresh.lock())
    }

    /// The datagrams that may take the wire among the frames from one station to another.
    pub(super) fn between(&self, network: NetworkId, src: Mac, dst: Mac) -> Vec<SealedDatagram> {
        let book = self.book.read();
        let found = book.datagrams.get(&(network, src, dst)).into_iter().flatten();
        let mut found: Vec<_> = found.map(|(datagram, _)| *datagram).collect();
        // A port may have a new application before the old one's end is known.
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Whether a frame is a datagram of a session. Whether the packet inside is authentic only the application knows.
    pub(super) fn has(&self, network: NetworkId, frame: &[u8]) -> bool {
        let Some((datagram, (dst, src))) = SealedDatagram::of_frame(frame).zip(addresses(frame)) else {
            return false;
        };
        let book = self.book.read();
        let mut found = book.datagrams.get(&(network, src, dst)).into_iter().flatten();
        found.any(|(known, _)| *known == datagram)
    }
}

impl Book {
    /// Whether the session is new; `None` at a limit.
    fn admit(&mut self, application: Application, session: SealedSession) -> Option<bool> {
        let of = self.of.entry(application).or_default();
        if of.contains(&session) {
            return Some(false);
        }
        if of.len() >= OF_APPLICATION_MAX || self.sessions >= SESSIONS_MAX {
            return None;
        }
        of.push(session);
        self.sessions += 1;
        for (stations, datagram) in directions(&session) {
            self.datagrams.entry(stations).or_default().push((datagram, application));
        }
        Some(true)
    }

    fn remove(&mut self, application: Application, session: &SealedSession) {
        self.sessions -= 1;
        for (stations, datagram) in directions(session) {
            let Some(list) = self.datagrams.get_mut(&stations) else { continue };
            if let Some(at) = list.iter().position(|entry| *entry == (datagram, application)) {
                list.swap_remove(at);
            }
            if list.is_empty() {
                self.datagrams.remove(&stations);
            }
        }
    }
}

fn directions(session: &SealedSession) -> [(Stations, SealedDatagram); 2] {
    let SealedSession { network, own: (own, _), peer: (peer, _), out } = *session;
    [((network, own, peer), out), ((network, peer, own), out.reversed())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::sealed_datagram::tests::{between, frame};

    const OWN: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn session(port: u16) -> SealedSession {
        let mut out = between();
        out.src.set_port(port);
        SealedSession { network: NetworkId::DEFAULT, own: (OWN, PortId(0)), peer: (PEER, PortId(5)), out }
    }

    #[test]
    fn datagrams_are_known_in_both_directions_until_their_application_ends() {
        let sessions = SealedSessions::default();
        let network = NetworkId::DEFAULT;
        let there = session(7000).out;
        assert!(sessions.admit(1, session(7000)) && sessions.admit(1, session(7000)));
        let flows = sessions.fresh();
        assert_eq!(flows.len(), 2, "the second time it is not new");
        assert_eq!((flows[0].from, flows[0].dst), (PortId(0), PEER));
        assert_eq!((flows[1].from, flows[1].dst), (PortId(5), OWN));
        assert_eq!(sessions.between(network, OWN, PEER), [there]);
        assert_eq!(sessions.between(network, PEER, OWN), [there.reversed()]);
        assert!(sessions.has(network, &frame(PEER, OWN, there)));
        assert!(sessions.has(network, &frame(OWN, PEER, there.reversed())));
        assert!(!sessions.has(network, &frame(OWN, PEER, there)), "another direction");
        assert!(!sessions.has(NetworkId::new(2).unwrap(), &frame(PEER, OWN, there)));
        // A restarted program has the port before the end of its connection before is known.
        assert!(sessions.admit(2, session(7000)));
        sessions.end(1);
        assert_eq!(sessions.between(network, OWN, PEER), [there]);
        sessions.end(2);
        sessions.end(2);
        assert!(!sessions.has(network, &frame(PEER, OWN, there)));
        assert!(sessions.book.read().datagrams.is_empty() && sessions.book.read().sessions == 0);
    }

    #[test]
    fn sessions_are_bounded() {
        let sessions = SealedSessions::default();
        for application in 0..(SESSIONS_MAX / OF_APPLICATION_MAX) as u128 {
            for port in 0..OF_APPLICATION_MAX as u16 {
                assert!(sessions.admit(application, session(port)));
            }
            assert!(!sessions.admit(application, session(u16::MAX)));
        }
        assert!(!sessions.admit(1000, session(1)));
        sessions.end(0);
        assert!(sessions.admit(1000, session(1)));
    }
}
