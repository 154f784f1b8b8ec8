//! Messages of a take-over, from a process of vnetd's own user: the first byte is the number of descriptors, the rest a message.
//!
//! Invariants: no panic; an accepted message is read as it is written again; an accepted estate is a configuration that this version accepts.
#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use vnet::inherit::Inheritance;
use vnet_control::take_over::Taking;
use vnet_control::take_over::message::{HEAD, Message};

fuzz_target!(|data: &[u8]| {
    let Some((passed, text)) = data.split_first() else { return };
    let passed = usize::from(*passed);
    let Ok(message) = Message::parse(text, passed) else { return };
    let written = message.to_bytes().expect("what was read is short");
    let (head, body) = written.split_first_chunk::<HEAD>().expect("a length");
    assert_eq!(Message::length(*head).expect("its own length"), body.len());
    assert_eq!(Message::parse(body, passed).expect("its own bytes"), message);
    if let Message::Estate { estate, .. } = message {
        let _ = Taking::new(*estate, Arc::new(Inheritance::default()));
    }
});
