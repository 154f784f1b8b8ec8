//! Signed values of the store, checked against certificates.
//!
//! Invariants: no panic; a parsed value consists of the bytes that were read; neither an unsigned value nor a signed one with one
//! changed byte is accepted.
#![no_main]

use std::sync::{Arc, OnceLock};

use libfuzzer_sys::fuzz_target;
use vnet::frame::NetworkId;
use vnet::link::sealed::identity::IdentityStore;
use vnet::link::sealed::pki::Pki;
use vnet::wire::ethernet::Mac;
use vnet_control::overlay::record::Key;
use vnet_control::overlay::signed_format::{Signed, sign};
use vnet_control::overlay::{Authenticator, Local, Overlay, Settings};

const KEY: &str = "/vnet/v1/1/hosts/h2";
const RECORD: &[u8] = br#"{"address":"10.0.0.2:9000","instance":2}"#;

/// h1's identity, and a record of h2 that it accepts. Cached, because key generation is slow.
fn made() -> &'static (Arc<IdentityStore>, Vec<u8>) {
    static MADE: OnceLock<(Arc<IdentityStore>, Vec<u8>)> = OnceLock::new();
    MADE.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("vnet-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for keys");
        let pki = Pki::new(&folder);
        let (store, other) = (Arc::new(pki.store("h1", 1)), pki.identity("h2"));
        let key = Key::parse(KEY.as_bytes()).expect("a key");
        let value = sign(&key, RECORD, other.chain(), 1, |message| other.sign(message)).expect("a signature");
        std::fs::remove_dir_all(folder).expect("an empty folder");
        (store, value)
    })
}

fuzz_target!(|data: &[u8]| {
    let (store, good) = made();
    for key in [KEY, "/vnet/v1/1/interfaces/52:54:00:00:00:02"] {
        let key = Key::parse(key.as_bytes()).expect("a key");
        if let Some(signed) = Signed::parse(&key, data) {
            let body = signed.value.strip_suffix(b"}").expect("an object");
            assert!(data.starts_with(body) && signed.message.ends_with(body));
        }
    }
    let address = Some(([10, 0, 0, 1], 9000).into());
    let networks = [NetworkId::DEFAULT].into();
    let mut overlay = Overlay::new("h1".into(), 1, Settings { address, networks, ..Settings::default() });
    let mut judge = Authenticator::new(store.clone());
    let (network, mac) = (NetworkId::DEFAULT, Some(Mac([0x52, 0x54, 0, 0, 0, 1])));
    overlay.locals(&[Local { network, mac, addresses: vec![], up: true, departed: false, in_frames: 0 }]);
    // Lines: key, value, key, value, …
    let mut revision = 1;
    let mut put = |overlay: &mut Overlay, key: &[u8], value: &[u8]| {
        revision += 1;
        judge.put(overlay, key, value, 1, revision, revision as u64);
    };
    let mut lines = data.split(|byte| *byte == b'\n');
    while let (Some(key), Some(value)) = (lines.next(), lines.next()) {
        put(&mut overlay, key, value);
    }
    assert_eq!(overlay.computed().hosts, 0, "an unsigned value was accepted");
    // Changes one byte of a valid value.
    if let [high, low, byte, ..] = *data {
        let mut value = good.clone();
        let at = usize::from(u16::from_be_bytes([high, low])) % value.len();
        value[at] = byte;
        put(&mut overlay, KEY.as_bytes(), &value);
        assert_eq!(overlay.computed().hosts, usize::from(value == *good));
    }
    put(&mut overlay, KEY.as_bytes(), good);
    assert_eq!(overlay.computed().hosts, 1, "the good value is refused");
});
