//! Configuration files and API requests.
//!
//! Invariants: no panic; mistakes are reported one per line, each with its place; an accepted configuration passes the checks
//! again, does not differ from itself, and its plan has one line per change.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet_control::config::{self, ConfigError};
use vnet_control::plan::Plan;
use vnet_control::settings::restart_needed;

fuzz_target!(|data: &[u8]| {
    refused_in_lines(config::interface_from_json(data).err(), "");
    refused_in_lines(config::link_from_json(data).err(), "");
    refused_in_lines(config::route_from_json(data).err(), "");
    let Ok(text) = str::from_utf8(data) else { return };
    match config::parse("f", text) {
        Err(error) => refused_in_lines(Some(error), "f:"),
        Ok(configuration) => {
            let desired = configuration.desired;
            config::validate(&desired).unwrap();
            assert!(restart_needed(&desired, &desired).is_empty());
            assert!(Plan::between(&desired, &desired).is_empty());
            let nothing = config::parse("f", "host.name = \"h\"").unwrap().desired;
            let plan = Plan::between(&nothing, &desired);
            assert_eq!(plan.to_string().lines().count(), plan.changes().len());
        }
    }
});

fn refused_in_lines(error: Option<ConfigError>, prefix: &str) {
    let Some(error) = error else { return };
    assert!(!error.0.is_empty());
    let lines = error.to_string();
    assert_eq!(lines.lines().count(), error.0.len());
    assert!(lines.lines().all(|line| line.starts_with(prefix)));
}
