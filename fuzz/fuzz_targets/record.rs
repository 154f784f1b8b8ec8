//! Keys and values of the store, as any host with write access may write them.
//!
//! Invariants: no panic; an accepted record re-encodes to the same bytes; the overlay computes links to valid hosts only, never
//! to its own host.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;
use vnet_control::overlay::record::{HostRecord, Key, Record, StationRecord};
use vnet_control::overlay::{Local, Overlay, Settings};

fuzz_target!(|data: &[u8]| {
    if let Some(key) = Key::parse(data) {
        assert_eq!(key.to_string().as_bytes(), data);
    }
    written_as_read::<HostRecord>(data);
    written_as_read::<StationRecord>(data);
    // Lines: key, value, key, value, …; 40 ms pass after each pair.
    let address = Some(([10, 0, 0, 1], 9000).into());
    let networks = [NetworkId::DEFAULT].into();
    let mut overlay = Overlay::new("h1".into(), 1, Settings { address, networks, ..Settings::default() });
    let mut now_ms = 1;
    overlay.connected(7, now_ms);
    overlay.begin_reading();
    overlay.end_reading(now_ms);
    let (network, mac) = (NetworkId::DEFAULT, Some(Mac([0x52, 0x54, 0, 0, 0, 1])));
    overlay.locals(&[Local { network, mac, addresses: vec![], up: true, departed: false, in_frames: 0 }]);
    let mut lines = data.split(|byte| *byte == b'\n');
    while let (Some(key), Some(value)) = (lines.next(), lines.next()) {
        overlay.put(key, value, 1, now_ms as i64 + 1, now_ms);
        now_ms += 40;
        overlay.tick(now_ms);
        overlay.writes(now_ms);
        let computed = overlay.computed();
        assert!(computed.links.len() <= computed.hosts);
        assert!(computed.links.iter().all(|link| Some(link.remote) != address && link.remote.port() != 0));
    }
});

fn written_as_read<R: Record + std::fmt::Debug>(data: &[u8]) {
    let Some(record) = R::parse(data) else { return };
    let written = record.write();
    assert!(written.len() <= R::MAX);
    assert_eq!(R::parse(&written), Some(record));
}
