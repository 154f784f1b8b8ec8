//! Streams: connections that carry pulled bytes in place of the network's packets, because a kernel moves the bytes of a TCP connection with
//! less work than those of datagrams.
//!
//! Whoever pulls many bytes invites the peer, by a packet on the open channel with a secret of this channel. The peer connects; each side
//! shows a half of the secret; then the peer sends DATA through the connection: numbered and acknowledged like every packet, but larger,
//! never lost while the connection lasts, and without the window of the network. All other packets still take the network; what
//! applications see in order waits for the packets before it, also for those in a stream. When a connection ends, what it has not
//! delivered is cut again, into packets for the network.
//!
//! The engine knows nothing of connections. It is told which channels have one in which direction, and whether it has room.

use std::net::{IpAddr, SocketAddr};

use super::super::channel::{Channel, What};
use super::super::wire::{Body, Header, Invite};
use super::Engine;

/// In an invitation, in place of a name: it invites to a stream.
pub(super) const STREAM: [u8; 16] = *b"vnet-rdma-stream";
/// With datagrams of this size the network is as fast as a stream, and faster where the kernel copies less.
const DATAGRAM_ENOUGH: usize = 4096;
/// Maximum number of invitations that wait for the process.
const INVITES_MAX: usize = 64;
/// Interval at which invitations of one peer are taken up.
const CONNECT_EVERY_NS: u64 = 100_000_000;
/// The same after a stream was slow.
const AVOIDED_NS: u64 = 60_000_000_000;
/// Pause after each invitation; the last one repeats.
const PAUSES_NS: [u64; 3] = [200_000_000, 2_000_000_000, 10_000_000_000];

impl Engine {
    /// Invites the peer to a stream soon, if the bytes to pull are worth one.
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

    /// Invites the peer at `address` to no stream as long as this channel lasts.
    pub fn refuse_streams(&mut self, address: SocketAddr) {
        let number = self.addresses.get(&address).copied();
        if let Some(own) = number.and_then(|number| self.channels.get_mut(number)) {
            (own.stream.is_wanted, own.stream.invite_at) = (false, u64::MAX);
        }
    }

    /// Takes up no invitation of the peer at `address` for a while.
    pub fn avoid_streams(&mut self, address: SocketAddr) {
        let number = self.addresses.get(&address).copied();
        if let Some(own) = number.and_then(|number| self.channels.get_mut(number)) {
            own.stream.connects_at = self.now + AVOIDED_NS;
        }
    }

    /// Returns the channel's invitation to a stream if it is due.
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

    /// Returns the next invitation to a stream: the peer's address, and the secret, of which each side shows a half.
    pub fn next_stream_invite(&mut self) -> Option<(SocketAddr, [u8; 16])> {
        self.stream_invites.pop_front()
    }

    /// Address of the peer that this engine has invited to a stream with a secret whose first half is `shown`, and the other half.
    pub fn invited_to_stream(&self, shown: &[u8; 8]) -> Option<(SocketAddr, [u8; 8])> {
        let is_meant = |own: &&Channel| own.stream.invites > 0 && own.secret.starts_with(shown);
        let own = self.channels.iter().find(is_meant)?;
        Some((own.address, *own.secret.last_chunk()?))
    }

    /// Whether a peer at this IP address was invited to a stream.
    pub fn has_invited(&self, ip: IpAddr) -> bool {
        let is_meant = |own: &Channel| own.stream.invites > 0 && own.address.ip().to_canonical() == ip;
        self.channels.iter().any(is_meant)
    }

    /// From now on pulled bytes arrive from the peer at `address` through a stream, or by the network again. Returns false if
    /// there is no such channel.
    pub fn set_incoming_stream(&mut self, address: SocketAddr, is_open: bool) -> bool {
        let number = self.addresses.get(&address).copied();
        let Some(channel) = number.and_then(|number| self.channels.get_mut(number)) else { return false };
        channel.stream.is_incoming = is_open;
        channel.stream.invite_at = channel.stream.invite_at.max(self.now + PAUSES_NS[0]);
        true
    }

    /// From now on pulled bytes leave to the peer at `address` through a stream, which has room or not; `None`: by the network again.
    /// Returns false if there is no such channel.
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

    /// Whether an open channel's pulled bytes arrive from `address`, and leave to it, through streams.
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

    /// Processes a packet that arrived through the stream from the peer at `from`. Returns false if it does not belong there: the stream
    /// is not to be used any more.
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
    /// What the stream has not delivered is cut again for the network. The packets' numbers are used by empty packets.
    fn end_outgoing_stream(&mut self) {
        let bytes = Header::len(&Body::Noop, false);
        for what in self.window.end_stream(What::Control(Body::Noop, 0), bytes) {
            let What::Data { serve, offset, len } = what else { continue };
            if let Some(own) = self.serves.get_mut(serve) {
                // Once is enough. It was the first, and it still is.
                if own.again.is_empty() {
                    self.serving.push_front(own.endpoint, serve);
                }
                own.again.push((offset, len));
            }
        }
    }
}
