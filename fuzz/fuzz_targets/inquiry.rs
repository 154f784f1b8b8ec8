//! Messages of other hosts' control (`vnet trace --follow`). Input: a byte that selects question or answer, then the text.
//!
//! Invariants: no panic; displayed text has no control characters and nests no deeper than the number of hops; a forwarded answer
//! is no longer than its question.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet_control::api::Hop;
use vnet_control::follow::{HOPS, Said};

fuzz_target!(|data: &[u8]| {
    let Some((first, text)) = data.split_first() else { return };
    match Said::read(first & 1 != 0, text) {
        None | Some(Said::Echo { .. }) => {}
        Some(Said::Question(question)) => {
            let len = usize::from(*first) * 8;
            assert!(question.text(len).is_none_or(|text| text.len() == len));
        }
        Some(Said::Answer(answer)) => {
            shown(&answer.hop, HOPS);
            let len = usize::from(*first) * 8;
            assert!(answer.text(len).is_none_or(|text| text.len() <= len));
        }
    }
});

fn shown(hop: &Hop, depth: u8) {
    assert!(depth > 0);
    let clean = |text: &String| assert!(!text.chars().any(char::is_control));
    [&hop.host, &hop.from, &hop.why].into_iter().chain(&hop.drop).for_each(clean);
    for copy in &hop.copies {
        [&copy.to].into_iter().chain(&copy.state).chain(&copy.silent).for_each(clean);
        copy.next.iter().for_each(|next| shown(next, depth - 1));
    }
}
