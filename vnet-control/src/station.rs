//! Stations as users name them: by MAC address, by IP address, or by the interface that they are attached to.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::api;
use super::desired::{InterfaceSpec, Target, is_name};
use super::engine::{Engine, EngineError, Listed};
use super::plan;
use super::table::quote;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Maximum number of addresses that an error lists.
const LISTED_MAX: usize = 4;

/// A source or destination of frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Station {
    /// A MAC address.
    Mac(Mac),
    /// An IP address of an interface (`addresses`), or one that another host of the overlay publishes.
    Address(IpAddr),
    /// The guest of an interface of this host.
    Interface(String),
}

impl FromStr for Station {
    type Err = String;

    fn from_str(text: &str) -> Result<Station, String> {
        let name = text.strip_prefix("interface ").map_or(text, str::trim);
        if let Ok(mac) = text.parse() {
            Ok(Station::Mac(mac))
        } else if let Ok(address) = text.parse::<IpAddr>() {
            Ok(Station::Address(address.to_canonical()))
        } else if is_name(name) {
            Ok(Station::Interface(name.into()))
        } else {
            Err(format!("{} is neither a MAC address, an IP address nor an interface's name", quote(text)))
        }
    }
}

impl fmt::Display for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Station::Mac(mac) => mac.fmt(f),
            Station::Address(address) => address.fmt(f),
            Station::Interface(name) => write!(f, "interface {name}"),
        }
    }
}

/// The frame of a `vnet trace` request.
#[derive(Clone, Debug)]
pub struct TraceRequest {
    /// Network of the frame. Default: that of an interface which the request names, else 1.
    pub network: Option<NetworkId>,
    /// Source of the frame.
    pub src: Station,
    /// Destination of the frame.
    pub dst: Station,
    /// Where the frame enters. Default: the interface that `src` names, else the port of the source address.
    pub from: Option<Target>,
}

impl Engine {
    /// Traces a frame between stations. See [`Engine::trace`].
    ///
    /// # Errors
    /// The network or interface does not exist, or the address of a station is unknown.
    pub fn trace_between(&self, request: &TraceRequest) -> Result<api::Trace, EngineError> {
        let TraceRequest { network, src, dst, from } = request;
        let named = [src, dst].into_iter().find_map(|station| self.named(station));
        let network = network.or(named.map(|spec| spec.network)).unwrap_or_default();
        if !plan::networks(&self.current).iter().any(|item| item.spec.id == network) {
            return Err(EngineError::NotFound(format!("network {network}"), Listed::Networks));
        }
        let macs = [self.mac_of(network, src)?, self.mac_of(network, dst)?];
        let own = match src {
            Station::Interface(name) => Some(Target::Interface(name.clone())),
            _ => None,
        };
        self.trace(network, macs[0], macs[1], from.clone().or(own).as_ref())
    }

    /// The interface that names a station.
    fn named(&self, station: &Station) -> Option<&InterfaceSpec> {
        let Station::Interface(name) = station else { return None };
        self.current.interfaces.iter().map(|item| &item.spec).find(|spec| spec.name == *name)
    }

    fn mac_of(&self, network: NetworkId, station: &Station) -> Result<Mac, EngineError> {
        match station {
            Station::Mac(mac) => Ok(*mac),
            Station::Address(address) => {
                let found = self.owner(network, *address);
                found.ok_or(EngineError::UnknownAddress { address: *address, network })
            }
            Station::Interface(_) => {
                let spec = self
                    .named(station)
                    .ok_or_else(|| EngineError::NotFound(station.to_string(), Listed::Interfaces))?;
                self.guest(network, spec)
            }
        }
    }

    /// The MAC address that has an IP address, from this host's interfaces or other hosts' records.
    fn owner(&self, network: NetworkId, address: IpAddr) -> Option<Mac> {
        let mut here = self.current.interfaces.iter().map(|item| &item.spec);
        let own = here.find(|spec| spec.network == network && spec.addresses.contains(&address));
        let published = || self.joined.neighbours.get(&(network, address)).copied();
        own.and_then(|spec| spec.mac).or_else(published)
    }

    /// The MAC address of an interface's guest: the configured one, or the only one known there.
    fn guest(&self, network: NetworkId, spec: &InterfaceSpec) -> Result<Mac, EngineError> {
        let ambiguous = |why: String| EngineError::Guest { interface: spec.name.clone(), why };
        if spec.network != network {
            return Err(ambiguous(format!("it is in network {}, not {network}", spec.network)));
        }
        let port = self.interfaces.get(&spec.name).map(|live| live.port);
        let known = self.known();
        let mut there: Vec<_> = known
            .iter()
            .filter(|entry| Some(entry.port) == port && entry.network == network)
            .map(|entry| entry.mac)
            .collect();
        match (spec.mac, &there[..]) {
            (Some(mac), _) => Ok(mac),
            (None, [mac]) => Ok(*mac),
            (None, []) => Err(ambiguous("it has no 'mac', and its guest has sent nothing yet".into())),
            (None, _) => {
                there.sort_unstable();
                let more = if there.len() > LISTED_MAX { ", …" } else { "" };
                let listed: Vec<_> = there.iter().take(LISTED_MAX).map(ToString::to_string).collect();
                Err(ambiguous(format!("several are there: {}{more}", listed.join(", "))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::parse;
    use crate::overlay::Computed;

    const MACS: [&str; 2] = ["52:54:00:00:00:01", "52:54:00:00:00:02"];

    fn engine(dir: &std::path::Path) -> Engine {
        let interface = |name: &str, more: &str| {
            let socket = dir.join(name).display().to_string();
            format!(
                "[[interface]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n{more}\n"
            )
        };
        let text = "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[[network]]\nid = 7\n"
            .to_string()
            + &interface("vm1", &format!("mac = \"{}\"\naddresses = [\"10.0.0.1\", \"fd00::1\"]", MACS[0]))
            + &interface("vm2", &format!("mac = \"{}\"\nnetwork = 7", MACS[1]))
            + &interface("vm3", "");
        Engine::start(parse("f", &text).unwrap().desired).unwrap()
    }

    fn trace(engine: &Engine, network: Option<u32>, src: &str, dst: &str) -> Result<api::Trace, String> {
        let network = network.and_then(NetworkId::new);
        let request = TraceRequest { network, src: src.parse()?, dst: dst.parse()?, from: None };
        engine.trace_between(&request).map_err(|error| error.to_string())
    }

    #[test]
    fn stations_are_found_by_address_and_interface() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path());
        let other: Mac = "52:54:00:00:00:09".parse().unwrap();
        let neighbours = [((NetworkId::DEFAULT, "10.0.0.9".parse().unwrap()), other)].into();
        engine.join(Computed { neighbours: std::sync::Arc::new(neighbours), ..Computed::default() }).unwrap();
        for (src, dst, from, network, macs) in [
            ("10.0.0.1", "10.0.0.9", "interface vm1", 1, [MACS[0], "52:54:00:00:00:09"]),
            ("fd00::1", "10.0.0.9", "interface vm1", 1, [MACS[0], "52:54:00:00:00:09"]),
            ("vm1", MACS[1], "interface vm1", 1, MACS),
            ("interface vm2", MACS[0], "interface vm2", 7, [MACS[1], MACS[0]]),
        ] {
            let found = trace(&engine, None, src, dst).unwrap();
            assert_eq!((found.from.as_str(), found.network.get()), (from, network), "{src}");
            assert_eq!([found.src.to_string(), found.dst.to_string()], macs, "{src} {dst}");
        }
        for (network, src, dst, words) in [
            (Some(9), MACS[0], MACS[1], "there is no network 9"),
            (None, "vm9", MACS[1], "there is no interface vm9"),
            (None, "vm1", "10.0.0.8", "10.0.0.8 in network 1 is not known"),
            (Some(7), "vm2", "10.0.0.1", "10.0.0.1 in network 7 is not known"),
            (Some(7), "vm1", MACS[1], "it is in network 1, not 7"),
            (None, "vm3", MACS[1], "its guest has sent nothing yet"),
            (None, "no name", MACS[1], "'no name' is neither"),
        ] {
            let told = trace(&engine, network, src, dst).unwrap_err();
            assert!(told.contains(words) && told.lines().count() == 1, "{src} {dst}: {told}");
        }
        engine.stop();
    }
}
