//! Names and addresses of Ethernet stations.

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use super::frame::Mac;

/// Prefix of names of this wire.
const SCHEME: &str = "ether://";
/// Longest name of a device in bytes (`IFNAMSIZ`, without the terminating zero).
const DEVICE_BYTES_MAX: usize = 15;
/// Middle of an interface identifier made from a MAC address (RFC 4291, appendix A), and the bit that it inverts.
const MIDDLE: [u8; 2] = [0xff, 0xfe];
const UNIVERSAL: u8 = 2;
const LINK_LOCAL: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];

/// Where a node is bound: `ADDRESS:PORT`, or `ether://DEVICE:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bind {
    /// A UDP socket at this address; port 0 selects any free port.
    Udp(SocketAddr),
    /// An Ethernet device, and the node's port there; 0 selects any free port.
    Ethernet {
        /// Name of the device.
        device: String,
        /// Port among the nodes of the device.
        port: u16,
    },
}

/// The text is no address to bind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no address to bind: write ADDRESS:PORT, such as 10.77.1.1:7000, or ether://DEVICE:PORT, such as ether://eth0:7000"
)]
pub struct NoBind(String);

impl FromStr for Bind {
    type Err = NoBind;

    fn from_str(text: &str) -> Result<Self, NoBind> {
        let wrong = || NoBind(text.into());
        let Some(rest) = text.strip_prefix(SCHEME) else {
            return text.parse().map(Bind::Udp).map_err(|_| wrong());
        };
        let (device, port) = rest.rsplit_once(':').ok_or_else(wrong)?;
        let is_odd = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | ':');
        let is_name = (1..=DEVICE_BYTES_MAX).contains(&device.len()) && !device.contains(is_odd);
        let port = port.parse().ok().filter(|_| is_name).ok_or_else(wrong)?;
        Ok(Bind::Ethernet { device: device.into(), port })
    }
}

impl Bind {
    /// Name of the device, or address of the UDP socket.
    pub(crate) fn device(&self) -> String {
        match self {
            Bind::Udp(address) => address.to_string(),
            Bind::Ethernet { device, .. } => device.clone(),
        }
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bind::Udp(address) => address.fmt(f),
            Bind::Ethernet { device, port } => write!(f, "{SCHEME}{device}:{port}"),
        }
    }
}

impl From<SocketAddr> for Bind {
    fn from(address: SocketAddr) -> Self {
        Bind::Udp(address)
    }
}

/// Returns the address that stands for a node of the station with this MAC address.
pub fn station(mac: Mac, port: u16) -> SocketAddr {
    let [a, b, c, d, e, f] = mac;
    let [m, n] = MIDDLE;
    let mut octets = [0; 16];
    octets[..8].copy_from_slice(&LINK_LOCAL);
    octets[8..].copy_from_slice(&[a ^ UNIVERSAL, b, c, m, n, d, e, f]);
    SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, 0).into()
}

/// Returns the MAC address of the station that an address stands for, or `None` if it stands for none: it is of UDP, or the MAC address is a
/// group's.
pub fn mac_of(address: SocketAddr) -> Option<Mac> {
    let SocketAddr::V6(v6) = address else { return None };
    let octets = v6.ip().octets();
    let [a, b, c, m, n, d, e, f] = *octets.last_chunk()?;
    let is_made = octets.starts_with(&LINK_LOCAL) && [m, n] == MIDDLE;
    let mac = [a ^ UNIVERSAL, b, c, d, e, f];
    (is_made && v6.scope_id() == 0 && v6.flowinfo() == 0 && is_unicast(mac)).then_some(mac)
}

/// Whether a single station can have this MAC address.
pub fn is_unicast(mac: Mac) -> bool {
    mac[0] & 1 == 0 && mac != Mac::default()
}

/// Parses the name of a node at a station, `ether://MAC:PORT`, with dashes or colons in the MAC address. `None`: the text does not begin with
/// `ether://`.
pub fn parse(name: &str) -> Option<Result<SocketAddr, &'static str>> {
    let rest = name.strip_prefix(SCHEME)?;
    let Some((mac, port)) = rest.rsplit_once(':') else { return Some(Err("no port")) };
    let Ok(port) = port.parse() else { return Some(Err("the port is no number below 65536")) };
    let Some(mac) = parse_mac(mac) else { return Some(Err("no MAC address, such as 02-00-00-00-00-01")) };
    if !is_unicast(mac) || port == 0 {
        return Some(Err("no single node has this MAC address and port"));
    }
    Some(Ok(station(mac, port)))
}

fn parse_mac(text: &str) -> Option<Mac> {
    let separator = if text.contains('-') { '-' } else { ':' };
    let mut parts = text.split(separator);
    let mut mac = Mac::default();
    for byte in &mut mac {
        let part =
            parts.next().filter(|part| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

/// Returns the name of a node: `ether://MAC:PORT` of a station, `ADDRESS:PORT` of a UDP socket.
pub fn name_of(address: SocketAddr) -> String {
    match mac_of(address) {
        Some([a, b, c, d, e, f]) => {
            format!("{SCHEME}{a:02x}-{b:02x}-{c:02x}-{d:02x}-{e:02x}-{f:02x}:{}", address.port())
        }
        None => address.to_string(),
    }
}
