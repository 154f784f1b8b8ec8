//! Proofs: the event index.

use super::needs_event;
use crate::proof::{Choices, bound, proofs};

/// The event index in unlimited numbers: entries `old` to `new - 1` were added, and one of them has index `event`, modulo 2^16.
fn passed(event: u16, old: u16, added: u32) -> bool {
    let old = u32::from(old);
    let event = u32::from(event);
    let next = if event >= old { event } else { event + 0x1_0000 };
    next < old + added
}

/// All events and all numbers of entries, from a few positions; in a quick run the numbers around which something changes.
fn notifies_exactly_if_the_event_was_passed(choices: &mut Choices) {
    let old: u16 = choices.one_of(&[0, 1, 0x7fff, 0x8000, 0xfffe, 0xffff][..bound(6, 2)]);
    let added = if bound(false, true) {
        choices.below(0x1_0000) as u32
    } else {
        choices.one_of(&[0, 1, 2, 64, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff])
    };
    let new = old.wrapping_add(added as u16);
    // A loop, because a test makes 10^10 of these choices.
    let events = if cfg!(kani) {
        let event = choices.below(0x1_0000);
        event..event + 1
    } else {
        0..0x1_0000
    };
    for event in events.map(|event| event as u16) {
        assert_eq!(needs_event(event, new, old), passed(event, old, added), "{event} {old} {added}");
    }
}

proofs! {
    event_index: notifies_exactly_if_the_event_was_passed;
}
