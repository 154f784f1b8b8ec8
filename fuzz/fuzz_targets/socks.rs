//! Answers of a SOCKS 5 proxy.
//!
//! Invariants: no panic; no answer makes the client read more than the longest valid answer; an error is one line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::wire::socks::{ANSWER_START, Destination, TEXT_MAX, answer_rest, connect, granted, login};

fuzz_target!(|data: &[u8]| {
    let line = |error: vnet::wire::socks::SocksError| {
        let text = error.to_string();
        assert!(!text.is_empty() && !text.contains('\n'));
    };
    if let Some(two) = data.first_chunk::<2>() {
        for credentials in [true, false] {
            let _ = login(*two, credentials).map_err(line);
        }
        let _ = granted(*two).map_err(line);
    }
    if let Some(start) = data.first_chunk::<ANSWER_START>() {
        match answer_rest(*start) {
            Ok(rest) => assert!(rest <= TEXT_MAX + 2),
            Err(error) => line(error),
        }
    }
    // A name of any length; the configuration allows up to 255 bytes.
    if let Ok(name) = std::str::from_utf8(data) {
        let request = connect(&Destination::Name(name.into(), 9000));
        assert_eq!(request.len(), 4 + 1 + name.len().min(TEXT_MAX) + 2);
        assert_eq!(usize::from(request[4]), name.len().min(TEXT_MAX));
    }
});
