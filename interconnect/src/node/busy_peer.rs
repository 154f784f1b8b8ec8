//! A socket of its own for the peer with which a node exchanges most datagrams.
//!
//! One socket serves all peers, so the kernel looks up the route of each packet, on its way out and on its way in. A socket that is connected
//! to a peer remembers both: 8 bytes take 0.7 us less in one direction (docs/lab-notes/2026-11-27-interconnect-bars.md). It has the address
//! and port of the node's socket, and the kernel prefers it for what comes from its peer. Peers see no difference.
//!
//! The peer that has sent many datagrams in a row gets it, and loses it when others have sent many. More sockets would take more looks, each of
//! which takes a tenth of a message's time.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use rustix::net::{RecvFlags, recv};

use super::udp::{prepare, set};

/// Datagrams in a row for which a peer gets the socket, and datagrams of others for which it loses it.
const IN_A_ROW: u32 = 64;
/// One in so many looks goes to the node's socket, too.
const LOOKS: u32 = 4;

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Open(SocketAddr),
    Close,
}

#[derive(Default)]
pub(super) struct BusyPeer {
    connected: Option<(UdpSocket, SocketAddr)>,
    /// The last sender at the node's socket, and how many of its datagrams came in a row.
    row: (Option<SocketAddr>, u32),
    /// Datagrams at the node's socket since the peer's last one.
    others: u32,
    looks: u32,
    change: Option<Change>,
    /// It cannot be opened.
    is_barred: bool,
}

impl BusyPeer {
    /// A datagram came by the node's socket.
    pub(super) fn heard_other(&mut self, from: SocketAddr) {
        if self.connected.is_some() {
            self.others += 1;
            self.change = (self.others >= IN_A_ROW).then_some(Change::Close);
            return;
        }
        self.row = if self.row.0 == Some(from) { (Some(from), self.row.1 + 1) } else { (Some(from), 1) };
        self.change = (self.row.1 >= IN_A_ROW && !self.is_barred).then_some(Change::Open(from));
    }

    /// A datagram came by the peer's socket.
    pub(super) fn heard(&mut self) {
        self.others = 0;
    }

    /// Counts a look for datagrams. Returns whether the node's socket is looked at, too.
    pub(super) fn looks_at_others(&mut self) -> bool {
        self.looks = self.looks.wrapping_add(1);
        self.connected.is_none() || self.looks.is_multiple_of(LOOKS)
    }

    /// What is to be done.
    pub(super) fn change(&self) -> Option<Change> {
        self.change
    }

    /// The peer's socket.
    pub(super) fn socket(&self) -> Option<&UdpSocket> {
        self.connected.as_ref().map(|(socket, _)| socket)
    }

    #[cfg(test)]
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.connected.as_ref().map(|(_, peer)| *peer)
    }

    /// The peer's socket, if this is the peer.
    pub(super) fn socket_to(&self, to: SocketAddr) -> Option<RawFd> {
        self.connected.as_ref().filter(|(_, peer)| *peer == to).map(|(socket, _)| socket.as_raw_fd())
    }

    /// Opens the socket of a peer, and has it `watched`.
    pub(super) fn open(
        &mut self,
        node: &UdpSocket,
        peer: SocketAddr,
        watched: impl FnOnce(&UdpSocket) -> io::Result<()>,
    ) {
        (self.row, self.others, self.change) = ((None, 0), 0, None);
        let opened = connected(node, peer).and_then(|socket| watched(&socket).map(|()| socket));
        // What failed once would fail again.
        self.is_barred = opened.is_err();
        self.connected = opened.ok().map(|socket| (socket, peer));
    }

    /// Takes the peer's socket away, if nothing waits there.
    pub(super) fn close(&mut self) -> Option<UdpSocket> {
        (self.row, self.others, self.change) = ((None, 0), 0, None);
        let (socket, _) = self.connected.take_if(|(socket, _)| !has_datagram(socket))?;
        // A forked child may hold a copy, which must not receive for the peer any more. Only from itself does nothing ever come.
        let itself = socket.local_addr().and_then(|own| socket.connect(own));
        itself.ok().map(|()| socket)
    }
}

fn has_datagram(socket: &UdpSocket) -> bool {
    recv(socket, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok()
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
    // Two sockets may have one address if both allow it while the second is bound. Only then: it stays closed to other programs.
    set(node.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    let bound = set(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).and_then(|()| bind(&socket, node));
    let closed = set(node.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 0);
    bound.and(closed)?;
    set(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 0)?;
    socket.connect(peer)?;
    prepare(&socket)?;
    Ok(socket)
}

fn bind(socket: &UdpSocket, node: &UdpSocket) -> io::Result<()> {
    Ok(rustix::net::bind(socket, &node.local_addr()?)?)
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
    use super::*;
    use crate::node::{Endpoint, Node, Options};
    use crate::proto::{Match, Outgoing, Peer, Receive, Shape, Span, Status};

    #[test]
    fn a_peer_gets_the_socket_after_many_datagrams_and_loses_it_to_others() {
        let [node, peer, other] = [(); 3].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let [own, from, stranger] = [&node, &peer, &other].map(|socket| socket.local_addr().unwrap());
        let mut busy = BusyPeer::default();
        for _ in 0..3 {
            (1..IN_A_ROW).for_each(|_| busy.heard_other(from));
            busy.heard_other(stranger);
        }
        assert_eq!(busy.change(), None, "others are between");
        (0..IN_A_ROW).for_each(|_| busy.heard_other(from));
        assert_eq!(busy.change(), Some(Change::Open(from)));
        busy.open(&node, from, |_| Ok(()));
        assert_eq!((busy.change(), busy.socket_to(stranger)), (None, None));
        assert!(busy.socket_to(from).is_some());
        assert_eq!((0..8).filter(|_| busy.looks_at_others()).count(), 2);
        // The kernel sorts what arrives; other programs cannot share the address.
        peer.send_to(b"peer", own).unwrap();
        other.send_to(b"other", own).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(busy.socket().unwrap().recv_from(&mut bytes).unwrap(), (4, from));
        assert_eq!(node.recv_from(&mut bytes).unwrap(), (5, stranger));
        assert_eq!(UdpSocket::bind(own).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        for _ in 0..3 {
            (1..IN_A_ROW).for_each(|_| busy.heard_other(stranger));
            busy.heard();
        }
        assert_eq!(busy.change(), None, "the peer is still busy");
        (0..IN_A_ROW).for_each(|_| busy.heard_other(stranger));
        assert_eq!(busy.change(), Some(Change::Close));
        peer.send_to(b"late", own).unwrap();
        assert!(busy.close().is_none(), "what waits is taken first");
        assert_eq!(busy.socket().unwrap().recv_from(&mut bytes).unwrap(), (4, from));
        let copy = busy.close().unwrap();
        peer.send_to(b"again", own).unwrap();
        assert_eq!(node.recv_from(&mut bytes).unwrap(), (5, from), "not by the copy of a child");
        drop(copy);
        // What cannot be watched is not used, and not tried again.
        busy.open(&node, from, |_| Err(io::ErrorKind::OutOfMemory.into()));
        (0..2 * IN_A_ROW).for_each(|_| busy.heard_other(from));
        assert!(busy.socket().is_none() && busy.change().is_none());
    }

    #[test]
    fn another_program_cannot_take_the_address_by_reuse() {
        let [node, peer] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let mut busy = BusyPeer::default();
        busy.open(&node, peer.local_addr().unwrap(), |_| Ok(()));
        let family = rustix::net::AddressFamily::INET;
        let thief = rustix::net::socket(family, rustix::net::SocketType::DGRAM, None).unwrap();
        set(thief.as_raw_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).unwrap();
        let stolen = rustix::net::bind(&thief, &node.local_addr().unwrap());
        assert_eq!(stolen, Err(rustix::io::Errno::ADDRINUSE));
    }

    fn open() -> (Node, Endpoint, Peer) {
        let options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
        let node = Node::open(&Options { meeting: None, ..options }).unwrap();
        let endpoint = node.endpoint(Some(0)).unwrap();
        let peer = Peer { address: node.address(), endpoint: 0 };
        (node, endpoint, peer)
    }

    /// Messages to and fro.
    fn talk(a: (&Endpoint, Peer), b: (&Endpoint, Peer), times: u32) {
        for _ in 0..times {
            for ((from, _), (to, at)) in [(a, b), (b, a)] {
                let matching = Match { tag: None, from: None };
                let receive = Receive { matching, span: Span::EMPTY, context: 1, several: None };
                to.post_receive(&receive).unwrap();
                let (shape, span) = (Shape::Message { tag: None }, Span::EMPTY);
                let (is_buffered, is_quiet) = (false, false);
                let out = Outgoing { shape, span, data: None, context: 2, is_buffered, is_quiet };
                from.post(at, &out).unwrap();
                let begin = std::time::Instant::now();
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
    fn nodes_talk_whoever_is_busy() {
        let ((node, a, to_a), (_b_node, b, to_b), (_c_node, c, to_c)) = (open(), open(), open());
        talk((&a, to_a), (&b, to_b), 3 * IN_A_ROW);
        assert_eq!(node.busy_peer(), Some(to_b.address));
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
