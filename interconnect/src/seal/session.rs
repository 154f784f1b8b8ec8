//! A session: the keys of both directions, the numbers of sealed packets, and a window in which each number opens once.
//!
//! AES-256-GCM. The nonce is the packet's number behind four zero bytes. Each direction of each session has a key of its own, and the numbers of
//! a direction count up from 1, so no nonce is used twice under a key.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use super::wire::{HEADER, Head, TAG};
use crate::meeting::{KEY, Keys, Role};
use crate::proto::{PARTS_MAX, Span};

/// Number of packets that one key seals at most, as on sealed links (docs/security.md).
const PACKETS_MAX: u64 = 1 << 32;
/// Number of packets after which new keys are asked for.
const PACKETS_WORN: u64 = PACKETS_MAX / 2;
/// Age at which new keys are asked for, in nanoseconds.
const AGE_WORN_NS: u64 = 3_600_000_000_000;
/// Age at which a session ends.
const AGE_MAX_NS: u64 = 2 * AGE_WORN_NS;
/// How far below the highest number a number still opens. Packets of a channel are at most 1 024 apart.
const WINDOW: u64 = 4096;

/// Why a packet was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shut {
    Malformed,
    Replayed,
    Forged,
}

/// The keys that two engines use.
pub(crate) struct Session {
    /// Key id that the peer's packets carry.
    pub(super) id: u32,
    peer_id: u32,
    sealing: LessSafeKey,
    opening: LessSafeKey,
    /// Number of packets sealed.
    sealed: u64,
    seen: Seen,
    made_at: u64,
    /// The peer has these keys, too.
    pub(super) is_confirmed: bool,
    /// The daemon may not know the session: it was made before this connection to it.
    pub(super) is_forgotten: bool,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({:#x}, {} sealed)", self.id, self.sealed)
    }
}

fn key(bytes: &[u8]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, bytes).expect("32 bytes are a key of AES-256"))
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Number of bytes that a packet of `bytes` bytes takes, sealed in datagrams of `datagram` bytes.
pub(crate) fn sealed_in_parts(bytes: usize, datagram: usize) -> usize {
    bytes + TAG + (bytes + TAG).div_ceil(datagram - HEADER) * HEADER
}

impl Session {
    /// A session that began now, between these key ids.
    pub(super) fn new(keys: &Keys, role: Role, (id, peer_id): (u32, u32), now: u64) -> Self {
        let (opener, answerer) = keys.keys.split_at(KEY);
        let (own, peer) = match role {
            Role::Opener => (opener, answerer),
            Role::Answerer => (answerer, opener),
        };
        // The answerer has its keys before the opener asks for them.
        let is_confirmed = role == Role::Opener;
        let (sealing, opening) = (key(own), key(peer));
        Self {
            id,
            peer_id,
            sealing,
            opening,
            sealed: 0,
            seen: Seen::new(),
            made_at: now,
            is_confirmed,
            is_forgotten: false,
        }
    }

    /// Key id that packets to the peer carry.
    pub(super) fn peer_id(&self) -> u32 {
        self.peer_id
    }

    /// Whether the session may seal no more.
    pub(super) fn is_over(&self, now: u64) -> bool {
        self.sealed >= PACKETS_MAX || now.saturating_sub(self.made_at) > AGE_MAX_NS
    }

    /// Whether new keys are due.
    pub(super) fn is_worn(&self, now: u64) -> bool {
        self.is_forgotten || self.sealed >= PACKETS_WORN || now.saturating_sub(self.made_at) > AGE_WORN_NS
    }

    /// Appends a packet to `to`, sealed.
    #[inline]
    pub(crate) fn seal(&mut self, to: &mut Vec<u8>, packet: &[u8], payload: Span) {
        let head = self.next_head(0);
        to.reserve(HEADER + packet.len() + payload.len() + TAG);
        to.extend_from_slice(&head.encode());
        self.encrypt(to, &head, packet, payload);
    }

    /// Appends a packet to `to`, sealed, in datagrams of `datagram` bytes each, of which the last may be shorter.
    ///
    /// # Panics
    /// When these are more than `PARTS_MAX`.
    pub(crate) fn seal_in_parts(&mut self, to: &mut Vec<u8>, packet: &[u8], payload: Span, datagram: usize) {
        let (room, bytes) = (datagram - HEADER, packet.len() + payload.len() + TAG);
        let parts = bytes.div_ceil(room);
        let (head, begin) = (self.next_head((parts - 1) as u8), to.len());
        to.reserve(parts * HEADER + bytes);
        to.extend_from_slice(&[0; PARTS_MAX * HEADER][..parts * HEADER]);
        let start = to.len();
        self.encrypt(to, &head, packet, payload);
        // Each part moves to the front, and ends at most where the next one begins.
        for part in 0..parts {
            let (at, from) = (begin + part * datagram, start + part * room);
            to.copy_within(from..(from + room).min(start + bytes), at + HEADER);
            to[at..at + HEADER].copy_from_slice(&Head { part: part as u8, ..head }.encode());
        }
    }

    /// Header of the next packet.
    fn next_head(&mut self, last: u8) -> Head {
        self.sealed += 1;
        Head { id: self.peer_id, number: self.sealed, part: 0, last }
    }

    /// Appends a packet to `to`, encrypted, and its tag.
    #[inline]
    fn encrypt(&self, to: &mut Vec<u8>, head: &Head, packet: &[u8], payload: Span) {
        let start = to.len();
        to.extend_from_slice(packet);
        payload.read_to(to);
        let aad = Aad::from(head.encode_whole());
        let tag = self.sealing.seal_in_place_separate_tag(nonce(head.number), aad, &mut to[start..]);
        // Sealing fails only for more than 2^36 bytes.
        to.extend_from_slice(tag.expect("a packet is never too long").as_ref());
    }

    /// Whether no packet with this number was opened yet.
    pub(super) fn is_new(&self, number: u64) -> bool {
        self.seen.is_new(number)
    }

    /// Decrypts a whole packet in place. Returns what was sealed.
    #[inline]
    pub(super) fn open<'a>(&mut self, packet: &'a mut [u8]) -> Result<&'a mut [u8], Shut> {
        let Head { number, .. } = Head::read(packet).ok_or(Shut::Malformed)?;
        let (header, sealed) = packet.split_first_chunk_mut::<HEADER>().ok_or(Shut::Malformed)?;
        if !self.seen.is_new(number) {
            return Err(Shut::Replayed);
        }
        let opened = self.opening.open_in_place(nonce(number), Aad::from(*header), sealed);
        let opened = opened.map_err(|_| Shut::Forged)?;
        self.seen.mark(number);
        Ok(opened)
    }

    /// As if so many packets had been sealed.
    #[cfg(test)]
    pub(super) fn wear(&mut self, is_over: bool) {
        self.sealed = if is_over { PACKETS_MAX } else { PACKETS_WORN };
    }
}

/// The numbers that were opened: a bit for each of the last `WINDOW`.
struct Seen {
    highest: u64,
    bits: [u64; (WINDOW / 64) as usize],
}

impl Seen {
    fn new() -> Self {
        // Number 0 is never sealed.
        Self { highest: 0, bits: [0; (WINDOW / 64) as usize] }
    }

    fn place(number: u64) -> (usize, u64) {
        ((number % WINDOW / 64) as usize, 1 << (number % 64))
    }

    fn is_new(&self, number: u64) -> bool {
        let (word, bit) = Self::place(number);
        number > self.highest || number != 0 && self.highest - number < WINDOW && self.bits[word] & bit == 0
    }

    fn mark(&mut self, number: u64) {
        if number > self.highest {
            if number - self.highest >= WINDOW {
                self.bits.fill(0);
            } else {
                for between in self.highest + 1..number {
                    let (word, bit) = Self::place(between);
                    self.bits[word] &= !bit;
                }
            }
            self.highest = number;
        }
        let (word, bit) = Self::place(number);
        self.bits[word] |= bit;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::SocketAddr;

    use super::*;

    fn two() -> [Session; 2] {
        let keys = Keys { epoch: 1, keys: std::array::from_fn(|at| at as u8) };
        [Session::new(&keys, Role::Opener, (5, 6), 0), Session::new(&keys, Role::Answerer, (6, 5), 0)]
    }

    fn sealed(by: &mut Session, text: &[u8]) -> Vec<u8> {
        let mut packet = vec![];
        by.seal(&mut packet, text, Span::EMPTY);
        packet
    }

    #[test]
    fn what_one_seals_only_the_other_opens_and_only_once() {
        let [mut one, mut other] = two();
        for text in [&b""[..], b"a", &[7; 1500]] {
            let packet = sealed(&mut one, text);
            assert_eq!(packet.len(), text.len() + 32);
            assert_eq!(other.open(&mut packet.clone()).unwrap(), text);
            assert_eq!(other.open(&mut packet.clone()), Err(Shut::Replayed));
            assert_eq!(one.open(&mut packet.clone()), Err(Shut::Forged), "another direction, another key");
            let back = sealed(&mut other, text);
            assert_eq!(one.open(&mut back.clone()).unwrap(), text);
        }
    }

    #[test]
    fn a_packet_in_parts_is_sealed_once() {
        use super::super::parts::{Parts, Put};

        let [mut one, mut other] = two();
        let from = SocketAddr::from(([10, 0, 0, 2], 7000));
        for (len, datagram) in
            [(1352, 700), (1353, 700), (668, 700), (15_120, 1392), (13_700, 1392), (16_000, 1100)]
        {
            let (text, mut bytes) = (vec![len as u8; len], vec![9; 5]);
            one.seal_in_parts(&mut bytes, &text[..28], Span::EMPTY, datagram);
            bytes.truncate(5);
            // SAFETY: the text outlives the call, which only reads it.
            let payload = unsafe { Span::new(text.as_ptr().cast_mut().add(28), len - 28) };
            one.seal_in_parts(&mut bytes, &text[..28], payload, datagram);
            assert_eq!(bytes.len(), 5 + sealed_in_parts(len, datagram));
            let (mut parts, mut opened) = (Parts::new(1), None);
            for part in bytes[5..].chunks(datagram) {
                assert!(!part.windows(20).any(|window| text.starts_with(window)), "nothing in clear text");
                let head = Head::read(part).unwrap();
                if head.last == 0 {
                    opened = other.open(&mut part.to_vec()).ok().map(|text| text.to_vec());
                    continue;
                }
                let place = parts.find(from, &head).or_else(|| parts.begin(from, &head, part.len() - HEADER));
                if let Put::Whole = parts.put(place.unwrap(), &head, &part[HEADER..]) {
                    opened = other.open(parts.take(place.unwrap())).ok().map(|text| text.to_vec());
                }
            }
            assert_eq!(opened.as_ref(), Some(&text), "{len} bytes in datagrams of {datagram}");
        }
    }

    #[test]
    fn a_changed_bit_is_noticed_and_changes_nothing() {
        let [mut one, mut other] = two();
        let packet = sealed(&mut one, b"text");
        for bit in 0..8 * packet.len() {
            let mut changed = packet.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(other.open(&mut changed).is_err(), "bit {bit}");
        }
        for len in 0..packet.len() {
            assert!(other.open(&mut packet[..len].to_vec()).is_err(), "{len} bytes");
        }
        assert_eq!(other.open(&mut packet.clone()).unwrap(), b"text");
    }

    #[test]
    fn packets_open_in_any_order_within_the_window() {
        let [mut one, mut other] = two();
        let packets: Vec<_> = (0..3 * WINDOW).map(|at| sealed(&mut one, &at.to_be_bytes())).collect();
        let mut opens = |number: u64| other.open(&mut packets[number as usize].clone()).is_ok();
        assert!((0..WINDOW).rev().all(&mut opens), "backwards");
        assert!(!(0..WINDOW).any(&mut opens), "again");
        assert!(opens(3 * WINDOW - 1));
        assert!(!opens(2 * WINDOW - 1), "too old");
        assert!(opens(2 * WINDOW), "the oldest of the window");
        let mut random = 1u64;
        let mut seen = HashSet::from([3 * WINDOW - 1, 2 * WINDOW]);
        for _ in 0..2 * WINDOW {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = 2 * WINDOW + (random >> 33) % WINDOW;
            assert_eq!(opens(number), seen.insert(number), "{number}");
        }
    }

    #[test]
    fn keys_wear_by_packets_and_by_age() {
        let [mut one, _] = two();
        assert!(!one.is_worn(AGE_WORN_NS) && one.is_worn(AGE_WORN_NS + 1));
        assert!(!one.is_over(AGE_MAX_NS) && one.is_over(AGE_MAX_NS + 1));
        one.wear(false);
        assert!(one.is_worn(0) && !one.is_over(0));
        one.wear(true);
        assert!(one.is_over(0));
    }
}
