//! Sessions of applications that seal their packets from end to end (docs/interconnect.md): their datagrams are all that the kernel's
//! own path carries across sealed links.
//!
//! vnetd knows a session because it derives its keys, for both addresses and ports, as the other host's vnetd does. Their packets are
//! encrypted and authenticated when they leave the application, so the link need not do it again: the wire carries them as they are,
//! and no vnetd wakes up for them. A packet of any other kind never takes a sealed link's wire, and what arrives by it is dropped.
//!
//! - *Out*: a session is known by its datagrams and by the stations at both ends, whose flow the router decides.
//! - *In*: the other host may send by the wire as soon as both have keys, so what comes up is accepted for every address and port where
//!   an application receives that has keys, from a station that the router has at that link. It changes nothing that is learned.
//! - A session ends with the application's connection to vnetd; its flows end within two seconds then.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddrV4;
use std::sync::OnceLock;
use std::thread::Thread;

use parking_lot::{Mutex, RwLock};

use crate::frame::{NetworkId, PortId};
use crate::route::Flow;
use crate::wire::ethernet::{Mac, addresses};
use crate::wire::sealed_datagram::SealedDatagram;

/// Maximum number of sessions, of one station and in all. Each takes two of the kernel path's 65 536 flows. What this host sends in
/// further sessions takes the link, and what it receives comes up.
const OF_STATION_MAX: usize = 1024;
const SESSIONS_MAX: usize = 32_768;
/// Maximum number of addresses and ports at which an application receives. It has one socket, with an address for each device.
const ENDS_MAX: usize = 16;

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

    fn end(&self) -> End {
        (self.network, self.own.0, self.out.src)
    }

    fn replaces(&self, other: &SealedSession) -> bool {
        (self.end(), self.out) == (other.end(), other.out)
    }
}

/// Network, source and destination of frames.
type Stations = (NetworkId, Mac, Mac);
/// Where an application receives: network, station, address and port.
type End = (NetworkId, Mac, SocketAddrV4);

/// What an application has.
#[derive(Default)]
struct Owned {
    sessions: Vec<SealedSession>,
    ends: Vec<End>,
}

#[derive(Default)]
struct Book {
    /// Datagrams of one direction between two stations, with their applications. The other direction has an entry of its own.
    datagrams: HashMap<Stations, Vec<(SealedDatagram, Application)>>,
    /// The interface's port of each end, and how many applications have it: a port may have a new one before the old one's end is known.
    ends: HashMap<End, (PortId, usize)>,
    of: HashMap<Application, Owned>,
    /// Number of sessions of each station of this host.
    stations: HashMap<(NetworkId, Mac), usize>,
    sessions: usize,
}

/// All sessions of a core.
#[derive(Default)]
pub struct SealedSessions {
    book: RwLock<Book>,
    /// Flows that the renewer decides about at once.
    fresh: Mutex<HashSet<Flow>>,
    renewer: OnceLock<Thread>,
}

impl SealedSessions {
    /// Has `thread` be unparked when there is something [`fresh`](Self::fresh).
    pub(super) fn wake(&self, thread: Thread) {
        let _ = self.renewer.set(thread);
    }

    /// Lets the datagrams of a session take the wire of a sealed link. Returns false if nothing of it could be received: then the
    /// application must not have its keys, because the other host sends by the wire.
    pub fn admit(&self, application: Application, session: SealedSession) -> bool {
        let mut book = self.book.write();
        if !book.receives(application, &session) {
            return false;
        }
        if book.admit(application, session) {
            drop(book);
            self.refresh(session.flows());
        }
        true
    }

    /// Has the renewer decide about flows.
    fn refresh(&self, flows: impl IntoIterator<Item = Flow>) {
        // Without the kernel's path there is no renewer.
        let Some(renewer) = self.renewer.get() else { return };
        let mut fresh = self.fresh.lock();
        for flow in flows {
            if fresh.len() < SESSIONS_MAX {
                fresh.insert(flow);
            }
        }
        renewer.unpark();
    }

    /// A frame of this flow, between two stations at the ends of a sealed link, has come up: datagrams of their sessions may be among
    /// what came.
    pub(super) fn came_up(&self, flow: &Flow) {
        if self.book.read().datagrams.contains_key(&(flow.network, flow.src, flow.dst)) {
            self.refresh([*flow]);
        }
    }

    /// Ends the sessions of an application that is gone.
    pub fn end(&self, application: Application) {
        let mut book = self.book.write();
        let Owned { sessions, ends } = book.of.remove(&application).unwrap_or_default();
        let mut fresh = self.fresh.lock();
        for session in sessions {
            book.remove(application, &session);
            session.flows().iter().for_each(|flow| _ = fresh.remove(flow));
        }
        ends.iter().for_each(|end| book.leave(end));
    }

    /// The flows to decide about, since the last call.
    pub(super) fn fresh(&self) -> HashSet<Flow> {
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

    /// For a sealed packet to an application of this host, the flow of its answers, with which the router tells whether the sender is
    /// where the frame comes from. `None` for other frames. Whether the packet is authentic only the application knows.
    pub(super) fn answers_to(&self, network: NetworkId, frame: &[u8]) -> Option<Flow> {
        let (datagram, (dst, src)) = SealedDatagram::of_frame(frame).zip(addresses(frame))?;
        let from = self.book.read().ends.get(&(network, dst, datagram.dst)).map(|(port, _)| *port)?;
        Some(Flow { network, src: dst, dst: src, from })
    }
}

impl Book {
    /// Notes where the application receives. Returns false at the limit.
    fn receives(&mut self, application: Application, session: &SealedSession) -> bool {
        let (own, end) = (self.of.entry(application).or_default(), session.end());
        if !own.ends.contains(&end) {
            if own.ends.len() >= ENDS_MAX {
                return false;
            }
            own.ends.push(end);
            self.ends.entry(end).or_insert((session.own.1, 0)).1 += 1;
        }
        self.ends.entry(end).and_modify(|(port, _)| *port = session.own.1);
        true
    }

    fn leave(&mut self, end: &End) {
        let Some((_, applications)) = self.ends.get_mut(end) else { return };
        *applications -= 1;
        if *applications == 0 {
            self.ends.remove(end);
        }
    }

    /// Whether the session is new and within the limits.
    fn admit(&mut self, application: Application, session: SealedSession) -> bool {
        let own = self.of.entry(application).or_default();
        match own.sessions.iter().position(|old| session.replaces(old)) {
            Some(at) if own.sessions[at] == session => return false,
            // The peer has another station.
            Some(at) => {
                let old = own.sessions.swap_remove(at);
                self.remove(application, &old);
            }
            None => {}
        }
        let of_station = self.stations.get(&(session.network, session.own.0)).copied().unwrap_or_default();
        if of_station >= OF_STATION_MAX || self.sessions >= SESSIONS_MAX {
            return false;
        }
        self.of.entry(application).or_default().sessions.push(session);
        *self.stations.entry((session.network, session.own.0)).or_default() += 1;
        self.sessions += 1;
        for (stations, datagram) in directions(&session) {
            self.datagrams.entry(stations).or_default().push((datagram, application));
        }
        true
    }

    fn remove(&mut self, application: Application, session: &SealedSession) {
        self.sessions -= 1;
        let station = (session.network, session.own.0);
        if let Some(count) = self.stations.get_mut(&station) {
            *count -= 1;
            if *count == 0 {
                self.stations.remove(&station);
            }
        }
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
    const ELSEWHERE: Mac = Mac([2, 0, 0, 0, 0, 3]);

    /// A session from port 7000 to this port of the peer.
    fn session(port: u16) -> SealedSession {
        let mut out = between();
        out.dst.set_port(port);
        SealedSession { network: NetworkId::DEFAULT, own: (OWN, PortId(0)), peer: (PEER, PortId(5)), out }
    }

    fn is_empty(sessions: &SealedSessions) -> bool {
        let book = sessions.book.read();
        let maps = [book.datagrams.len(), book.ends.len(), book.of.len(), book.stations.len(), book.sessions];
        maps == [0; 5] && sessions.fresh.lock().is_empty()
    }

    #[test]
    fn datagrams_are_known_in_both_directions_until_their_application_ends() {
        let sessions = SealedSessions::default();
        sessions.wake(std::thread::current());
        let network = NetworkId::DEFAULT;
        let there = session(7001).out;
        assert!(sessions.admit(1, session(7001)));
        let answers = Flow { network, src: OWN, dst: PEER, from: PortId(0) };
        let arrivals = Flow { network, src: PEER, dst: OWN, from: PortId(5) };
        assert_eq!(sessions.fresh(), HashSet::from([answers, arrivals]));
        assert!(sessions.admit(1, session(7001)) && sessions.fresh().is_empty(), "it is not new");
        assert_eq!(sessions.between(network, OWN, PEER), [there]);
        assert_eq!(sessions.between(network, PEER, OWN), [there.reversed()]);
        let arrived = frame(OWN, PEER, there.reversed());
        assert_eq!(sessions.answers_to(network, &arrived), Some(answers));
        assert_eq!(sessions.answers_to(network, &frame(PEER, OWN, there)), None, "to the peer");
        assert_eq!(sessions.answers_to(NetworkId::new(2).unwrap(), &arrived), None);
        sessions.came_up(&arrivals);
        sessions.came_up(&Flow { src: ELSEWHERE, ..arrivals });
        assert_eq!(sessions.fresh(), HashSet::from([arrivals]));
        // A restarted program has the port before the end of its connection before is known.
        assert!(sessions.admit(2, session(7001)));
        sessions.end(1);
        assert_eq!(sessions.between(network, OWN, PEER), [there]);
        assert!(sessions.answers_to(network, &arrived).is_some());
        sessions.end(2);
        sessions.end(2);
        assert_eq!(sessions.answers_to(network, &arrived), None);
        assert!(is_empty(&sessions));
    }

    #[test]
    fn a_peer_that_moves_has_one_session() {
        let sessions = SealedSessions::default();
        let moved = SealedSession { peer: (ELSEWHERE, PortId(6)), ..session(7001) };
        assert!(sessions.admit(1, session(7001)) && sessions.admit(1, moved));
        assert_eq!(sessions.between(NetworkId::DEFAULT, OWN, PEER), []);
        assert_eq!(sessions.between(NetworkId::DEFAULT, OWN, ELSEWHERE), [moved.out]);
        sessions.end(1);
        assert!(is_empty(&sessions));
    }

    #[test]
    fn one_station_leaves_room_for_others_and_goes_on_to_receive() {
        let sessions = SealedSessions::default();
        sessions.wake(std::thread::current());
        for port in 1..=OF_STATION_MAX as u16 + 9 {
            assert!(sessions.admit(1, session(port)), "its packets are received");
        }
        assert_eq!(sessions.between(NetworkId::DEFAULT, OWN, PEER).len(), OF_STATION_MAX);
        let last = session(OF_STATION_MAX as u16 + 9).out.reversed();
        assert!(sessions.answers_to(NetworkId::DEFAULT, &frame(OWN, PEER, last)).is_some());
        let other = SealedSession { own: (ELSEWHERE, PortId(1)), ..session(1) };
        assert!(sessions.admit(2, other));
        assert_eq!(sessions.between(NetworkId::DEFAULT, ELSEWHERE, PEER).len(), 1);
        let from = |port| {
            let mut session = session(1);
            session.out.src.set_port(port);
            session
        };
        let admitted = (1..=ENDS_MAX as u16 + 5).filter(|port| sessions.admit(3, from(*port))).count();
        assert_eq!(admitted, ENDS_MAX, "an application receives at few places");
        (1..=3).for_each(|application| sessions.end(application));
        assert!(is_empty(&sessions));
    }
}
