//! Sealed packets in parts: a packet that is larger than a datagram is sealed once, and cut into several datagrams (docs/interconnect.md).
//! Each begins with the header of the sealed packet, which also says which part it is and which is the last. All parts but the last have the
//! same length.
//!
//! A forged part can spoil a packet: its tag is then wrong, and the protocol sends its bytes again in whole packets. Parts of at most `most`
//! packets are kept. When another begins, the oldest packet of the host that has most of them makes room, so that none takes all.

use std::net::SocketAddr;

use super::wire::{HEADER, Head};
use crate::proto::PARTED_MAX;

/// Smallest length of a part that is not the last one; the protocol's datagrams are not smaller.
const ROOM_MIN: usize = 576;

/// A packet of which parts have arrived.
struct Slot {
    /// Its place in the order in which packets began.
    began: u64,
    from: SocketAddr,
    id: u32,
    number: u64,
    last: u8,
    /// A bit for each part that has arrived. 0: the slot is free.
    arrived: u32,
    /// Bytes of each part but the last.
    room: usize,
    /// Header, and all parts behind it. It keeps its length for the next packet.
    bytes: Vec<u8>,
    /// Where they end, once the last part has arrived.
    end: usize,
}

/// What becomes of a part.
pub(super) enum Put {
    /// Other parts are missing.
    Waits,
    /// It is there already, or it does not suit the others.
    Refused,
    /// The packet is complete.
    Whole,
}

/// Packets of which parts have arrived.
pub(super) struct Parts {
    slots: Vec<Slot>,
    most: usize,
    /// Number of packets that have begun, and the slot of the last part.
    began: u64,
    recent: usize,
    /// Number of parts that were dropped: of an incomplete packet that made room, a duplicate, a last part that came first, or one of the
    /// wrong length.
    pub(super) dropped: u64,
}

impl Slot {
    fn free(from: SocketAddr) -> Self {
        Self { began: 0, from, id: 0, number: 0, last: 0, arrived: 0, room: 0, bytes: vec![], end: 0 }
    }

    fn is_for(&self, from: SocketAddr, head: &Head) -> bool {
        self.arrived != 0
            && (self.number, self.id, self.last) == (head.number, head.id, head.last)
            && self.from == from
    }
}

impl Parts {
    pub(super) fn new(most: usize) -> Self {
        Self { slots: vec![], most, began: 0, recent: 0, dropped: 0 }
    }

    /// The place of the packet to which this part belongs, if others have arrived.
    #[inline]
    pub(super) fn find(&mut self, from: SocketAddr, head: &Head) -> Option<usize> {
        if self.slots.get(self.recent).is_some_and(|slot| slot.is_for(from, head)) {
            return Some(self.recent);
        }
        self.recent = self.slots.iter().position(|slot| slot.is_for(from, head))?;
        Some(self.recent)
    }

    /// Keeps the first part of a packet, which is not the last one: that does not say where its place is. Returns the packet's place.
    pub(super) fn begin(&mut self, from: SocketAddr, head: &Head, room: usize) -> Option<usize> {
        let bytes = (usize::from(head.last) + 1) * room;
        if head.part >= head.last || room < ROOM_MIN || bytes > PARTED_MAX {
            self.dropped += 1;
            return None;
        }
        let place = match self.slots.iter().position(|slot| slot.arrived == 0) {
            Some(place) => place,
            None if self.slots.len() < self.most => {
                self.slots.push(Slot::free(from));
                self.slots.len() - 1
            }
            None => {
                let place = self.least_wanted();
                self.discard(place);
                place
            }
        };
        self.began += 1;
        let slot = &mut self.slots[place];
        (slot.from, slot.id, slot.number, slot.last) = (from, head.id, head.number, head.last);
        (slot.began, slot.arrived, slot.room, slot.end) = (self.began, 0, room, 0);
        if slot.bytes.len() < HEADER + bytes {
            slot.bytes.resize(HEADER + bytes, 0);
        }
        slot.bytes[..HEADER].copy_from_slice(&head.encode_whole());
        self.recent = place;
        Some(place)
    }

    /// The oldest packet of the host that has most of them.
    fn least_wanted(&self) -> usize {
        let of_host = |from: SocketAddr| self.slots.iter().filter(|slot| slot.from.ip() == from.ip()).count();
        let order = |slot: &Slot| (std::cmp::Reverse(of_host(slot.from)), slot.began);
        (0..self.slots.len()).min_by_key(|place| order(&self.slots[*place])).unwrap_or_default()
    }

    /// Drops the incomplete packet at `place`.
    pub(super) fn discard(&mut self, place: usize) {
        self.dropped += u64::from(std::mem::take(&mut self.slots[place].arrived).count_ones());
    }

    /// Adds a part to the packet at `place`.
    #[inline]
    pub(super) fn put(&mut self, place: usize, head: &Head, part: &[u8]) -> Put {
        let slot = &mut self.slots[place];
        let is_last = head.part == head.last;
        let fits = if is_last { (1..=slot.room).contains(&part.len()) } else { part.len() == slot.room };
        if !fits || slot.arrived & 1 << head.part != 0 {
            self.dropped += 1;
            return Put::Refused;
        }
        let at = HEADER + usize::from(head.part) * slot.room;
        slot.bytes[at..at + part.len()].copy_from_slice(part);
        if is_last {
            slot.end = at + part.len();
        }
        slot.arrived |= 1 << head.part;
        if slot.arrived.count_ones() == u32::from(head.last) + 1 { Put::Whole } else { Put::Waits }
    }

    /// Takes a complete packet: as if it had arrived in one datagram.
    pub(super) fn take(&mut self, place: usize) -> &mut [u8] {
        let slot = &mut self.slots[place];
        slot.arrived = 0;
        &mut slot.bytes[..slot.end]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: usize = 600;

    fn from(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 2], port))
    }

    fn part(number: u64, part: u8, last: u8) -> Head {
        Head { id: 7, number, part, last }
    }

    /// The bytes of a part, all alike; the last part is shorter.
    fn bytes(head: &Head) -> Vec<u8> {
        vec![head.part + 1; if head.part == head.last { ROOM - 30 } else { ROOM }]
    }

    /// A part arrives. Returns the packet, if it is complete.
    fn arrive(parts: &mut Parts, from: SocketAddr, head: Head) -> Option<Vec<u8>> {
        let bytes = bytes(&head);
        let place = parts.find(from, &head).or_else(|| parts.begin(from, &head, bytes.len()))?;
        matches!(parts.put(place, &head, &bytes), Put::Whole).then(|| parts.take(place).to_vec())
    }

    fn whole(number: u64, last: u8) -> Vec<u8> {
        let parts = (0..=last).flat_map(|at| bytes(&part(number, at, last)));
        part(number, 0, last).encode().into_iter().chain(parts).collect()
    }

    #[test]
    fn parts_become_the_packet_in_any_order_but_the_last_first() {
        let mut parts = Parts::new(4);
        for (number, order) in [[0, 1, 2, 3], [2, 0, 3, 1], [1, 3, 2, 0]].iter().enumerate() {
            let arrived: Vec<_> =
                order.iter().map(|at| arrive(&mut parts, from(1), part(number as u64, *at, 3))).collect();
            assert_eq!(arrived[..3], [None, None, None]);
            assert_eq!(arrived[3], Some(whole(number as u64, 3)));
        }
        assert_eq!(parts.dropped, 0);
        assert_eq!(arrive(&mut parts, from(1), part(9, 3, 3)), None, "its place is not known yet");
        assert_eq!(parts.dropped, 1);
        (0..3).for_each(|at| assert_eq!(arrive(&mut parts, from(1), part(9, at, 3)), None));
        assert_eq!(arrive(&mut parts, from(1), part(9, 3, 3)), Some(whole(9, 3)), "it came again");
    }

    #[test]
    fn parts_of_several_packets_and_peers_do_not_mix() {
        let mut parts = Parts::new(4);
        let heads = [(from(1), 5), (from(2), 5), (from(1), 6)];
        for at in 0..2 {
            for (from, number) in heads {
                assert_eq!(arrive(&mut parts, from, part(number, at, 2)), None);
            }
        }
        // Another number of parts, and a part that has come already, change nothing.
        assert_eq!(arrive(&mut parts, from(1), part(5, 1, 3)), None);
        assert_eq!(arrive(&mut parts, from(1), part(5, 1, 2)), None);
        for (from, number) in heads {
            assert_eq!(arrive(&mut parts, from, part(number, 2, 2)), Some(whole(number, 2)));
        }
        assert_eq!(parts.dropped, 1);
    }

    #[test]
    fn parts_that_do_not_fit_are_dropped() {
        let mut parts = Parts::new(4);
        let place = parts.begin(from(1), &part(1, 0, 2), ROOM).unwrap();
        for (at, len) in [(0, ROOM - 1), (0, ROOM + 1), (1, 0), (2, 0), (2, ROOM + 1)] {
            assert!(matches!(parts.put(place, &part(1, at, 2), &vec![0; len]), Put::Refused), "{at}: {len}");
        }
        assert_eq!(parts.dropped, 5);
        assert_eq!(parts.begin(from(1), &part(2, 0, 1), PARTED_MAX / 2 + 1), None, "too long");
        assert_eq!(parts.begin(from(1), &part(2, 0, 1), ROOM_MIN - 1), None, "too short");
        assert_eq!(parts.dropped, 7);
    }

    #[test]
    fn a_host_with_many_packets_drops_its_own() {
        let mut parts = Parts::new(4);
        let other = SocketAddr::from(([10, 0, 0, 3], 1));
        assert_eq!(arrive(&mut parts, other, part(1, 0, 1)), None);
        for number in 0..50 {
            assert_eq!(arrive(&mut parts, from(number as u16), part(number, 0, 1)), None);
        }
        assert_eq!(parts.dropped, 47);
        assert_eq!(arrive(&mut parts, other, part(1, 1, 1)), Some(whole(1, 1)));
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_packet_makes_room() {
        let mut parts = Parts::new(3);
        for number in 0..20 {
            (0..15).for_each(|at| assert_eq!(arrive(&mut parts, from(1), part(number, at, 15)), None));
        }
        assert_eq!((parts.slots.len(), parts.dropped), (3, 17 * 15));
        assert!(parts.slots.iter().all(|slot| slot.bytes.len() == HEADER + 16 * ROOM));
        for number in 17..20 {
            assert_eq!(arrive(&mut parts, from(1), part(number, 15, 15)), Some(whole(number, 15)));
        }
    }
}
