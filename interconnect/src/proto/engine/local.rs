//! Channels between processes of one host, whose packets travel through shared memory in place of the network.
//!
//! The engine knows nothing of that memory: the process gets it from the daemon of its host. The elder of two engines invites the
//! younger one, by a packet on the open channel with the name by which the daemon knows the elder and a secret of this channel. The
//! younger process shows both to its daemon. Only if both processes have the same daemon does it know the name; then it
//! gives both ends of the memory to the two. So whoever holds the channel gets the memory, and no address is compared.
//!
//! Invitations are repeated while the channel is in use, because daemons restart, and because packets get lost.

use std::net::SocketAddr;

use super::super::channel::Channel;
use super::super::memory::{Key, Span};
use super::super::status::Status;
use super::super::wire::{Body, Header, Invite, Write, flags};
use super::super::write_order::WriteNotice;
use super::Engine;
use super::messages::Admitted;
use super::streams::STREAM;

/// Maximum size in bytes of a packet through shared memory: that of a UDP datagram, because a packet can take the socket if the
/// memory is full or gone.
pub const LOCAL_PACKET_MAX: usize = 65_507;
/// Maximum number of invitations that wait for the process.
const INVITES_MAX: usize = 64;
/// Pause after each invitation; the last one repeats.
const PAUSES_NS: [u64; 4] = [20_000_000, 200_000_000, 2_000_000_000, 10_000_000_000];

impl Engine {
    /// Sets the name by which this host's daemon knows the process; `None`: there is no daemon.
    pub fn set_name(&mut self, name: Option<[u8; 16]>) {
        self.name = name;
        for number in self.channels.numbers(|channel| channel.local.is_none()) {
            if let Some(channel) = self.channels.get_mut(number) {
                (channel.invites, channel.invite_at) = (0, 0);
                self.make_ready(number);
            }
        }
    }

    /// Returns the channel's invitation if it is due.
    pub(super) fn invitation(&mut self, now: u64, number: u32) -> Option<Header> {
        let name = self.name?;
        let channel = self.channels.get_mut(number)?;
        let peer = channel.peer?;
        let is_elder = (self.epoch, channel.session) < (peer.epoch, peer.session);
        if !is_elder || channel.local.is_some() || channel.is_unproven() || now < channel.invite_at {
            return None;
        }
        channel.invite_at = now + PAUSES_NS[(channel.invites as usize).min(PAUSES_NS.len() - 1)];
        channel.invites = channel.invites.saturating_add(1);
        let body = Body::Invite(Invite { name, secret: channel.secret });
        Some(Header { flags: 0, failures: 0, session: peer.session, number: 0, ack: 0, map: None, body })
    }

    pub(super) fn take_invite(&mut self, from: SocketAddr, session: u32, invite: Invite) {
        let known = self.channel_of(session, from).and_then(|number| self.channels.get(number));
        match known {
            None => self.counters.unknown += 1,
            Some(_) if invite.name == STREAM => self.take_stream_invite(from, invite.secret),
            Some(channel) if channel.local.is_none() && self.invites.len() < INVITES_MAX => {
                self.invites.push_back((from, invite));
            }
            Some(_) => {}
        }
    }

    /// Returns the next invitation of a peer to shared memory, and the peer's address.
    pub fn next_invite(&mut self) -> Option<(SocketAddr, Invite)> {
        self.invites.pop_front()
    }

    /// Address of the peer that this engine has invited with `secret` and whose packets do not travel through shared memory yet.
    pub fn invited(&self, secret: &[u8; 16]) -> Option<SocketAddr> {
        let is_meant =
            |channel: &&Channel| channel.local.is_none() && channel.invites > 0 && channel.secret == *secret;
        self.channels.iter().find(is_meant).map(|channel| channel.address)
    }

    /// From now on the packets of the channel to `address` travel through shared memory that holds `window` bytes, or through the
    /// network again. Returns false if there is no such channel.
    pub fn set_local(&mut self, address: SocketAddr, window: Option<u64>) -> bool {
        let Some(number) = self.addresses.get(&address).copied() else { return false };
        let Some(channel) = self.channels.get_mut(number).filter(|channel| channel.peer.is_some()) else {
            return false;
        };
        match (window, channel.local) {
            (Some(_), None) => {
                channel.local = Some(channel.datagram);
                if self.config.has_fragments {
                    channel.datagram = LOCAL_PACKET_MAX;
                }
            }
            (None, Some(datagram)) => {
                (channel.local, channel.datagram) = (None, datagram);
                (channel.invites, channel.invite_at) = (0, self.now + PAUSES_NS[0]);
            }
            _ => return true,
        }
        channel.window.set_lossless(window);
        if let Some(peer) = channel.peer.filter(|_| window.is_none()) {
            channel.window.limit(u64::from(peer.window));
        }
        self.make_ready(number);
        true
    }

    /// Whether an open channel's packets to `address` travel through shared memory.
    pub fn is_local(&self, address: SocketAddr) -> bool {
        let number = self.addresses.get(&address);
        number.and_then(|number| self.channels.get(*number)).is_some_and(|channel| channel.local.is_some())
    }

    /// Number of channels that have been closed since the start of the engine.
    pub fn closed(&self) -> u64 {
        self.closed
    }

    /// Processes a packet that arrived through memory shared with the peer at `from`. `packet` is a private copy. `placed` is the
    /// payload of a write or of pulled data in the shared memory: its bytes may change at any time, and are copied once.
    /// Returns false if the packet does not belong on this way: the memory is not to be used any more.
    pub fn receive_local(&mut self, now: u64, from: SocketAddr, packet: &[u8], placed: Option<Span>) -> bool {
        let Some((header, payload)) = self.decode(now, packet) else { return false };
        let is_bulk = matches!(header.body, Body::Write(_) | Body::Data(_));
        if placed.is_some() && (!is_bulk || !payload.is_empty()) {
            self.counters.malformed += 1;
            return false;
        }
        let number = self.addresses.get(&from).copied();
        let Some(channel) = number.and_then(|number| self.channels.get(number)) else { return false };
        let peer_session = channel.peer.map(|peer| peer.session);
        match header.body {
            Body::Hello(_) | Body::Welcome(_) | Body::Invite(_) => return false,
            Body::Reset if peer_session == Some(header.session) => {
                number.into_iter().for_each(|number| self.fail_channel(number, Status::PeerRestarted));
                return false;
            }
            Body::Reset => return false,
            _ => {}
        }
        let Some(channel) = self.channel_of(header.session, from) else {
            self.counters.unknown += 1;
            return false;
        };
        self.take(channel, &header, payload, placed, false);
        true
    }

    /// Whether a peer may have the memory of this region itself: it could read and write it anyway.
    pub fn may_share(&self, endpoint: u16, key: Key) -> bool {
        [true, false].into_iter().all(|write| self.memory.find(endpoint, key, 0, 0, write).is_ok())
    }

    /// Whether a region has this key.
    pub fn is_registered(&self, key: Key) -> bool {
        self.memory.has(key)
    }

    /// Handles a write whose bytes the peer has copied into the region itself. If the region was deregistered meanwhile, they are
    /// not there.
    pub(super) fn placed(&mut self, channel: u32, flags: u8, write: Write) {
        let len = u64::from(write.behind);
        if let Err(status) = self.memory.find(write.to, write.key, write.at, len, true) {
            self.counters.bad_keys += 1;
            return self.fail_operation(channel, write.op, status);
        }
        let name = (write.to, write.seq, write.op);
        if flags & flags::DATA != 0 && self.admit(channel, flags, name, &Admitted::Write) {
            self.arrival(channel, write.to, &WriteNotice { from: write.from, data: write.data, len });
        }
    }
}
