//! Packets in a stream of bytes: each is a record of its length (4 bytes, most significant first) and its bytes.
//!
//! The sender may be hostile. A length is at most that of the largest packet, so a record always fits into the buffer.

use crate::proto::LOCAL_PACKET_MAX;

/// Bytes of a record before its packet.
pub(crate) const LENGTH: usize = 4;
/// A few packets: fits into a processor's second cache.
const BUFFER: usize = 4 * (LENGTH + LOCAL_PACKET_MAX);

/// The peer has written a length that no packet has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record is longer than any packet")]
pub struct TooLong;

/// Finds the packets in what a connection receives.
pub struct Records {
    buffer: Box<[u8]>,
    /// The bytes from `taken` to `filled` were received, and belong to no packet that `next_packet` has returned.
    taken: usize,
    filled: usize,
}

impl Default for Records {
    fn default() -> Self {
        Self { buffer: vec![0; BUFFER].into_boxed_slice(), taken: 0, filled: 0 }
    }
}

impl Records {
    /// Where the next bytes go; call it after `next_packet` has returned `None`. It ends with a record if all have the length of the first: the
    /// packets of a transfer do, and then no part of one has to be moved.
    pub fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.taken..self.filled, 0);
        (self.filled, self.taken) = (self.filled - self.taken, 0);
        let record = self.length().map_or(BUFFER, |length| LENGTH + length.min(LOCAL_PACKET_MAX));
        &mut self.buffer[self.filled..BUFFER / record * record]
    }

    /// So many bytes were received into the room.
    ///
    /// # Panics
    /// When they are more than there was room for.
    pub fn add(&mut self, count: usize) {
        assert!(count <= BUFFER - self.filled, "{count} bytes in the room of {}", BUFFER - self.filled);
        self.filled += count;
    }

    /// Returns the next packet, if it is complete.
    ///
    /// # Errors
    /// The connection is of no use any more.
    pub fn next_packet(&mut self) -> Result<Option<&[u8]>, TooLong> {
        let Some(length) = self.length() else { return Ok(None) };
        if length > LOCAL_PACKET_MAX {
            return Err(TooLong);
        }
        let (begin, end) = (self.taken + LENGTH, self.taken + LENGTH + length);
        if end > self.filled {
            return Ok(None);
        }
        self.taken = end;
        Ok(Some(&self.buffer[begin..end]))
    }

    /// Length of the next packet, as its record says.
    fn length(&self) -> Option<usize> {
        let length = self.buffer[self.taken..self.filled].first_chunk()?;
        Some(u32::from_be_bytes(*length) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(packet: &[u8]) -> Vec<u8> {
        [&(packet.len() as u32).to_be_bytes(), packet].concat()
    }

    /// The packets of `bytes`, received at most `step` at a time.
    fn packets(bytes: &[u8], step: usize) -> Result<Vec<Vec<u8>>, TooLong> {
        let (mut records, mut found, mut rest) = (Records::default(), vec![], bytes);
        while !rest.is_empty() {
            let room = records.room();
            let count = room.len().min(step).min(rest.len());
            assert!(count > 0, "there is always room");
            room[..count].copy_from_slice(&rest[..count]);
            rest = &rest[count..];
            records.add(count);
            while let Some(packet) = records.next_packet()? {
                found.push(packet.to_vec());
            }
        }
        Ok(found)
    }

    #[test]
    fn packets_are_found_however_they_arrive() {
        let lengths =
            [0, 1, 3, 4, 5, 1000, LOCAL_PACKET_MAX, LOCAL_PACKET_MAX, 7, LOCAL_PACKET_MAX - 1, 0, 300];
        let sent: Vec<Vec<u8>> =
            lengths.iter().map(|len| (0..*len).map(|place| (place * 7 + len) as u8).collect()).collect();
        let bytes: Vec<u8> = sent.iter().flat_map(|packet| record(packet)).collect();
        for step in [1, 2, 3, 5, 4099, LOCAL_PACKET_MAX, usize::MAX] {
            assert!(packets(&bytes, step).unwrap() == sent, "{step} bytes at a time");
        }
    }

    #[test]
    fn packets_of_one_length_fill_the_room_to_its_end() {
        let mut records = Records::default();
        let bytes = record(&[7; 60_000]);
        records.room()[..10].copy_from_slice(&bytes[..10]);
        records.add(10);
        assert_eq!(records.next_packet(), Ok(None));
        assert_eq!((records.room().len() + 10) % bytes.len(), 0);
    }

    #[test]
    fn a_packet_that_is_too_long_is_refused_at_once() {
        for length in [LOCAL_PACKET_MAX as u32 + 1, u32::MAX] {
            assert_eq!(packets(&length.to_be_bytes(), 4), Err(TooLong));
        }
    }
}
