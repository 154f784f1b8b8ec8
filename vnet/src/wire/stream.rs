//! Native frames on a byte stream: a `u32` length, the native header, and the whole frame.
//!
//! ```text
//! 0-3    length of what follows, in bytes
//! 4-19   native header (native.rs): a whole frame, or a keepalive
//! 20-    12 bytes of offload metadata if OFFLOAD is set, then the frame
//! ```
//!
//! All fields are in network byte order. A stream neither fragments nor bundles. An impossible length means that framing is lost
//! or that the peer is not a vnet host: the connection is closed.

use super::native::{self, Header, Kind};
use super::offload::{Offload, WIRE_LEN};

/// Bytes of the length.
pub const LENGTH_LEN: usize = 4;
/// Maximum length of a message in bytes, without its length field: header, metadata, and a frame of maximum size.
pub const MESSAGE_MAX: usize = native::HEADER_LEN + WIRE_LEN + 65_553;

/// Error for an impossible message length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("message of {0} bytes; {min} to {MESSAGE_MAX} are possible", min = native::HEADER_LEN)]
pub struct LengthError(pub u32);

/// Content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// A frame. The metadata is unchecked: pass it to [`Offload::checked`].
    Frame(Header, Offload, &'a [u8]),
    /// A keepalive.
    Keepalive,
    /// A message that is not valid on a stream. Framing is intact, so the next message may be valid.
    Bad,
}

/// The first message in `bytes` and its length in bytes; `None` when it is incomplete.
#[inline]
pub fn next(bytes: &[u8]) -> Result<Option<(Content<'_>, usize)>, LengthError> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_LEN>() else { return Ok(None) };
    let length = u32::from_be_bytes(*length);
    let len = length as usize;
    if !(native::HEADER_LEN..=MESSAGE_MAX).contains(&len) {
        return Err(LengthError(length));
    }
    Ok(rest.get(..len).map(|message| (read(message), LENGTH_LEN + len)))
}

#[inline]
fn read(message: &[u8]) -> Content<'_> {
    match Header::parse(message) {
        Ok((header, _)) if header.sealed => Content::Bad,
        Ok((header, payload)) if header.kind == Kind::Frame && header.is_whole() => {
            match native::metadata(payload, header.offload) {
                Some((offload, frame)) => Content::Frame(header, offload, frame),
                None => Content::Bad,
            }
        }
        Ok((Header { kind: Kind::Keepalive, .. }, _)) => Content::Keepalive,
        _ => Content::Bad,
    }
}

/// The start of a message: length, header, and metadata if the OFFLOAD flag is set. The frame follows.
pub struct Prefix {
    bytes: [u8; LENGTH_LEN + native::HEADER_LEN + WIRE_LEN],
    len: usize,
}

impl Prefix {
    /// The start of a message with this header and a frame of `len` bytes. Metadata is included when the header's OFFLOAD flag is
    /// set.
    #[inline]
    pub fn new(header: &Header, offload: &Offload, len: usize) -> Prefix {
        let metadata = if header.offload { WIRE_LEN } else { 0 };
        let mut bytes = [0; LENGTH_LEN + native::HEADER_LEN + WIRE_LEN];
        let length = (native::HEADER_LEN + metadata + len) as u32;
        bytes[..LENGTH_LEN].copy_from_slice(&length.to_be_bytes());
        bytes[LENGTH_LEN..][..native::HEADER_LEN].copy_from_slice(&header.to_bytes());
        if header.offload {
            bytes[LENGTH_LEN + native::HEADER_LEN..].copy_from_slice(&offload.to_wire());
        }
        Prefix { bytes, len: LENGTH_LEN + native::HEADER_LEN + metadata }
    }

    /// The encoded bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(kind: Kind, offload: bool) -> Header {
        Header { offload, hops: 1, ..Header::whole(kind, 9, 5) }
    }

    proptest! {
        /// However the stream is divided into reads, the parser returns the same messages.
        #[test]
        fn messages_come_out_as_they_went_in(
            frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..300), any::<bool>()), 0..8),
            cut in 1usize..100,
        ) {
            let offload = Offload { gso_size: 7, ..Offload::default() };
            let mut bytes = vec![];
            for (frame, with) in &frames {
                bytes.extend_from_slice(Prefix::new(&header(Kind::Frame, *with), &offload, frame.len()).bytes());
                bytes.extend_from_slice(frame);
                bytes.extend_from_slice(Prefix::new(&header(Kind::Keepalive, false), &offload, 0).bytes());
            }
            let (mut held, mut got, mut kept_alive) = (vec![], vec![], 0);
            for part in bytes.chunks(cut) {
                held.extend_from_slice(part);
                while let Some((message, len)) = next(&held).unwrap() {
                    match message {
                        Content::Frame(header, found, frame) => {
                            prop_assert_eq!(header.network, 9);
                            prop_assert_eq!(found, if header.offload { offload } else { Offload::default() });
                            got.push((frame.to_vec(), header.offload));
                        }
                        Content::Keepalive => kept_alive += 1,
                        Content::Bad => prop_assert!(false, "bad"),
                    }
                    held.drain(..len);
                }
            }
            prop_assert!(held.is_empty());
            prop_assert_eq!(kept_alive, frames.len());
            prop_assert_eq!(got, frames);
        }
    }

    #[test]
    fn datagrams_that_are_invalid_on_a_stream_are_bad() {
        let message = |header: Header| {
            let bytes = [Prefix::new(&header, &Offload::default(), 20).bytes(), &[0; 20]].concat();
            matches!(next(&bytes), Ok(Some((Content::Bad, len))) if len == bytes.len())
        };
        let whole = header(Kind::Frame, false);
        assert!(!message(whole));
        assert!(message(Header { last: false, ..whole }), "a fragment");
        assert!(message(Header { sealed: true, ..whole }));
        assert!(message(header(Kind::Bundle, false)) && message(header(Kind::Probe, false)));
        assert!(message(Header { number: 0, ..whole }));
        let short = [&20u32.to_be_bytes()[..], &header(Kind::Frame, true).to_bytes(), &[0; 4]].concat();
        assert_eq!(next(&short), Ok(Some((Content::Bad, 24))), "metadata cut off");
    }

    #[test]
    fn impossible_lengths_end_the_stream() {
        for length in [0, 15, MESSAGE_MAX as u32 + 1, u32::MAX] {
            assert_eq!(next(&length.to_be_bytes()), Err(LengthError(length)));
        }
        for length in [16, MESSAGE_MAX as u32] {
            assert_eq!(next(&length.to_be_bytes()), Ok(None));
        }
    }
}
