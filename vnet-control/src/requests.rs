//! What requests carry: the keys of the configuration file's tables, as the OpenAPI document shows them.
//!
//! Nothing is read into these types. A request goes through the same readers as the file (`config`), which say what is wrong in
//! the same words; a test holds both to the same keys.

use serde::Serialize;

/// The body of `POST /v1/interfaces`: the keys of `[[interface]]`.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewInterface {
    /// Its name: 1 to 64 letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// `vhost-user`, `tap` or `local`.
    pub kind: String,
    /// vhost-user: an absolute path of at most 107 bytes.
    pub socket: Option<String>,
    /// vhost-user: vnetd listens; false: it connects.
    pub server: Option<bool>,
    /// tap: made if it is not there, at most 15 bytes; local: one that is there.
    pub device: Option<String>,
    /// tap, local: where the device lives: a name, a path, `pid:N`.
    pub netns: Option<String>,
    /// local: take frames for all addresses.
    pub promiscuous: Option<bool>,
    /// The network it stands in.
    pub network: Option<u32>,
    /// The guest's address.
    pub mac: Option<String>,
    /// The guest's IP addresses, at most 16, with `mac`: other hosts of the overlay answer questions for them.
    pub addresses: Option<Vec<String>>,
    /// MTU in bytes, 68 to 65535.
    pub mtu: Option<u32>,
    /// Queue pairs.
    pub queues: Option<u32>,
    /// Most flooded frames a second.
    pub storm_limit: Option<u32>,
    /// Drop frames whose source is not `mac`.
    pub port_security: Option<bool>,
    /// How it is driven: `guest-driven`, `vmm-driven` or `adaptive`.
    pub mode: Option<String>,
    /// Lower bound of the adaptive mode, frames/s.
    pub rate_low: Option<u32>,
    /// Upper bound of the adaptive mode, frames/s.
    pub rate_high: Option<u32>,
    /// Window of the adaptive mode, microseconds.
    pub window_us: Option<u32>,
    /// How its guest is notified: `direct` or `optimistic` (vhost-user).
    pub interrupts: Option<String>,
    /// Lower bound of optimistic interrupts, bytes/s.
    pub receive_density_low: Option<u32>,
    /// Upper bound of optimistic interrupts, bytes/s.
    pub receive_density_high: Option<u32>,
    /// Less data than this is not announced early, bytes (optimistic interrupts).
    pub early_bytes: Option<u32>,
    /// vhost-user: an underlay port (UDP) of its own, with `direct_link` and `mac`.
    pub direct_port: Option<u16>,
    /// vhost-user: the link whose other host sends its frames to `direct_port`.
    pub direct_link: Option<String>,
}

/// The body of `PATCH /v1/interfaces/NAME`: what can be changed while the interface is open. What is absent stays.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChangedInterface {
    /// Most flooded frames a second.
    pub storm_limit: Option<u32>,
    /// Drop frames whose source is not its address.
    pub port_security: Option<bool>,
    /// How it is driven: `guest-driven`, `vmm-driven` or `adaptive`.
    pub mode: Option<String>,
    /// Lower bound of the adaptive mode, frames/s.
    pub rate_low: Option<u32>,
    /// Upper bound of the adaptive mode, frames/s.
    pub rate_high: Option<u32>,
    /// Window of the adaptive mode, microseconds.
    pub window_us: Option<u32>,
    /// How its guest is notified: `direct` or `optimistic` (vhost-user).
    pub interrupts: Option<String>,
    /// Lower bound of optimistic interrupts, bytes/s.
    pub receive_density_low: Option<u32>,
    /// Upper bound of optimistic interrupts, bytes/s.
    pub receive_density_high: Option<u32>,
    /// Less data than this is not announced early, bytes (optimistic interrupts).
    pub early_bytes: Option<u32>,
}

/// The body of `POST /v1/links`: the keys of `[[link]]`.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewLink {
    /// Its name: 1 to 64 letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// The other host, `ADDRESS:PORT`; with `proxy` also `NAME:PORT`. Of a sealed native link: learned from the peer when absent.
    pub remote: Option<String>,
    /// native: ports of the other host, from that of `remote` on; 1 when absent.
    pub ports: Option<u32>,
    /// How frames travel: `native`, `vnet`, `vxlan` or `stream`.
    pub encapsulation: Option<String>,
    /// vxlan: other VTEPs of the network, addresses.
    pub flood: Option<Vec<String>>,
    /// vxlan: IPv4 multicast group for flooded frames.
    pub group: Option<String>,
    /// vxlan: streams go by the kernel's VXLAN driver, where it can be had; true when absent.
    pub offload: Option<bool>,
    /// stream: this side connects; false: it waits.
    pub connect: Option<bool>,
    /// stream: `socks5://[USER:PASSWORD@]ADDRESS:PORT`, which connects.
    pub proxy: Option<String>,
    /// The networks it carries; all when absent.
    pub networks: Option<Vec<u32>>,
    /// MTU of the path in bytes, 576 to 65535; found out when absent.
    pub mtu: Option<u32>,
    /// Clear text may travel there.
    pub trusted: Option<bool>,
    /// Nothing travels in clear text.
    pub sealed: Option<bool>,
    /// The name that the other host's certificate must have (sealed); the link's name when absent.
    pub peer: Option<String>,
    /// Source addresses that frames from the other host may have; all when absent.
    pub macs: Option<Vec<String>>,
    /// sealed native: the link to the host by which the two meet, where neither reaches the other.
    pub via: Option<String>,
    /// native, clear text: guests of the other host that have ports of their own, `MAC@PORT`.
    pub direct: Option<Vec<String>>,
}

/// The body of `POST /v1/routes`: the keys of `[[route]]`.
#[derive(Clone, Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewRoute {
    /// The network it applies in.
    pub network: Option<u32>,
    /// Source: `any`, `none`, a MAC address, `not-MAC`.
    pub src: Option<String>,
    /// Destination: `any`, `none`, a MAC address, `not-MAC`.
    pub dst: String,
    /// Where frames come from: `any`, `interface`, `link`, `interface NAME`, `link NAME`.
    pub from: Option<String>,
    /// Where they go: `interface NAME`, `link NAME`.
    pub to: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    /// The keys that a reader knows, from what it says to one that it does not.
    fn known(error: impl ToString) -> Vec<String> {
        let text = error.to_string();
        let line = text.lines().find(|line| line.contains("qqqqqqqqqqqqqqqq")).unwrap();
        let keys = line.rsplit("known here: ").next().unwrap();
        let mut keys: Vec<_> = keys.split(", ").map(String::from).collect();
        keys.sort();
        keys
    }

    fn keys(request: &impl Serialize) -> Vec<String> {
        let serde_json::Value::Object(object) = serde_json::to_value(request).unwrap() else {
            panic!("an object")
        };
        let mut keys: Vec<_> = object.keys().cloned().collect();
        keys.sort();
        keys
    }

    #[test]
    fn requests_have_the_readers_keys() {
        let json = br#"{"kind": "tap", "qqqqqqqqqqqqqqqq": 1}"#;
        assert_eq!(keys(&NewInterface::default()), known(config::interface_from_json(json).unwrap_err()));
        let json = br#"{"qqqqqqqqqqqqqqqq": 1}"#;
        assert_eq!(keys(&NewLink::default()), known(config::link_from_json(json).unwrap_err()));
        assert_eq!(keys(&NewRoute::default()), known(config::route_from_json(json).unwrap_err()));
    }
}
