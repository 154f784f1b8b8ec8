//! The control language: lines of a console client, and files.
//!
//! Invariants: no panic; a displayed command parses as the same command; a mistake is reported in one short line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet_control::console::Answer;
use vnet_control::language::{Dialect, parse, parse_bytes};

fuzz_target!(|data: &[u8]| {
    for dialect in [Dialect::Console, Dialect::Links, Dialect::Routes] {
        match parse_bytes(dialect, data) {
            Ok(command) => {
                let line = command.to_string();
                assert_eq!(parse(Dialect::Console, &line), Ok(command), "{line}");
            }
            Err(error) => {
                let answer = Answer::from(error).to_string();
                assert!(answer.starts_with("ERROR ") && answer.ends_with('\n'), "{answer}");
                assert!(answer.lines().count() == 1 && answer.len() < 1024, "{answer}");
            }
        }
    }
});
