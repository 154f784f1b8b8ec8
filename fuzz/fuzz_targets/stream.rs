//! Bytes that a stream link receives from a peer: lengths, headers and frames.
//!
//! Invariants: no panic; every byte is consumed once or waits for more bytes; an invalid length ends the stream; a frame
//! re-encodes to the same message.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::wire::stream::{Content, LENGTH_LEN, LengthError, MESSAGE_MAX, Prefix, next};

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    loop {
        match next(rest) {
            Ok(Some((message, len))) => {
                assert!((LENGTH_LEN..=LENGTH_LEN + MESSAGE_MAX).contains(&len) && len <= rest.len());
                if let Content::Frame(header, offload, frame) = message {
                    assert!(header.is_whole() && !header.sealed && frame.len() <= len);
                    let again = [Prefix::new(&header, &offload, frame.len()).bytes(), frame].concat();
                    assert_eq!(next(&again), Ok(Some((message, again.len()))));
                    assert_eq!(again.len(), len);
                }
                rest = &rest[len..];
            }
            Ok(None) => {
                assert!(rest.len() < LENGTH_LEN + MESSAGE_MAX);
                break;
            }
            Err(LengthError(length)) => {
                assert_eq!(rest[..4], length.to_be_bytes());
                break;
            }
        }
    }
});
