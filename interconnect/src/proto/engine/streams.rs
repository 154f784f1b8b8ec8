//! Streams: TCP connections for pulled bytes, beside the datagrams of a channel. Where datagrams are small, a kernel copies the bytes of a
//! TCP connection in larger pieces, with less CPU time.
//!
//! The puller invites the peer by an INVITE on the open channel, with the channel's secret. The peer connects, both ends authenticate with
//! the secret, and the peer sends DATA through the connection: numbered and acknowledged like every packet, but larger, exempt from loss
//! detection while the connection lasts, and outside the congestion window. All other packets still take datagrams. Packets keep their
//! order, so a message waits for stream packets before it (head-of-line blocking, bounded by `STREAMING_MAX`). When a stream closes, its
//! unacknowledged bytes are cut again into datagrams, and a NOOP takes each packet number.
//!
//! The engine does no I/O. The node tells it which channels have a stream in which direction, and whether its send buffer has room
//! (`node/streams/`).

use std::net::{IpAddr, SocketAddr};

use super::super::channel::{Channel, What};
use super::super::wire::{Body, Header, Invite};
use super::Engine;

/// Name in an INVITE that stands for a stream instead of a process of the same host.
pub(super) const STREAM: [u8; 16] = *b"vnet-rdma-stream";
/// Streams are not faster than datagrams of this size, which only the loopback device has.
const DATAGRAM_ENOUGH: usize = 16 << 10;
/// Maximum number of invitations queued for the node.
const INVITES_MAX: usize = 64;
/// Minimum interval between connects to one peer.
const CONNECT_EVERY_NS: u64 = 100_000_000;
/// Backoff after a stream has closed.
const AVOIDED_NS: u64 = 60_000_000_000;
/// Backoff between invitations; the last value repeats.
const PAUSES_NS: [u64; 3] = [200_000_000, 2_000_000_000, 10_000_000_000];

impl Engine {
    /// Schedules an invitation if a pull of `bytes` is large enough for a stream.
    pub(super) fn want_stream(&mut self, number: u32, bytes: usize) {
        let now = self.now;
        if self.config.stream_min == 0 || bytes < self.config.stream_min {
            return;
        }
        let wants = |own: &&mut Channel| {
            own.datagram < DATAGRAM_ENOUGH
                && own.local.is_none()
                && !own.stream.is_incoming
                && now >= own.stream.invite_at
        };
        if let Some(own) = self.channels.get_mut(number).filter(wants) {
            own.stream.is_wanted = true;
            self.make_ready(number);
        }
    }

    /// Sends no invitation on the channel to `address` any more.
    pub fn refuse_streams(&mut self, address: SocketAddr) {
        let number = self.addresses.get(&address).copied();
        if let Some(own) = number.and_then(|number| self.channels.get_mut(number)) {
            (own.stream.is_wanted, own.stream.invite_at) = (false, u64::MAX);
        }
    }

    /// Ignores invitations of the peer at `address` for [`AVOIDED_NS`].
    pub fn avoid_streams(&mut self, address: SocketAddr) {
        let number = self.addresses.get(&address).copied();
        if let Some(own) = number.and_then(|number| self.channels.get_mut(number)) {
            own.stream.connects_at = self.now + AVOIDED_NS;
        }
    }

    /// Returns the scheduled invitation, if any.
    pub(super) fn stream_invitation(&mut self, now: u64, number: u32) -> Option<Header> {
        let channel =
            self.channels.get_mut(number).filter(|own| own.stream.is_wanted && !own.is_unproven())?;
        let peer = channel.peer?;
        let stream = &mut channel.stream;
        stream.is_wanted = false;
        stream.invite_at = now + PAUSES_NS[(stream.invites as usize).min(PAUSES_NS.len() - 1)];
        stream.invites = stream.invites.saturating_add(1);
        let body = Body::Invite(Invite { name: STREAM, secret: channel.secret });
        Some(Header { flags: 0, failures: 0, session: peer.session, number: 0, ack: 0, map: None, body })
    }

    pub(super) fn take_stream_invite(&mut self, from: SocketAddr, secret: [u8; 16]) {
        let now = self.now;
        if self.config.stream_min == 0 || self.stream_invites.len() >= INVITES_MAX {
            return;
        }
        let number = self.addresses.get(&from).copied();
        let Some(own) = number.and_then(|number| self.channels.get_mut(number)) else { return };
        if own.peer.is_some() && own.stream.outgoing.is_none() && now >= own.stream.connects_at {
            own.stream.connects_at = now + CONNECT_EVERY_NS;
            self.stream_invites.push_back((from, secret));
        }
    }

    /// Returns the next invitation to connect: the peer's address, and the secret.
    pub fn next_stream_invite(&mut self) -> Option<(SocketAddr, [u8; 16])> {
        self.stream_invites.pop_front()
    }

    /// Finds the invited peer by the first half of the secret. Returns its address, and the second half.
    pub fn invited_to_stream(&self, shown: &[u8; 8]) -> Option<(SocketAddr, [u8; 8])> {
        let is_meant = |own: &&Channel| own.stream.invites > 0 && own.secret.starts_with(shown);
        let own = self.channels.iter().find(is_meant)?;
        Some((own.address, *own.secret.last_chunk()?))
    }

    /// Whether any peer at this IP address was invited.
    pub fn has_invited(&self, ip: IpAddr) -> bool {
        let is_meant = |own: &Channel| own.stream.invites > 0 && own.address.ip().to_canonical() == ip;
        self.channels.iter().any(is_meant)
    }

    /// A stream from the peer at `address` was opened or closed. Returns false if there is no such channel.
    pub fn set_incoming_stream(&mut self, address: SocketAddr, is_open: bool) -> bool {
        let number = self.addresses.get(&address).copied();
        let Some(channel) = number.and_then(|number| self.channels.get_mut(number)) else { return false };
        channel.stream.is_incoming = is_open;
        channel.stream.invite_at = channel.stream.invite_at.max(self.now + PAUSES_NS[0]);
        true
    }

    /// State of the stream to the peer at `address`: open with or without room in its send buffer, or closed (`None`). Returns false if
    /// there is no such channel.
    pub fn set_outgoing_stream(&mut self, address: SocketAddr, has_room: Option<bool>) -> bool {
        let Some(number) = self.addresses.get(&address).copied() else { return false };
        let Some(channel) = self.channels.get_mut(number).filter(|channel| channel.peer.is_some()) else {
            return false;
        };
        match (channel.stream.outgoing, has_room) {
            (None, Some(_)) => channel.window.begin_stream(),
            (Some(_), None) => channel.end_outgoing_stream(),
            _ => {}
        }
        channel.stream.outgoing = has_room;
        self.make_ready(number);
        true
    }

    /// Whether the channel to `address` has an incoming and an outgoing stream.
    pub fn streams(&self, address: SocketAddr) -> (bool, bool) {
        let own = self.open_channel(address);
        own.map_or((false, false), |own| (own.stream.is_incoming, own.stream.outgoing.is_some()))
    }

    /// Whether bytes are pulled from the peer at `address`.
    pub fn is_pulling(&self, address: SocketAddr) -> bool {
        self.open_channel(address).is_some_and(|own| own.pulling > 0)
    }

    fn open_channel(&self, address: SocketAddr) -> Option<&Channel> {
        let channel = self.channels.get(*self.addresses.get(&address)?)?;
        channel.peer.map(|_| channel)
    }

    /// Processes a packet from a stream. Returns false if it is not DATA of this channel: the stream has to be closed.
    pub fn receive_stream(&mut self, now: u64, from: SocketAddr, packet: &[u8]) -> bool {
        let Some((header, payload)) = self.decode(now, packet) else { return false };
        let channel = self.channel_of(header.session, from);
        let streams = |number: &u32| self.channels.get(*number).is_some_and(|own| own.stream.is_incoming);
        let Some(channel) = channel.filter(streams).filter(|_| matches!(header.body, Body::Data(_))) else {
            self.counters.unknown += 1;
            return false;
        };
        self.take(channel, &header, payload, None, false);
        true
    }
}

impl Channel {
    /// Queues unacknowledged bytes again, in front of the lane; NOOPs take their packet numbers.
    fn end_outgoing_stream(&mut self) {
        let bytes = Header::len(&Body::Noop, false);
        for what in self.window.end_stream(What::Control(Body::Noop, 0), bytes) {
            let What::Data { serve, offset, len } = what else { continue };
            self.serve_again(serve, offset, len);
        }
    }
}
