//! The wire of a node: a UDP socket, or a packet socket at an Ethernet device.

use std::net::{SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;

use super::Error;
use super::local::Local;
use super::socket::{Socket, datagram_to, segments_mut};
use super::streams;
use crate::ether;
use crate::ether::address::{Bind, mac_of};
use crate::proto::Departure;
use crate::seal::Session;

/// A packet that arrived, its sender, and whether it was marked by ECN.
pub(super) struct Arrival<'a> {
    pub(super) from: SocketAddr,
    pub(super) packet: &'a mut [u8],
    pub(super) congestion: bool,
}

pub(super) enum Wire {
    Udp(Socket),
    Ethernet(ether::Socket),
}

/// Binds the wire, and the TCP port of the same number if the node is to listen. If that port is taken, tries other UDP ports, unless the
/// caller wants a certain one.
pub(super) fn bind(to: &Bind, listens: bool) -> Result<(Wire, SocketAddr, Option<TcpListener>), Error> {
    const ATTEMPTS: usize = 8;
    let mut attempts = if matches!(to, Bind::Udp(address) if address.port() == 0) { ATTEMPTS } else { 1 };
    loop {
        let wire = Wire::bind(to)?;
        let address = wire.address().map_err(|error| Error::socket(to, error))?;
        let is_wanted = listens && matches!(wire, Wire::Udp(_));
        let listener = if is_wanted { streams::listen(address).ok() } else { None };
        attempts -= 1;
        if !is_wanted || listener.is_some() || attempts == 0 {
            return Ok((wire, address, listener));
        }
    }
}

impl Wire {
    pub(super) fn bind(bind: &Bind) -> Result<Self, Error> {
        match bind {
            Bind::Udp(address) => {
                Socket::bind(*address).map(Wire::Udp).map_err(|error| Error::Socket(*address, error))
            }
            Bind::Ethernet { device, port } => ether::Socket::bind(device, *port)
                .map(Wire::Ethernet)
                .map_err(|refusal| Error::Device(device.clone(), refusal)),
        }
    }

    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        match self {
            Wire::Udp(socket) => socket.address(),
            Wire::Ethernet(socket) => Ok(socket.address()),
        }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Wire::Udp(socket) => socket.as_fd(),
            Wire::Ethernet(socket) => socket.as_fd(),
        }
    }

    /// Number of packet bytes that fit into the receive buffer.
    pub(super) fn receive_room(&self) -> usize {
        match self {
            Wire::Udp(socket) => socket.receive_room(),
            Wire::Ethernet(socket) => socket.receive_room(),
        }
    }

    /// Size of the largest packet in bytes, if it is the same for all peers.
    pub(super) fn packet_max(&self) -> Option<usize> {
        match self {
            Wire::Udp(_) => None,
            Wire::Ethernet(socket) => Some(socket.packet_max()),
        }
    }

    /// Size of the largest packet to this address in bytes. Without a route `default` is as good as any: the peer is later reported as
    /// unreachable.
    ///
    /// # Errors
    /// The address belongs to another kind of wire.
    pub(super) fn packet_to(&self, address: SocketAddr, default: usize) -> Result<usize, Error> {
        match self {
            Wire::Udp(_) if mac_of(address).is_some() => Err(Error::OtherWire(address)),
            Wire::Udp(_) => Ok(datagram_to(address).unwrap_or(default)),
            Wire::Ethernet(socket) if socket.reaches(address) => Ok(socket.packet_max()),
            Wire::Ethernet(socket) if mac_of(address) == mac_of(socket.address()) => {
                Err(Error::OwnDevice(address))
            }
            Wire::Ethernet(_) => Err(Error::OtherWire(address)),
        }
    }

    /// Opens or closes the socket of the busiest peer, as what arrived has shown. `local` watches it.
    pub(super) fn settle(&mut self, now: u64, local: &Local) {
        let Wire::Udp(socket) = self else { return };
        socket.settle(now, |descriptor, begins| {
            if begins {
                return local.watch(descriptor);
            }
            local.unwatch(descriptor);
            Ok(())
        });
    }

    /// The engine has taken what was received last.
    pub(super) fn accepted(&mut self) {
        if let Wire::Udp(socket) = self {
            socket.accepted();
        }
    }

    /// Receives without blocking, and gives each packet to `take`. Returns whether any was there. Unless it polls `all` sockets, it may
    /// miss some, which a later call finds.
    pub(super) fn receive(&mut self, all: bool, mut take: impl FnMut(Arrival<'_>)) -> bool {
        match self {
            Wire::Udp(socket) => {
                let Some(mut received) = socket.receive(all) else { return false };
                let (from, congestion) = (received.from, received.congestion);
                segments_mut(&mut received).for_each(|packet| take(Arrival { from, packet, congestion }));
                true
            }
            Wire::Ethernet(socket) => {
                socket.receive(|from, packet| take(Arrival { from, packet, congestion: false }))
            }
        }
    }

    /// Queues a packet. `flush` sends what is queued.
    pub(super) fn send(&mut self, packet: &Departure) {
        match self {
            Wire::Udp(socket) => socket.send(packet),
            Wire::Ethernet(socket) => socket.send(packet),
        }
    }

    /// Like `send`, but seals the packet. Packets in Ethernet frames are never sealed, so there is no session for them.
    pub(super) fn send_sealed(&mut self, packet: &Departure, session: &mut Session) {
        match self {
            Wire::Udp(socket) => socket.send_sealed(packet, session),
            Wire::Ethernet(socket) => socket.refused += 1,
        }
    }

    /// Sends a packet of whole bytes.
    pub(super) fn send_alone(&mut self, to: SocketAddr, packet: &[u8]) {
        match self {
            Wire::Udp(socket) => socket.send_alone(to, packet),
            Wire::Ethernet(socket) => {
                socket.send_bytes(to, packet);
                socket.flush();
            }
        }
    }

    pub(super) fn flush(&mut self) {
        match self {
            Wire::Udp(socket) => socket.flush(),
            Wire::Ethernet(socket) => socket.flush(),
        }
    }
}
