//! Settings of the host itself: the tables that stand once in a file.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use vnet::dispatch::isolation::Isolation;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{BATCH_MAX, NetworkId};
use vnet::link::ZeroCopy;
use vnet::route::AGEING_S;

use super::limits::{BRIDGE_PORT, CONTROL_SOCKET};
use crate::table::quote;

/// Who this host is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSpec {
    /// Its name in the overlay.
    pub name: String,
}

/// How the daemon is controlled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSpec {
    /// Unix socket of the HTTP/JSON API.
    pub socket: PathBuf,
    /// What is offered by TCP.
    pub access: Access,
}

impl Default for ControlSpec {
    fn default() -> ControlSpec {
        ControlSpec { socket: CONTROL_SOCKET.into(), access: Access::default() }
    }
}

/// Where control listens by TCP, and what it asks of its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The API, metrics and events.
    pub http: Option<SocketAddr>,
    /// The control language.
    pub console: Option<SocketAddr>,
    /// File with the token that changes by the API must show.
    pub token_file: Option<PathBuf>,
    /// TLS: this host's certificate.
    pub tls: Option<TlsFiles>,
    /// PEM file of the authority whose clients may use the console, which then speaks TLS.
    pub tls_client_ca: Option<PathBuf>,
}

/// PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, then its chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The dispatchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DispatchSpec {
    /// Number of dispatchers.
    pub threads: usize,
    /// Processor of each dispatcher; empty: the kernel chooses.
    pub cpus: Vec<usize>,
    /// What a dispatcher does when there is nothing to do.
    pub yield_strategy: Strategy,
    /// T_sleep of VNET/P's timed yield, in microseconds.
    pub sleep_us: u32,
    /// T_nowork of VNET/P's adaptive yield, in microseconds.
    pub nowork_us: u32,
    /// Frames taken at a time.
    pub burst: usize,
    /// `priority`, `lock_memory`, `busy_poll_us`: how they are kept from being disturbed.
    pub isolation: Isolation,
}

impl Default for DispatchSpec {
    fn default() -> DispatchSpec {
        DispatchSpec {
            threads: 1,
            cpus: vec![],
            yield_strategy: Strategy::Adaptive,
            sleep_us: 50,
            nowork_us: 200,
            burst: BATCH_MAX,
            isolation: Isolation::default(),
        }
    }
}

/// Seconds between rekeyings of a sealed link, by default.
pub const REKEY_S: u32 = 3600;

/// A prefix of IP addresses, as in 10.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix(pub ipnet::IpNet);

impl Prefix {
    /// True when `address` is in it. IPv4 addresses in IPv6 form are IPv4 addresses.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefix, String> {
        let prefix = text.parse::<ipnet::IpNet>().ok();
        let canonical = prefix.filter(|prefix| prefix.addr().to_canonical() == prefix.addr());
        let bad = || format!("{} is not a network; write one as 10.0.0.0/8 or fd00::/8", quote(text));
        canonical.map(Prefix).ok_or_else(bad)
    }
}

/// The links' side of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BridgeSpec {
    /// Where links arrive (UDP), and handshakes of sealed ones (TCP).
    pub listen: SocketAddr,
    /// Ports that links arrive at, from that of `listen` on.
    pub ports: u16,
    /// Where VXLAN links arrive (UDP); nowhere when absent.
    pub vxlan_listen: Option<SocketAddr>,
    /// Where stream links arrive (TCP); nowhere when absent.
    pub stream_listen: Option<SocketAddr>,
    /// Whether guests' memory is sent without copying it.
    pub zero_copy: ZeroCopy,
    /// Networks in which clear text may travel.
    pub trusted: Vec<Prefix>,
    /// Seconds after which sealed links get new keys.
    pub rekey_s: u32,
    /// Pairs of other hosts that may meet by this one.
    pub meetings: u16,
}

impl BridgeSpec {
    /// Where pairs meet (UDP), from that port on, when the bridge listens on `bridge`: behind the ports of the bridge.
    pub fn meet_at(&self, bridge: SocketAddr) -> SocketAddr {
        let port = if self.listen.port() == 0 { 0 } else { bridge.port().saturating_add(self.ports) };
        SocketAddr::new(bridge.ip(), port)
    }
}

impl Default for BridgeSpec {
    fn default() -> BridgeSpec {
        let listen = (Ipv6Addr::UNSPECIFIED, BRIDGE_PORT).into();
        BridgeSpec {
            listen,
            ports: 1,
            vxlan_listen: None,
            stream_listen: None,
            zero_copy: ZeroCopy::Auto,
            trusted: vec![],
            rekey_s: REKEY_S,
            meetings: 0,
        }
    }
}

/// One network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkSpec {
    /// Its number.
    pub id: NetworkId,
    /// Whether addresses are learned and unknown ones flooded; else only rules decide.
    pub learning: bool,
    /// Seconds after which a learned address that was not seen again is forgotten.
    pub ageing_s: u32,
    /// Whether this host relays frames from link to link.
    pub relay: bool,
}

impl NetworkSpec {
    /// Network `id` as it is when nothing is said about it.
    pub fn new(id: NetworkId) -> NetworkSpec {
        NetworkSpec { id, learning: true, ageing_s: AGEING_S, relay: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_contain_what_they_say() {
        let contains = |prefix: &str, address: &str| {
            prefix.parse::<Prefix>().unwrap().contains(address.parse().unwrap())
        };
        for (prefix, address, want) in [
            ("10.0.0.0/8", "10.255.0.1", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.0/8", "::ffff:10.1.2.3", true),
            ("192.0.2.7/32", "192.0.2.7", true),
            ("192.0.2.7/32", "192.0.2.6", false),
            ("0.0.0.0/0", "203.0.113.1", true),
            ("0.0.0.0/0", "fd00::1", false),
            ("fd00::/8", "fdff::1", true),
            ("fd00::/8", "fe80::1", false),
            ("::/0", "fe80::1", true),
            ("::/0", "10.0.0.1", false),
        ] {
            assert_eq!(contains(prefix, address), want, "{address} in {prefix}");
        }
        for bad in
            ["10.0.0.0", "10.0.0.0/33", "10.0.0.0/-1", "fd00::/129", "::ffff:10.0.0.0/104", "x/8", "", "/"]
        {
            assert!(bad.parse::<Prefix>().is_err(), "{bad}");
        }
        assert_eq!("10.0.0.0/8".parse::<Prefix>().unwrap().to_string(), "10.0.0.0/8");
    }
}
