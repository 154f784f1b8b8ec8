//! Questions for a neighbour's address, from guests.
//!
//! What must hold: nothing panics; whatever is taken for a question can be answered, to the asker, in the owner's name; and
//! no answer is a question, so that two proxies cannot keep each other busy.
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
