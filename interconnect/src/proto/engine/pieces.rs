//! Cuts the bytes that a peer pulls into DATA packets: of the size of a datagram, or larger in parts (`parts.rs`) or for a stream
//! (`streams.rs`).

use super::super::channel::{Channel, Flow, What};
use super::super::memory::Span;
use super::super::shares::Shares;
use super::super::wire::{Body, DATA_HEADER, Data, Header, MAP, flags};
use super::LOCAL_PACKET_MAX;

/// Payload of one DATA packet.
pub(super) struct Piece {
    pub(super) serve: u32,
    /// The endpoint whose share it takes.
    pub(super) endpoint: u16,
    /// Offset within the request.
    pub(super) offset: u32,
    pub(super) data: Data,
    pub(super) payload: Span,
    pub(super) by_stream: bool,
}

impl Piece {
    pub(super) fn what(&self) -> What {
        What::Data { serve: self.serve, offset: self.offset, len: self.payload.len() as u32 }
    }
}

impl Channel {
    /// Cuts the next piece of the bytes that the peer requested, of an endpoint whose share allows it. `alone`: nothing else waits to be sent,
    /// so it may be larger than a datagram.
    pub(super) fn next_piece(&mut self, now: u64, shares: &mut Shares, alone: bool) -> Option<Piece> {
        let mut lanes = self.serving.len();
        let by_stream = self.can_stream();
        let waits_for_stream = !by_stream && self.has_stream();
        if waits_for_stream || !by_stream && !self.window.has_room(self.datagram) {
            return None;
        }
        let most = if alone { self.data_max(now) } else { self.datagram };
        let has_room = self.window.has_room(most);
        loop {
            let (endpoint, serve) = self.serving.front()?;
            let own = self.serves.get_mut(serve).filter(|own| !own.is_sent());
            let Some(own) = own else {
                self.serving.pop();
                continue;
            };
            let is_again = !own.again.is_empty();
            if !is_again && !shares.admit(now, endpoint) {
                if lanes <= 1 {
                    return None;
                }
                lanes -= 1;
                self.serving.pass();
                continue;
            }
            let header = DATA_HEADER + if self.arrivals.has_gaps() { MAP } else { 0 };
            let packet = match by_stream {
                true => LOCAL_PACKET_MAX,
                false if is_again => self.datagram,
                // It waits until a large packet fits: small ones would take the room of each that arrives.
                false if !has_room => return None,
                false => most,
            };
            let (offset, len) = own.next(packet - header)?;
            let payload = own.span.part(offset.into(), len.into())?;
            let data = Data { pull: own.pull, offset: own.offset + u64::from(offset) };
            return Some(Piece { serve, endpoint, offset, data, payload, by_stream });
        }
    }

    /// Cuts the next such piece if nothing else waits to be sent: most packets of a large transfer.
    pub(super) fn next_piece_alone(&mut self, now: u64, shares: &mut Shares) -> Option<Piece> {
        let is_alone = self.control.is_empty() && self.flows.iter().all(Flow::is_empty);
        is_alone.then(|| self.next_piece(now, shares, true)).flatten()
    }

    /// Numbers a packet with this piece, and builds its header.
    #[inline]
    pub(super) fn piece_header(&mut self, now: u64, piece: &Piece, shares: &mut Shares) -> Header {
        let bytes = DATA_HEADER + piece.payload.len();
        let is_last_for_now = shares.spend(now, piece.endpoint, bytes as u64);
        let soon = self.window.is_half_full() || is_last_for_now || self.is_last_of_all();
        let psn = self.window.send(now, piece.what(), bytes, soon);
        if piece.by_stream {
            self.window.put_into_stream();
        }
        self.last_sent_at = now;
        let flags = if soon { flags::ACK_SOON } else { 0 };
        if piece.by_stream {
            return self.header_in_stream(flags, psn, Body::Data(piece.data));
        }
        let has_map_room = self.has_map_room(bytes, MAP);
        self.header(flags, psn, Body::Data(piece.data), has_map_room)
    }

    /// Whether pulled data may be sent through the stream now. While the stream is full, pulled data waits.
    pub(super) fn can_stream(&self) -> bool {
        self.has_stream() && self.stream.outgoing == Some(true) && self.window.has_room_in_stream()
    }

    /// Whether pulled data takes a stream. Shared memory comes first.
    pub(super) fn has_stream(&self) -> bool {
        self.local.is_none() && self.stream.outgoing.is_some()
    }
}
