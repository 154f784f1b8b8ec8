//! Keys and values of the store, parsed from untrusted bytes.
//!
//! | key | value (JSON) |
//! |---|---|
//! | `/vnet/v1/NETWORK/hosts/NAME` | [`HostRecord`]: the host has members in the network, or relays for hosts that have |
//! | `/vnet/v1/NETWORK/interfaces/MAC` | [`StationRecord`]: the station is on a host |
//!
//! Unknown fields are ignored, so that later versions can add fields, as signed values do (`signed_format.rs`). Every field has a limit,
//! which bounds the memory of a record.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::desired::{ADDRESSES_MAX, is_host_address, is_name, is_station_address};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Prefix of all keys.
pub const PREFIX: &str = "/vnet/v1/";
/// Maximum length of a station's value in bytes; with all addresses and a signature it takes half of that.
pub const VALUE_MAX: usize = 4096;
/// Maximum length of a host's value in bytes; it may contain certificates.
pub const HOST_VALUE_MAX: usize = 32 << 10;

/// A parsed key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A host in a network.
    Host(NetworkId, Box<str>),
    /// A station of a network.
    Station(NetworkId, Mac),
}

impl Key {
    /// Parses a key; accepts exactly what its `Display` prints.
    pub fn parse(key: &[u8]) -> Option<Key> {
        let rest = str::from_utf8(key).ok()?.strip_prefix(PREFIX)?;
        let (network, rest) = rest.split_once('/')?;
        let (kind, name) = rest.split_once('/')?;
        let parsed = NetworkId::new(network.parse().ok()?)?;
        let key = match kind {
            "hosts" if is_name(name) => Key::Host(parsed, name.into()),
            "interfaces" => Key::Station(parsed, name.parse().ok().filter(|mac: &Mac| mac.is_unicast())?),
            _ => return None,
        };
        // Keys are canonical: no leading zeros, no upper case.
        (network == parsed.to_string() && key.name() == name).then_some(key)
    }

    /// The key's network.
    pub fn network(&self) -> NetworkId {
        match self {
            Key::Host(network, _) | Key::Station(network, _) => *network,
        }
    }

    /// Maximum length of the key's value in bytes.
    pub fn value_max(&self) -> usize {
        match self {
            Key::Host(..) => HostRecord::MAX,
            Key::Station(..) => StationRecord::MAX,
        }
    }

    fn name(&self) -> String {
        match self {
            Key::Host(_, name) => name.to_string(),
            Key::Station(_, mac) => mac.to_string(),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self {
            Key::Host(..) => "hosts",
            Key::Station(..) => "interfaces",
        };
        write!(f, "{PREFIX}{}/{kind}/{}", self.network(), self.name())
    }
}

/// A host in a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRecord {
    /// Address of the host's bridge.
    pub address: SocketAddr,
    /// True if only reflectors can reach the host at this address.
    #[serde(default, skip_serializing_if = "is_false")]
    pub behind_nat: bool,
    /// Random number of each run of vnetd: distinguishes two hosts of the same name, and a host's restarts.
    pub instance: u64,
    /// True if the host leaves the network.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withdrawn: bool,
}

/// Location of a station.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StationRecord {
    /// Name of the host that has the station.
    pub host: Box<str>,
    /// Incremented with each move (RFC 7432, section 7.7); wraps around to 0 (RFC 1982).
    pub sequence: u32,
    /// The station's IP addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// True if the station has left the host.
    #[serde(default, skip_serializing_if = "is_false")]
    pub withdrawn: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// A value of the store.
pub trait Record: Clone + PartialEq + Serialize + for<'de> Deserialize<'de> {
    /// Maximum length of a value in bytes.
    const MAX: usize;

    /// True if every field is within its limits.
    fn is_sound(&self) -> bool;

    /// Parses a value; `None` if it is malformed.
    fn parse(value: &[u8]) -> Option<Self> {
        let record: Self = if value.len() > Self::MAX { None } else { serde_json::from_slice(value).ok() }?;
        record.is_sound().then_some(record)
    }

    /// Serializes the record.
    fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a record has text, numbers and addresses only")
    }

    /// True if the record withdraws its object.
    fn withdrawn(&self) -> bool;

    /// True if both records place the object at the same host or address.
    fn same_place(&self, other: &Self) -> bool;

    /// True if both records lead to the same routes.
    fn same_effect(&self, other: &Self) -> bool;

    /// The sequence number that orders claims of different hosts, if the type has one.
    fn sequence(&self) -> Option<u32>;
}

impl Record for HostRecord {
    const MAX: usize = HOST_VALUE_MAX;

    fn is_sound(&self) -> bool {
        // Only one spelling per address: otherwise a host could publish another host's address in its IPv4-mapped form.
        is_host_address(self.address) && self.address.ip().to_canonical() == self.address.ip()
    }

    fn withdrawn(&self) -> bool {
        self.withdrawn
    }

    fn same_place(&self, other: &HostRecord) -> bool {
        self.address == other.address && self.behind_nat == other.behind_nat
    }

    fn same_effect(&self, other: &HostRecord) -> bool {
        self.same_place(other) && self.withdrawn == other.withdrawn
    }

    fn sequence(&self) -> Option<u32> {
        None
    }
}

impl Record for StationRecord {
    const MAX: usize = VALUE_MAX;

    fn is_sound(&self) -> bool {
        is_name(&self.host)
            && self.addresses.len() <= ADDRESSES_MAX
            && self.addresses.iter().all(|address| is_station_address(*address))
    }

    fn withdrawn(&self) -> bool {
        self.withdrawn
    }

    fn same_place(&self, other: &StationRecord) -> bool {
        self.host == other.host
    }

    fn same_effect(&self, other: &StationRecord) -> bool {
        self.same_place(other) && self.addresses == other.addresses && self.withdrawn == other.withdrawn
    }

    fn sequence(&self) -> Option<u32> {
        Some(self.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_written_in_one_way() {
        for key in ["/vnet/v1/1/hosts/h1", "/vnet/v1/16777215/interfaces/52:54:00:00:00:01"] {
            assert_eq!(Key::parse(key.as_bytes()).unwrap().to_string(), key);
        }
        for bad in [
            "/vnet/v1/01/hosts/h1",
            "/vnet/v1/16777216/hosts/h1",
            "/vnet/v1/1/hosts/",
            "/vnet/v1/1/hosts/a/b",
            "/vnet/v1/1/interfaces/52:54:00:00:00:0A",
            "/vnet/v1/1/interfaces/ff:ff:ff:ff:ff:ff",
            "/vnet/v1/1/links/h1",
            "/vnet/v1/1",
            "/vnet/v2/1/hosts/h1",
        ] {
            assert_eq!(Key::parse(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(Key::parse(b"/vnet/v1/1/hosts/\xff"), None);
    }

    #[test]
    fn records_are_sound_or_refused() {
        let record = StationRecord {
            host: "h1".into(),
            sequence: 7,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            withdrawn: false,
        };
        let text = br#"{"host":"h1","sequence":7,"addresses":["10.0.0.1","fd00::1"]}"#;
        assert_eq!(record.write(), text);
        assert_eq!(StationRecord::parse(text), Some(record));
        let host = r#"{"address":"10.0.0.1:9000","instance":5,"more":[1]}"#;
        assert_eq!(HostRecord::parse(host.as_bytes()).unwrap().address.port(), 9000);
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"address":"10.0.0.1:0","instance":5}"#,
            r#"{"address":"h:1","instance":5}"#,
            r#"{"address":"224.0.0.1:9","instance":5}"#,
            r#"{"address":"[::ffff:10.0.0.1]:9","instance":5}"#,
            r#"{"address":"127.0.0.1:9","instance":5}"#,
        ] {
            assert_eq!(HostRecord::parse(bad.as_bytes()), None, "{bad}");
        }
        for bad in [
            r#"{"host":"","sequence":1}"#,
            r#"{"host":"h","sequence":4294967296}"#,
            r#"{"host":"h","sequence":1,"addresses":["ff02::1"]}"#,
            r#"{"host":"h","sequence":-1}"#,
        ] {
            assert_eq!(StationRecord::parse(bad.as_bytes()), None, "{bad}");
        }
        let many =
            format!(r#"{{"host":"h","sequence":1,"addresses":[{}]}}"#, vec!["\"10.0.0.1\""; 17].join(","));
        assert_eq!(StationRecord::parse(many.as_bytes()), None);
        let long = |most: usize, text: &[u8]| [&vec![b' '; most + 1 - text.len()], text].concat();
        assert_eq!(StationRecord::parse(&long(VALUE_MAX, br#"{"host":"h","sequence":1}"#)), None);
        assert!(StationRecord::parse(&long(VALUE_MAX - 1, br#"{"host":"h","sequence":1}"#)).is_some());
        assert_eq!(HostRecord::parse(&long(HOST_VALUE_MAX, host.as_bytes())), None);
    }
}
