//! Capture filters, and the text of captured headers. Input: an expression up to the end of the first line, then a frame.
//!
//! Invariants: no panic; a displayed expression parses as the same filter; the text of a frame is one line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::capture::{Filter, Subject};
use vnet::frame::NetworkId;

#[path = "../../vnet-cli/src/headers.rs"]
mod headers;

fuzz_target!(|data: &[u8]| {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (expression, frame) = (&data[..end], &data[(end + 1).min(data.len())..]);
    if let Some(line) = headers::line(frame) {
        assert_eq!(line.lines().count(), 1);
    }
    let Ok(expression) = str::from_utf8(expression) else { return };
    match expression.parse::<Filter>() {
        Err(error) => assert_eq!(error.to_string().lines().count(), 1),
        Ok(filter) => {
            for inbound in [true, false] {
                let subject = Subject { head: frame, len: frame.len(), network: NetworkId::DEFAULT, inbound };
                filter.matches(&subject);
            }
            assert_eq!(filter.to_string().parse::<Filter>(), Ok(filter));
        }
    }
});
