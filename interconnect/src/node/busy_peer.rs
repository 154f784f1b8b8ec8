//! A socket of its own for the peer that sends a node most datagrams.
//!
//! One socket serves all peers, so the kernel looks up the route of each packet, on its way out and on its way in. A socket that is connected
//! to a peer remembers both: 8 bytes take 0.5 to 0.8 us less in one direction (docs/lab-notes/2026-11-27-interconnect-bars.md). It has the
//! address and port of the node's socket, and the kernel delivers its peer's datagrams to it. Peers see no difference.
//!
//! A peer gets it for many datagrams in a row, and keeps it while others do not send more. Only datagrams count that the engine takes: strangers
//! neither get it nor take it away. There is one such socket because polling another one takes a tenth of a message's time.
//!
//! What waits in a socket is received before its successor is polled, so that nothing is lost or changes its order when peers change.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::udp::{prepare, set};

/// Datagrams in a row for which a peer gets the socket, and by which others have to exceed it to take it away.
const IN_A_ROW: u32 = 64;
/// One in so many polls polls the node's socket, too, if nothing was there at the last one.
const NODE_EVERY: u32 = 4;
/// Pause after the socket could not be opened.
const BARRED_NS: u64 = 10_000_000_000;
/// Time after connect(2) after which no more datagrams of other hosts can get into the peer's socket.
const SETTLED_NS: u64 = 100_000_000;
/// A port of the own address from which no program sends (tcpmux).
const NOBODY: u16 = 1;

/// The socket that had a datagram: the node's, the busiest peer's, or that of an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Node,
    Peer,
    Retired,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Open(SocketAddr),
    Retire,
    /// The socket of an earlier peer is empty.
    Close,
}

#[derive(Default)]
pub(super) struct BusyPeer {
    connected: Option<(UdpSocket, SocketAddr)>,
    /// The socket of an earlier peer, and whether it is empty.
    retired: Option<(UdpSocket, bool)>,
    /// The last sender at the node's socket, and how many of its datagrams came in a row.
    row: (Option<SocketAddr>, u32),
    /// By how many datagrams others exceed the peer.
    others: u32,
    polls: u32,
    /// The node's socket had something when it was polled last.
    node_has_more: bool,
    /// What came for the peer before it had a socket may still be in the node's.
    is_new: bool,
    /// All datagrams in the peer's socket are the peer's: those of others, from before it was connected, have been received.
    has_only_peers: bool,
    /// Times when the peer's socket was connected, and when `change` was called last.
    opened_at: u64,
    changed_at: u64,
    /// Sender and place of the last datagram.
    last: Option<(SocketAddr, Place)>,
    barred_until: u64,
}

impl BusyPeer {
    /// The sockets to poll for a datagram, in order; `node`: the node's socket. `all`: there may be no further poll soon.
    pub(super) fn sockets(&mut self, node: RawFd, all: bool) -> [Option<(RawFd, Place)>; 2] {
        if let Some((socket, false)) = &self.retired {
            return [Some((socket.as_raw_fd(), Place::Retired)), None];
        }
        self.polls = self.polls.wrapping_add(1);
        let node = Some((node, Place::Node));
        let Some((socket, _)) = &self.connected else { return [node, None] };
        let polls_node = all || self.is_new || self.node_has_more || self.polls.is_multiple_of(NODE_EVERY);
        let peer = Some((socket.as_raw_fd(), Place::Peer));
        // Others come first in their turn, so that a busy peer keeps nobody waiting.
        if polls_node { [node, peer] } else { [peer, None] }
    }

    /// The sender of all datagrams in this socket, if it is known. Otherwise recvmsg(2) must report it (`msg_name`), which takes 0.2 to
    /// 0.5 us a datagram.
    pub(super) fn only_sender(&self, place: Place) -> Option<SocketAddr> {
        self.connected.as_ref().filter(|_| place == Place::Peer && self.has_only_peers).map(|(_, peer)| *peer)
    }

    /// recvmsg(2) found a socket empty (EAGAIN).
    pub(super) fn emptied(&mut self, place: Place) {
        self.has_only_peers |= place == Place::Peer && self.changed_at >= self.opened_at + SETTLED_NS;
    }

    /// A socket has reported an error. Retires the peer's if it is not connected any more (SOCK_DESTROY): datagrams of all hosts would
    /// arrive there.
    pub(super) fn check_connected(&mut self, place: Place) {
        let end = |address: SocketAddr| (address.ip(), address.port());
        let is_lost = |(socket, peer): &(UdpSocket, SocketAddr)| {
            place == Place::Peer && socket.peer_addr().ok().map(end) != Some(end(*peer))
        };
        if self.connected.as_ref().is_some_and(is_lost) {
            self.retire();
        }
    }

    /// A socket was polled, and had a datagram of this sender, or none. Returns whether the next one is polled.
    pub(super) fn polled(&mut self, place: Place, found: Option<SocketAddr>) -> bool {
        self.last = found.map(|from| (from, place));
        match (place, &mut self.retired) {
            (Place::Node, _) => {
                self.node_has_more = found.is_some();
                self.is_new &= found.is_some();
            }
            (Place::Retired, Some((_, is_empty))) => *is_empty = found.is_none(),
            _ => {}
        }
        found.is_none() && !self.is_new
    }

    /// The engine has taken the last datagram.
    pub(super) fn accepted(&mut self) {
        match (self.last, &self.connected) {
            (Some((from, Place::Node)), None) => {
                let count = if self.row.0 == Some(from) { self.row.1 + 1 } else { 1 };
                self.row = (Some(from), count);
            }
            (Some((from, Place::Node)), Some((_, peer))) if from != *peer => self.others += 1,
            (Some((_, Place::Peer)), _) => self.others = self.others.saturating_sub(1),
            _ => {}
        }
    }

    /// What is to be done.
    pub(super) fn change(&mut self, now: u64) -> Option<Change> {
        self.changed_at = now;
        match (&self.retired, &self.connected, self.row.0) {
            (Some((_, is_empty)), ..) => is_empty.then_some(Change::Close),
            (None, Some(_), _) => (self.others >= IN_A_ROW).then_some(Change::Retire),
            (None, None, Some(peer)) if self.row.1 >= IN_A_ROW && now >= self.barred_until => {
                Some(Change::Open(peer))
            }
            _ => None,
        }
    }

    /// The peer's socket, if this is the peer.
    pub(super) fn socket_to(&self, to: SocketAddr) -> Option<RawFd> {
        self.connected.as_ref().filter(|(_, peer)| *peer == to).map(|(socket, _)| socket.as_raw_fd())
    }

    /// Opens the socket of a peer, and has it `watched`.
    pub(super) fn open(
        &mut self,
        now: u64,
        node: &UdpSocket,
        peer: SocketAddr,
        watched: impl FnOnce(&UdpSocket) -> io::Result<()>,
    ) {
        (self.row, self.others) = ((None, 0), 0);
        let opened = connected(node, peer).and_then(|socket| watched(&socket).map(|()| socket));
        match opened {
            Ok(socket) => {
                (self.connected, self.opened_at) = (Some((socket, peer)), now);
                (self.is_new, self.has_only_peers) = (true, false);
            }
            Err(_) => self.barred_until = now + BARRED_NS,
        }
    }

    /// Takes the peer's socket away. What waits there can still be received.
    pub(super) fn retire(&mut self) {
        (self.row, self.others, self.is_new) = ((None, 0), 0, false);
        let Some((socket, _)) = self.connected.take() else { return };
        // Nothing more arrives there, also if a forked child holds a copy.
        if let Ok(mut own) = socket.local_addr() {
            own.set_port(NOBODY);
            let _ = socket.connect(own);
        }
        self.retired = Some((socket, false));
    }

    /// Takes the empty socket of an earlier peer away.
    pub(super) fn close(&mut self) -> Option<UdpSocket> {
        self.retired.take().map(|(socket, _)| socket)
    }

    #[cfg(test)]
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.connected.as_ref().map(|(_, peer)| *peer)
    }
}

/// A socket at the address and port of `node`, connected to `peer`. Datagrams of others may arrive until it is connected.
fn connected(node: &UdpSocket, peer: SocketAddr) -> io::Result<UdpSocket> {
    let family = if node.local_addr()?.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: a system call without memory.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
    if namespace(node)? != namespace(&socket)? {
        // The application has entered another network namespace since.
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    prepare(&socket)?;
    // Sockets of one user may have one address if they allow it while another one is bound. These two do only then, so that no other program can
    // join at other times.
    let ends = [fd, node.as_raw_fd()];
    let allow =
        |value| ends.iter().try_for_each(|end| set(*end, libc::SOL_SOCKET, libc::SO_REUSEPORT, value));
    let bound = allow(1).and_then(|()| Ok(rustix::net::bind(&socket, &node.local_addr()?)?));
    allow(0).and(bound)?;
    socket.connect(peer)?;
    Ok(socket)
}

/// Number of a socket's network namespace.
fn namespace(socket: &UdpSocket) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `cookie`, which has this length.
    let result = unsafe {
        let value = ptr::from_mut(&mut cookie).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, value, &mut len)
    };
    if result == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::node::{Endpoint, Node, Options};
    use crate::proto::{Match, Outgoing, Peer, Receive, Shape, Span, Status};

    const HOUR: u64 = 3_600_000_000_000;

    /// The node's socket has brought so many datagrams that the engine took.
    fn hear(busy: &mut BusyPeer, from: SocketAddr, place: Place, times: u32) {
        for _ in 0..times {
            busy.polled(place, Some(from));
            busy.accepted();
        }
    }

    /// What is received from the sockets that are polled.
    fn receive(busy: &mut BusyPeer, node: &UdpSocket) -> Option<(Vec<u8>, Place)> {
        let mut bytes = [0; 16];
        for (fd, place) in busy.sockets(node.as_raw_fd(), true).into_iter().flatten() {
            // SAFETY: the descriptor is that of an open socket, which outlives the call.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let found = rustix::net::recvfrom(fd, &mut bytes, rustix::net::RecvFlags::DONTWAIT).ok();
            let from = found.as_ref().and_then(|(_, _, from)| from.clone()?.try_into().ok());
            let goes_on = busy.polled(place, from);
            if let Some((len, ..)) = found {
                return Some((bytes[..len].to_vec(), place));
            }
            if !goes_on {
                return None;
            }
        }
        None
    }

    #[test]
    fn a_peer_gets_the_socket_for_a_row_and_loses_it_to_more_of_others() {
        let [node, peer, other] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let [own, from, stranger] = [&node, &peer, &other].map(|socket| socket.local_addr().unwrap());
        let mut busy = BusyPeer::default();
        for _ in 0..3 {
            hear(&mut busy, from, Place::Node, IN_A_ROW - 1);
            hear(&mut busy, stranger, Place::Node, 1);
            // The engine has not taken these.
            (0..2 * IN_A_ROW).for_each(|_| _ = busy.polled(Place::Node, Some(own)));
        }
        assert_eq!(busy.change(0), None, "others are between");
        hear(&mut busy, from, Place::Node, IN_A_ROW);
        assert_eq!(busy.change(0), Some(Change::Open(from)));
        // What came before the socket is received before what comes by it.
        peer.send_to(b"before", own).unwrap();
        busy.open(0, &node, from, |_| Ok(()));
        assert_eq!((busy.change(0), busy.socket_to(stranger), busy.peer()), (None, None, Some(from)));
        // Others may have sent to its socket before it was connected.
        busy.emptied(Place::Peer);
        busy.change(SETTLED_NS);
        busy.emptied(Place::Node);
        assert_eq!(busy.only_sender(Place::Peer), None);
        busy.emptied(Place::Peer);
        assert_eq!([Place::Peer, Place::Node].map(|place| busy.only_sender(place)), [Some(from), None]);
        peer.send_to(b"after", own).unwrap();
        other.send_to(b"other", own).unwrap();
        let expected = [("before", Place::Node), ("other", Place::Node), ("after", Place::Peer)];
        let mut found = vec![];
        while found.len() < expected.len() {
            found.extend(receive(&mut busy, &node));
        }
        assert_eq!(found, expected.map(|(text, place)| (text.as_bytes().to_vec(), place)));
        // One poll in four polls the node's socket, all do after it had something.
        busy.polled(Place::Node, None);
        let fd = node.as_raw_fd();
        let at_node = |busy: &mut BusyPeer, all| busy.sockets(fd, all)[0] == Some((fd, Place::Node));
        let polls = |busy: &mut BusyPeer, all| (0..8).filter(|_| at_node(busy, all)).count();
        assert_eq!((polls(&mut busy, false), polls(&mut busy, true)), (2, 8));
        busy.polled(Place::Node, Some(stranger));
        assert_eq!(polls(&mut busy, false), 8);
        for _ in 0..3 {
            hear(&mut busy, stranger, Place::Node, IN_A_ROW - 1);
            hear(&mut busy, from, Place::Peer, IN_A_ROW);
        }
        assert_eq!(busy.change(0), None, "the peer is as busy");
        hear(&mut busy, stranger, Place::Node, IN_A_ROW);
        assert_eq!(busy.change(0), Some(Change::Retire));
        peer.send_to(b"late", own).unwrap();
        busy.retire();
        assert_eq!(busy.only_sender(Place::Retired), None);
        peer.send_to(b"again", own).unwrap();
        assert_eq!(busy.change(0), None, "what waits is taken first");
        assert_eq!(receive(&mut busy, &node), Some((b"late".to_vec(), Place::Retired)));
        assert_eq!(receive(&mut busy, &node), None);
        assert_eq!(busy.change(0), Some(Change::Close));
        let copy = busy.close().unwrap();
        assert_eq!(
            receive(&mut busy, &node),
            Some((b"again".to_vec(), Place::Node)),
            "not by a child's copy"
        );
        drop(copy);
        busy.open(0, &node, from, |_| Ok(()));
        assert_eq!((busy.peer(), busy.only_sender(Place::Peer)), (Some(from), None));
    }

    #[test]
    fn a_socket_that_is_not_connected_any_more_is_retired() {
        let [node, peer, stranger] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let [own, from] = [&node, &peer].map(|socket| socket.local_addr().unwrap());
        let mut busy = BusyPeer::default();
        busy.open(0, &node, from, |_| Ok(()));
        busy.change(SETTLED_NS);
        busy.emptied(Place::Peer);
        busy.check_connected(Place::Peer);
        assert_eq!(busy.only_sender(Place::Peer), Some(from), "an error of another kind");
        // As SOCK_DESTROY does.
        let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
        let len = size_of_val(&nobody) as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of `nobody`, which has this length.
        let done = unsafe { libc::connect(busy.socket_to(from).unwrap(), &raw const nobody, len) };
        assert_eq!(done, 0);
        stranger.send_to(b"stranger", own).unwrap();
        busy.check_connected(Place::Node);
        assert_eq!(busy.peer(), Some(from));
        busy.check_connected(Place::Peer);
        assert_eq!((busy.peer(), busy.only_sender(Place::Retired)), (None, None));
        assert_eq!(receive(&mut busy, &node), Some((b"stranger".to_vec(), Place::Retired)));
    }

    #[test]
    fn what_cannot_be_opened_is_tried_again_later() {
        let [node, peer] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let from = peer.local_addr().unwrap();
        let mut busy = BusyPeer::default();
        busy.open(7, &node, from, |_| Err(io::ErrorKind::OutOfMemory.into()));
        hear(&mut busy, from, Place::Node, IN_A_ROW);
        assert_eq!((busy.peer(), busy.change(8)), (None, None));
        assert_eq!(busy.change(HOUR), Some(Change::Open(from)));
    }

    #[test]
    fn no_other_program_shares_the_address() {
        let [node, peer] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let own = node.local_addr().unwrap();
        let mut busy = BusyPeer::default();
        for option in [libc::SO_REUSEPORT, libc::SO_REUSEADDR] {
            busy.open(0, &node, peer.local_addr().unwrap(), |_| Ok(()));
            assert!(busy.peer().is_some());
            let family = rustix::net::AddressFamily::INET;
            let thief = rustix::net::socket(family, rustix::net::SocketType::DGRAM, None).unwrap();
            set(thief.as_raw_fd(), libc::SOL_SOCKET, option, 1).unwrap();
            assert_eq!(rustix::net::bind(&thief, &own), Err(rustix::io::Errno::ADDRINUSE));
            busy.retire();
            drop(busy.close());
        }
        assert_eq!(UdpSocket::bind(own).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    fn open() -> (Node, Endpoint, Peer) {
        let options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
        let node = Node::open(&Options { meeting: None, ..options }).unwrap();
        let endpoint = node.endpoint(Some(0)).unwrap();
        let peer = Peer { address: node.address(), endpoint: 0 };
        (node, endpoint, peer)
    }

    fn post(from: &Endpoint, to: Peer) {
        let (shape, span) = (Shape::Message { tag: None }, Span::EMPTY);
        let out = Outgoing { shape, span, data: None, context: 2, is_buffered: false, is_quiet: false };
        from.post(to, &out).unwrap();
    }

    fn post_receive(to: &Endpoint) {
        let matching = Match { tag: None, from: None };
        let receive = Receive { matching, span: Span::EMPTY, context: 1, several: None };
        to.post_receive(&receive).unwrap();
    }

    /// Messages to and fro.
    fn talk(a: (&Endpoint, Peer), b: (&Endpoint, Peer), times: u32) {
        for _ in 0..times {
            for ((from, _), (to, at)) in [(a, b), (b, a)] {
                post_receive(to);
                post(from, at);
                let begin = Instant::now();
                let mut done = 0;
                // Both go on: the receiver still has to acknowledge.
                while done < 2 {
                    assert!(begin.elapsed().as_secs() < 60);
                    for completion in [to.poll(), from.poll()].into_iter().flatten() {
                        assert_eq!(completion.status, Status::Success);
                        done += 1;
                    }
                }
            }
        }
    }

    #[test]
    fn nodes_talk_whoever_is_busy_and_wake_for_everybody() {
        let ((node, a, to_a), (_b_node, b, to_b), (_c_node, c, to_c)) = (open(), open(), open());
        talk((&a, to_a), (&b, to_b), 3 * IN_A_ROW);
        assert_eq!(node.busy_peer(), Some(to_b.address));
        // A sleeping thread wakes for the peer and for others.
        for (from, other) in [(&c, to_c), (&b, to_b), (&c, to_c)] {
            post_receive(&a);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(20));
                    post(from, to_a);
                });
                let begin = Instant::now();
                let arrived = a.wait(Some(Duration::from_secs(60))).unwrap();
                assert_eq!((arrived.status, arrived.peer), (Status::Success, other));
                assert!(begin.elapsed() < Duration::from_secs(30));
            });
            assert_eq!(from.wait(Some(Duration::from_secs(60))).unwrap().status, Status::Success);
        }
        for _ in 0..IN_A_ROW {
            talk((&a, to_a), (&b, to_b), 1);
            talk((&a, to_a), (&c, to_c), 1);
        }
        assert_eq!(node.busy_peer(), Some(to_b.address), "it is as busy as the other");
        talk((&a, to_a), (&c, to_c), 4 * IN_A_ROW);
        assert_eq!(node.busy_peer(), Some(to_c.address));
        talk((&a, to_a), (&b, to_b), 2);
    }
}
