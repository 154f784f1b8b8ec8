//! Sealing for a served process: its packets to peers behind sealed links are sealed as the process engine does it (`seal/`), with the same
//! sessions and the same packets.
//!
//! The engine asks the daemon's meeting point like a process of the container, by a socket pair: the thread there looks up peers and derives
//! keys, so this one never waits. Keys stay in the daemon.
//!
//! It fails closed. Until the daemon has said how a peer is reached, packets to it wait or are lost; nothing but the daemon's answer lets them
//! leave in clear text, and the attachment ends with the connection.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use super::carrier::Carrier;
use crate::meeting::{Guest, Heard};
use crate::proto::{Departure, Engine};
use crate::seal::{OVERHEAD, SealCounters, Sealing, Way};

/// Interval at which the daemon's answers are read while one is awaited.
const HEAR_EVERY_NS: u64 = 20_000;
/// Peers whose datagram size is known. Beyond, all are forgotten; then the size that the peer names holds.
const SIZES_MAX: usize = 4096;

/// The sessions of a process, and how its engine gets keys.
pub(super) struct Seals {
    sealing: Sealing,
    /// The connection to the meeting point; `None`: the process has no sealed links, and nothing is sealed.
    daemon: Option<Guest>,
    /// Largest datagrams, as the process says, by peer.
    sizes: HashMap<SocketAddr, usize>,
    hear_at: u64,
}

impl Seals {
    /// For a process at this address whose engine asks `daemon`. Without it packets are left as they are.
    pub(super) fn new(own: SocketAddr, daemon: Option<Guest>, seed: [u8; 32]) -> Self {
        let mut sealing = Sealing::of_served(own, daemon.is_none(), seed);
        if daemon.is_some() {
            // From now on each peer is asked about; only `disconnected` would end that, and is never called.
            sealing.connected();
        }
        Self { sealing, daemon, sizes: HashMap::new(), hear_at: 0 }
    }

    /// Processes a packet that has arrived. Returns the packet of the protocol, if it is or contains one.
    pub(super) fn arrive<'a>(
        &'a mut self,
        now: u64,
        from: SocketAddr,
        packet: &'a mut [u8],
    ) -> Option<&'a [u8]> {
        // Without a connection to the meeting point nothing is sealed: the packet is as its sender made it.
        if self.daemon.is_none() {
            return Some(packet);
        }
        self.sealing.arrive(now, from, packet).map(|packet| &*packet)
    }

    /// Queues a packet, sealed if its peer is behind a sealed link. Returns the bytes that it takes; `None`: it waits, or is lost.
    pub(super) fn send(&mut self, now: u64, packet: &Departure, carrier: &mut Carrier) -> Option<usize> {
        let header = packet.header.as_bytes();
        let bytes = header.len() + packet.payload.len();
        match self.sealing.depart(now, packet.to, header, packet.payload) {
            Way::Clear => {
                carrier.send(packet);
                Some(bytes)
            }
            Way::Sealed(session) => {
                carrier.send_sealed(packet, session);
                Some(bytes + OVERHEAD)
            }
            Way::Held => None,
        }
    }

    /// Sends a packet that makes keys new, or that had to wait. Returns its bytes; `None`: there is none.
    pub(super) fn send_next(&mut self, carrier: &mut Carrier) -> Option<usize> {
        let (to, packet) = self.sealing.next_packet()?;
        carrier.send_alone(to, &packet);
        Some(packet.len())
    }

    /// Passes on the questions about peers.
    pub(super) fn ask(&mut self) {
        while let Some(ask) = self.sealing.next_ask() {
            if !self.daemon.as_ref().is_some_and(|daemon| daemon.say(ask)) {
                // The end of the connection is noticed when answers are read.
                return self.sealing.unheard();
            }
        }
    }

    /// Hears the daemon's answers, if one may be there or `is_due`, and tells the engine about new sessions.
    ///
    /// # Errors
    /// The daemon has ended the connection: nobody says any more what may leave in clear text.
    pub(super) fn hear(
        &mut self,
        now: u64,
        is_due: bool,
        engine: &mut Engine,
        datagram_max: usize,
    ) -> io::Result<()> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let may_be_there = is_due || self.sealing.is_waiting() && now >= self.hear_at;
        if !may_be_there {
            return Ok(());
        }
        self.hear_at = now + HEAR_EVERY_NS;
        while let Some(heard) = daemon.receive()? {
            match heard {
                Heard::Reached(peer, reach) => self.sealing.reached(now, peer, reach),
                Heard::Keys(ticket, answer) => self.sealing.keys(now, ticket, answer),
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        while let Some(address) = self.sealing.next_ready() {
            let datagram = self.sizes.get(&address).map_or(datagram_max, |size| datagram_max.min(*size));
            engine.limit_datagram(address, datagram.saturating_sub(OVERHEAD));
            engine.greet_again(address);
        }
        Ok(())
    }

    /// The process says how large datagrams to a peer may be. Returns how large the engine's packets may be.
    pub(super) fn set_size(&mut self, peer: SocketAddr, bytes: usize) -> usize {
        if self.sizes.len() >= SIZES_MAX {
            self.sizes.clear();
        }
        self.sizes.insert(peer, bytes);
        if self.is_sealed(peer) { bytes.saturating_sub(OVERHEAD) } else { bytes }
    }

    /// Whether packets to a peer are sealed.
    pub(super) fn is_sealed(&self, peer: SocketAddr) -> bool {
        self.sealing.is_sealed(peer)
    }

    /// The next line about what keeps packets from being sent.
    pub(super) fn next_note(&mut self) -> Option<String> {
        self.sealing.next_note()
    }

    pub(super) fn counters(&self) -> SealCounters {
        self.sealing.counters()
    }

    /// Readable when the daemon has answered, or has ended the connection.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.daemon.as_ref().map(Guest::descriptor)
    }
}
