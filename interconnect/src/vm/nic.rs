//! A guest's interface, as the daemon's side of the guest needs it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::wire::{Run, Token};
use crate::daemon::{Datagrams, GuestFrame, Lent, MacAddress};
use crate::meeting::{KeyRequest, Keys, Reach};

/// The two ends of a session on the LAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stations {
    /// Source address of the guest's packets, and the MAC address of its device.
    pub own: (IpAddr, MacAddress),
    /// MAC address of the peer; `None`: it is not known yet.
    pub peer: Option<MacAddress>,
}

/// A guest's interface, as the daemon gives it.
pub trait Nic: Send + Sync {
    /// Delivers a control frame to the guest. It may be lost.
    fn tell(&self, frame: &[u8]);

    /// Maps pages of the guest behind each other; `None` if they are not the guest's, or cannot be mapped.
    fn lend(&self, runs: &[Run]) -> Option<Arc<dyn Lent>>;

    /// Takes the datagrams to this address, which is not checked: nobody but the guest loses them.
    ///
    /// # Errors
    /// Taken (`AddrInUse`), or no descriptors.
    fn open(&self, address: SocketAddr) -> io::Result<Box<dyn Datagrams>>;

    /// Delivers a frame to the open port of its destination address, as from the guest itself. Returns false if no port is open, or if its queue is full.
    fn inject(&self, frame: GuestFrame) -> bool;

    /// MTU of the interface in bytes.
    fn mtu(&self) -> usize;

    /// How packets between these stations leave this host.
    fn reach(&self, stations: &Stations) -> Reach;

    /// Keys of a session between the engine `name` and its peer. They never reach the guest.
    ///
    /// # Errors
    /// How the peer is reached, if not by a sealed link with keys.
    fn keys(&self, name: Token, stations: &Stations, request: &KeyRequest) -> Result<Keys, Reach>;

    /// An engine that got keys is gone.
    fn gone(&self, name: Token);
}
