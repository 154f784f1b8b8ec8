//! What only some encapsulations of links have: reading it, showing it, checking it.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use super::check;
use super::config::{remote_address, socket_address};
use super::desired::{BridgeSpec, LinkSpec};
use super::direct;
use super::security::LinkSecurity;
use super::table::{Placed, Reader, quote};
use vnet::link::{ANYWHERE, Encapsulation, FLOOD_MAX, Proxy, StreamOptions, Tunnel, VxlanOptions};
use vnet::wire::socks::{Credentials, Destination, TEXT_MAX};
use vnet::wire::vxlan;

/// What a proxy looks like.
const PROXY: &str = "socks5://127.0.0.1:9050 or socks5://USER:PASSWORD@ADDRESS:PORT";

/// Makes a link's remote of its text, takes the keys that belong to `encapsulation`, and reports those that belong to others.
///
/// The remote of a stream link that goes through a proxy is the proxy.
pub(super) fn read(
    reader: &mut Reader<'_>,
    encapsulation: Encapsulation,
    remote: Option<Placed<String>>,
) -> (Option<SocketAddr>, Tunnel) {
    if encapsulation != Encapsulation::Vxlan {
        reader.refuse(&["flood", "group", "offload"], "has a meaning for encapsulation vxlan only");
    }
    if encapsulation != Encapsulation::Stream {
        reader.refuse(&["proxy", "connect"], "has a meaning for encapsulation stream only");
    }
    if encapsulation != Encapsulation::Native {
        reader.refuse(&["direct"], "has a meaning for encapsulation native only");
    }
    let address =
        |reader: &mut Reader<'_>, port| remote.clone().and_then(|text| remote_address(reader, text, port));
    match encapsulation {
        Encapsulation::Native => (address(reader, None), direct::read_link(reader)),
        Encapsulation::Vnet => (address(reader, None), Tunnel::None),
        Encapsulation::Vxlan => {
            let remote = address(reader, Some(vxlan::PORT));
            (remote, Tunnel::Vxlan(read_vxlan(reader)))
        }
        Encapsulation::Stream => read_stream(reader, remote),
    }
}

fn read_vxlan(reader: &mut Reader<'_>) -> VxlanOptions {
    let offload = reader.flag("offload").is_none_or(|(_, flag)| flag);
    let mut options = VxlanOptions { offload, ..VxlanOptions::default() };
    if let Some((place, texts)) = reader.texts("flood") {
        if texts.len() > FLOOD_MAX {
            let text =
                format!("flood lists {}, the limit is {FLOOD_MAX}; use a multicast group", texts.len());
            reader.problem(&place, text);
        }
        for (place, text) in texts {
            match text.parse::<IpAddr>() {
                Ok(ip) if !ip.is_unspecified() && !ip.is_multicast() => options.flood.push(ip.to_canonical()),
                _ => {
                    let text = format!("flood: {} is not one host's address; write 10.0.0.3", quote(&text));
                    reader.problem(&place, text);
                }
            }
        }
    }
    if let Some((place, text)) = reader.text("group") {
        match text.parse::<std::net::Ipv4Addr>() {
            Ok(group) if group.is_multicast() => options.group = Some(group),
            _ => {
                let text = format!("group {} is no IPv4 multicast group; write 239.1.1.1", quote(&text));
                reader.problem(&place, text);
            }
        }
    }
    options
}

fn read_stream(reader: &mut Reader<'_>, remote: Option<Placed<String>>) -> (Option<SocketAddr>, Tunnel) {
    let proxy = reader.text("proxy").and_then(|text| read_proxy(reader, text));
    let connect = reader.flag("connect").is_none_or(|(_, flag)| flag);
    let Some((place, text)) = remote else { return (None, Tunnel::None) };
    let destination = match (&proxy, text.parse::<SocketAddr>()) {
        // What the proxy resolves is its own matter; only the form is looked at.
        (Some(_), Err(_)) => match named(&text) {
            Some(destination) => destination,
            None => {
                let text = format!("remote {} is no name with a port; write host.example:9000", quote(&text));
                reader.problem(&place, text);
                return (None, Tunnel::None);
            }
        },
        _ => match remote_address(reader, (place, text), None) {
            Some(address) => Destination::Address(address),
            None => return (None, Tunnel::None),
        },
    };
    let at = match (&proxy, &destination) {
        (Some(proxy), _) => Some(proxy.address),
        (None, Destination::Address(address)) => Some(*address),
        (None, Destination::Name(..)) => None,
    };
    (at, Tunnel::Stream(StreamOptions { destination, proxy, connect }))
}

fn named(text: &str) -> Option<Destination> {
    let (name, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let good = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-' || c == '_';
    let fits = !name.is_empty() && name.len() <= TEXT_MAX && name.chars().all(good);
    fits.then(|| Destination::Name(name.into(), port))
}

fn read_proxy(reader: &mut Reader<'_>, (place, text): Placed<String>) -> Option<Proxy> {
    let Some(rest) = text.strip_prefix("socks5://").or_else(|| text.strip_prefix("socks5h://")) else {
        // The text may hold a password: it is not shown.
        reader.problem(&place, format!("proxy is no SOCKS 5 proxy; write {PROXY}"));
        return None;
    };
    let (login, address) = match rest.rsplit_once('@') {
        Some((login, address)) => (Some(login), address),
        None => (None, rest),
    };
    let credentials = match login.map(|login| login.split_once(':')) {
        None => None,
        Some(Some((user, password)))
            if [user, password].iter().all(|t| (1..=TEXT_MAX).contains(&t.len())) =>
        {
            Some(Credentials { user: user.into(), password: password.into() })
        }
        Some(_) => {
            let text =
                format!("proxy: user name and password have 1 to {TEXT_MAX} bytes each; write {PROXY}");
            reader.problem(&place, text);
            return None;
        }
    };
    let address = socket_address(reader, "proxy", (place, address.trim_end_matches('/').into()))?;
    Some(Proxy { address, credentials })
}

/// Why a link carries exactly one network, if it does.
pub(super) fn carries_one(encapsulation: Encapsulation, tunnel: &Tunnel) -> Option<&'static str> {
    match (encapsulation, tunnel) {
        (Encapsulation::Vnet, _) => Some("the vnet encapsulation carries no network number"),
        (_, Tunnel::Vxlan(VxlanOptions { flood, group, .. })) if !flood.is_empty() || group.is_some() => {
            Some("a vxlan link with flood or group is one network's")
        }
        _ => None,
    }
}

/// Whether a link may do without a remote: what a sealed peer sends proves where it is.
pub(super) fn learns_remote(encapsulation: Encapsulation, security: &LinkSecurity) -> bool {
    encapsulation == Encapsulation::Native && security.peer.is_some()
}

/// A link's remote as it is written.
pub(super) fn remote(link: &LinkSpec) -> String {
    match &link.tunnel {
        _ if link.remote == ANYWHERE => "anywhere".into(),
        Tunnel::Stream(StreamOptions { destination, .. }) => destination.to_string(),
        _ => link.remote.to_string(),
    }
}

/// True when the link's datagrams arrive where the bridge listens, so that its own address would lead back to it.
pub(super) fn arrives_at_bridge(link: &LinkSpec) -> bool {
    matches!(link.encapsulation, Encapsulation::Native | Encapsulation::Vnet)
}

/// What a link claims for itself among the host's links: the addresses it is known by, in words.
pub(super) fn claims(link: &LinkSpec) -> Vec<String> {
    match &link.tunnel {
        Tunnel::Vxlan(VxlanOptions { flood, .. }) => {
            let mut addresses: Vec<_> = [link.remote.ip()].iter().chain(flood).copied().collect();
            addresses.sort();
            addresses.iter().map(|ip| format!("VTEP {ip}")).collect()
        }
        // A connection that comes in belongs to the link whose remote it comes from; from a proxy nobody comes.
        Tunnel::Stream(StreamOptions { proxy: None, .. }) => {
            vec![format!("stream peer {}", link.remote.ip())]
        }
        Tunnel::Stream(StreamOptions { destination, .. }) => vec![format!("stream to {destination}")],
        Tunnel::None | Tunnel::Direct(_) if link.remote == ANYWHERE => vec![],
        Tunnel::None | Tunnel::Direct(_) => link.remotes().map(|remote| format!("remote {remote}")).collect(),
    }
}

/// Why a link cannot work, whatever the host is.
pub(super) fn unusable(bridge: &BridgeSpec, link: &LinkSpec) -> Option<String> {
    let name = &link.name;
    match (&link.tunnel, bridge.vxlan_listen) {
        (Tunnel::Vxlan(_), None) => Some(format!(
            "link {name} needs VXLAN to be listened for; write vxlan_listen = \"[::]:{}\" in [bridge]",
            vxlan::PORT
        )),
        (Tunnel::Vxlan(_), Some(listen)) => check::unreachable(listen, 1, "vxlan_listen", link),
        (Tunnel::Stream(StreamOptions { connect: false, proxy: Some(_), .. }), _) => Some(format!(
            "link {name} waits for the other side to connect (connect = false), but names a proxy; remove one of them"
        )),
        (Tunnel::Stream(StreamOptions { connect: false, .. }), _) if bridge.stream_listen.is_none() => {
            Some(format!(
                "link {name} waits for the other side to connect; write stream_listen = \"[::]:9002\" in [bridge]"
            ))
        }
        (Tunnel::Stream(_), _) => None,
        (Tunnel::None | Tunnel::Direct(_), _) if link.remote == ANYWHERE => None,
        (Tunnel::None | Tunnel::Direct(_), _) => {
            check::unreachable(bridge.listen, bridge.ports, "listen", link)
        }
    }
}

/// What a plan shows of it, behind the rest of the link.
pub(super) struct Shown<'a>(pub &'a Tunnel);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Tunnel::None => Ok(()),
            Tunnel::Direct(guests) => {
                let guests: Vec<_> = guests.iter().map(|(mac, port)| format!("{mac}@{port}")).collect();
                write!(f, ", direct {}", guests.join(" "))
            }
            Tunnel::Vxlan(VxlanOptions { flood, group, offload }) => {
                if !flood.is_empty() {
                    let flood: Vec<_> = flood.iter().map(ToString::to_string).collect();
                    write!(f, ", flood {}", flood.join(" "))?;
                }
                group.map_or(Ok(()), |group| write!(f, ", group {group}"))?;
                f.write_str(if *offload { "" } else { ", offload off" })
            }
            Tunnel::Stream(StreamOptions { proxy, connect, .. }) => {
                if let Some(proxy) = proxy {
                    write!(f, ", proxy {}", proxy.address)?;
                }
                f.write_str(if *connect { "" } else { ", waiting" })
            }
        }
    }
}
