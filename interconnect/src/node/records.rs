//! Framing of packets in a byte stream: a length (4 bytes, network byte order), then the packet.
//!
//! The sender may be hostile. Longer records than the largest packet are refused, so a record always fits into the buffer.

use crate::proto::LOCAL_PACKET_MAX;

/// Size of the length field.
const LENGTH: usize = 4;
/// Four packets of the largest size: fits into an L2 cache.
const BUFFER: usize = 4 * (LENGTH + LOCAL_PACKET_MAX);

/// A record is longer than any packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a record is longer than any packet")]
pub struct TooLong;

/// Reassembles packets from received bytes.
pub struct Records {
    buffer: Box<[u8]>,
    /// Received bytes that `next_packet` has not returned yet are those from `taken` to `filled`.
    taken: usize,
    filled: usize,
}

impl Default for Records {
    fn default() -> Self {
        Self { buffer: vec![0; BUFFER].into_boxed_slice(), taken: 0, filled: 0 }
    }
}

impl Records {
    /// Free space for received bytes; call it after `next_packet` has returned `None`. Its end is that of a record if all have the length
    /// of the first, as most packets of a transfer do: then no partial record has to be moved.
    pub fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.taken..self.filled, 0);
        (self.filled, self.taken) = (self.filled - self.taken, 0);
        let record = self.length().map_or(BUFFER, |length| LENGTH + length.min(LOCAL_PACKET_MAX));
        &mut self.buffer[self.filled..BUFFER / record * record]
    }

    /// `count` bytes were received into the free space.
    ///
    /// # Panics
    /// When they are more than there was room for.
    pub fn add(&mut self, count: usize) {
        assert!(count <= BUFFER - self.filled, "{count} bytes in the room of {}", BUFFER - self.filled);
        self.filled += count;
    }

    /// Returns the next complete packet.
    ///
    /// # Errors
    /// The length is impossible; close the connection.
    pub fn next_packet(&mut self) -> Result<Option<&mut [u8]>, TooLong> {
        let Some(length) = self.length() else { return Ok(None) };
        if length > LOCAL_PACKET_MAX {
            return Err(TooLong);
        }
        let (begin, end) = (self.taken + LENGTH, self.taken + LENGTH + length);
        if end > self.filled {
            return Ok(None);
        }
        self.taken = end;
        Ok(Some(&mut self.buffer[begin..end]))
    }

    /// Length field of the next record.
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
