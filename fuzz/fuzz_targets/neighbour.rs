//! ARP requests and neighbour solicitations from guests.
//!
//! Invariants: no panic; every accepted request gets a reply to the asker, in the owner's name; no reply is a request, so two
//! proxies cannot loop.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::wire::ethernet::{self, Mac};
use vnet::wire::neighbour::{ANSWER_MAX, answer, question};

fuzz_target!(|data: &[u8]| {
    let Some(asked) = question(data) else { return };
    let (owner, mut frame) = (Mac([2, 0, 0, 0, 0, 1]), [0; ANSWER_MAX]);
    let length = answer(&asked, owner, &mut frame).unwrap();
    assert_eq!(ethernet::addresses(&frame[..length]), Some((asked.asker, owner)));
    assert_eq!(question(&frame[..length]), None);
});
