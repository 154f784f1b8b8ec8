//! What the configuration says about security: who this host is, which links are sealed, where clear text may travel, and
//! for what the other hosts may speak.
//!
//! A link is safe unless its writer says otherwise: it is sealed, or it stays on this machine, or its remote is in a
//! network of `[bridge] trusted`, or it says `trusted = true`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use super::desired::{Desired, Item, LinkSpec};
use super::table::{Entry, Place, Problem, Reader, Table, Value, quote};
use vnet::link::sealed::identity::{IdentityFiles, server_name};
use vnet::link::{ANYWHERE, Encapsulation, StreamOptions, Tunnel};
use vnet::wire::ethernet::Mac;

/// Seconds after which sealed links get new keys, unless the file says otherwise.
pub const REKEY_S: u32 = 3600;
const REKEY_MIN_S: u32 = 2;
const REKEY_MAX_S: u32 = 86_400;
/// Most pairs of hosts that meet by one: each has a UDP port.
const MEETINGS_MAX: u32 = 256;
/// Most addresses that a link's `macs` lists, and networks in `[bridge] trusted`.
const LISTED_MAX: usize = 4096;

/// What a link lets through, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkSecurity {
    /// Clear text may travel its path.
    pub trusted: bool,
    /// Nothing travels in clear text; the other host's certificate has to have this name.
    pub peer: Option<String>,
    /// Source addresses that frames from the other host may have, sorted; all when absent.
    pub macs: Option<Vec<Mac>>,
    /// The link to the host by which the two hosts meet, where neither reaches the other.
    pub via: Option<String>,
}

impl fmt::Display for LinkSecurity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.peer, self.trusted) {
            (Some(peer), _) => write!(f, ", sealed with {peer}")?,
            (None, true) => f.write_str(", trusted")?,
            (None, false) => {}
        }
        if let Some(via) = &self.via {
            write!(f, ", via {via}")?;
        }
        match &self.macs {
            Some(macs) => write!(f, ", {} source addresses", macs.len()),
            None => Ok(()),
        }
    }
}

/// A network of IP addresses, as in 10.0.0.0/8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    address: IpAddr,
    len: u8,
}

impl Prefix {
    /// True when `address` is in it. IPv4 addresses in IPv6 form are IPv4 addresses.
    pub fn contains(&self, address: IpAddr) -> bool {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
            IpAddr::V6(v6) => v6.to_bits(),
        };
        let address = address.to_canonical();
        let differ = bits(self.address) ^ bits(address);
        self.address.is_ipv4() == address.is_ipv4() && differ.leading_zeros() >= u32::from(self.len)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.len)
    }
}

impl FromStr for Prefix {
    type Err = String;

    fn from_str(text: &str) -> Result<Prefix, String> {
        let bad = || format!("{} is not a network; write one as 10.0.0.0/8 or fd00::/8", quote(text));
        let (address, len) = text.split_once('/').ok_or_else(bad)?;
        let address: IpAddr = address.parse().map_err(|_| bad())?;
        let len: u8 = len.parse().map_err(|_| bad())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if len > most || address.to_canonical() != address { Err(bad()) } else { Ok(Prefix { address, len }) }
    }
}

/// A list of texts that `T` can be read from.
fn list<T: FromStr<Err: fmt::Display>>(
    reader: &mut Reader<'_>,
    key: &'static str,
    example: &str,
) -> Option<(Place, Vec<T>)> {
    let Entry { place, value } = reader.take(key)?;
    let Value::List(entries) = value else {
        reader.problem(&place, format!("'{key}' must be a list of texts; write {key} = [\"{example}\"]"));
        return None;
    };
    if entries.len() > LISTED_MAX {
        reader.problem(&place, format!("{key} lists more than {LISTED_MAX}, the limit"));
    }
    let mut values = vec![];
    for entry in entries {
        match &entry.value {
            Value::Text(text) => match text.parse() {
                Ok(value) => values.push(value),
                Err(error) => reader.problem(&entry.place, format!("{key}: {error}")),
            },
            _ => reader.problem(&entry.place, format!("{key} takes texts; write {key} = [\"{example}\"]")),
        }
    }
    Some((place, values))
}

/// Reads `[bridge] trusted` and `rekey_s`.
pub(super) fn read_bridge(reader: &mut Reader<'_>) -> (Vec<Prefix>, u32) {
    let trusted = list(reader, "trusted", "10.0.0.0/8").map(|(_, trusted)| trusted).unwrap_or_default();
    (trusted, reader.number("rekey_s", REKEY_MIN_S, REKEY_MAX_S).unwrap_or(REKEY_S))
}

/// Reads `[bridge] meetings`: pairs that meet at UDP ports behind the `ports` ports from `listen` on.
pub(super) fn read_meetings(reader: &mut Reader<'_>, listen: SocketAddr, ports: u16) -> u16 {
    let place = reader.place_of("meetings");
    let meetings = reader.number("meetings", 0, MEETINGS_MAX).unwrap_or(0) as u16;
    if meetings > 0 && listen.port().checked_add(ports - 1 + meetings).is_none() {
        let text = format!(
            "{meetings} UDP ports for meetings, behind those of the bridge, end beyond 65535; listen on a lower one"
        );
        reader.problem(&place, text);
    }
    meetings
}

/// Reads `[identity]`.
pub(super) fn read_identity(table: Table, problems: &mut Vec<Problem>) -> Option<Item<IdentityFiles>> {
    let mut reader = Reader::new("[identity]", table, problems);
    let place = reader.place();
    let mut path = |key, example: Option<&str>| {
        if let Some(example) = example {
            reader.require(key, &format!("\"/etc/vnet/keys/{example}\""));
        }
        let (place, path) = reader.text(key)?;
        if !path.starts_with('/') || path.contains('\0') {
            reader.problem(
                &place,
                format!("{key} {} is not an absolute path; begin it with '/'", quote(&path)),
            );
            return None;
        }
        Some(PathBuf::from(path))
    };
    let (ca, certificate) = (path("ca", Some("ca.pem")), path("certificate", Some("h1.pem")));
    let (key, crl) = (path("key", Some("h1.key")), path("crl", None));
    reader.finish();
    Some(Item { place, spec: IdentityFiles { ca: ca?, certificate: certificate?, key: key?, crl } })
}

/// Reads a link's `sealed`, `peer`, `trusted` and `macs`.
pub(super) fn read_link(
    reader: &mut Reader<'_>,
    name: Option<&str>,
    encapsulation: Encapsulation,
) -> LinkSecurity {
    let sealed = reader.flag("sealed");
    let peer_place = reader.place_of("peer");
    let peer = reader.text("peer").map(|(_, peer)| peer);
    let trusted = reader.flag("trusted").is_some_and(|(_, trusted)| trusted);
    let macs = list(reader, "macs", "52:54:00:00:00:01").map(|(place, macs): (_, Vec<Mac>)| {
        if macs.is_empty() {
            let text = "macs is empty, every frame from the other host would be dropped; list some or remove the line";
            reader.problem(&place, text);
        }
        sorted(macs)
    });
    let via_place = reader.place_of("via");
    let via = reader.text("via").map(|(_, via)| via);
    if via.is_some()
        && (encapsulation != Encapsulation::Native || !sealed.as_ref().is_some_and(|(_, sealed)| *sealed))
    {
        let text =
            "'via' is for sealed links of encapsulation native; write sealed = true as well, or remove it";
        reader.problem(&via_place, text);
    }
    let mut security = LinkSecurity { trusted, peer: None, macs, via };
    match (sealed, peer) {
        (Some((place, true)), peer) => {
            if !matches!(encapsulation, Encapsulation::Native | Encapsulation::Stream) {
                let text = format!(
                    "the {encapsulation} encapsulation cannot be sealed; use native or stream, or trusted = true"
                );
                reader.problem(&place, text);
            }
            // Links are usually called after the host that they lead to.
            let peer = peer.unwrap_or_else(|| name.unwrap_or_default().into());
            if name.is_some()
                && let Err(why) = server_name(&peer)
            {
                reader.problem(&peer_place, format!("{why}; write peer = \"h2\""));
            }
            security.peer = Some(peer);
        }
        (_, Some(_)) => {
            let text = "'peer' is the name that a sealed link's other host must have; write sealed = true as well, or remove it";
            reader.problem(&peer_place, text);
        }
        (_, None) => {}
    }
    security
}

fn sorted(mut macs: Vec<Mac>) -> Vec<Mac> {
    macs.sort();
    macs.dedup();
    macs
}

/// Adds what is wrong between links and the host's security to `problems`.
pub(super) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let mut peers: Vec<(String, &Item<LinkSpec>)> = vec![];
    for item in &desired.links {
        check_meeting(desired, item, problems);
        let LinkSpec { name, security, .. } = &item.spec;
        let Some(peer) = &security.peer else {
            if let Some(text) = clear(desired, &item.spec) {
                problems.push(Problem::new(&item.place, text));
            }
            continue;
        };
        let own = &desired.host.spec.name;
        if desired.identity.is_none() {
            let text = format!(
                "link {name} is sealed, but there is no [identity] to be known by at {}; \
                 make one with 'vnet keys init' and 'vnet keys issue {own}'",
                super::tunnel::remote(&item.spec)
            );
            problems.push(Problem::new(&item.place, text));
        } else if let Err(why) = server_name(own) {
            problems.push(Problem::new(&desired.host.place, why));
        }
        if peer.eq_ignore_ascii_case(own) {
            let text = format!(
                "link {name} is sealed with '{peer}', which is this host's own name; write peer = \"…\""
            );
            problems.push(Problem::new(&item.place, text));
        }
        if let Some((_, first)) = peers.iter().find(|(other, _)| other.eq_ignore_ascii_case(peer)) {
            let text = format!(
                "link {name} is sealed with {peer}, as link {} is{}; hosts are told apart by their names: name another peer",
                first.spec.name,
                first.place.aside()
            );
            problems.push(Problem::new(&item.place, text));
        }
        peers.push((peer.clone(), item));
    }
}

/// Adds what is wrong with links whose hosts meet by a third one to `problems`.
fn check_meeting(desired: &Desired, item: &Item<LinkSpec>, problems: &mut Vec<Problem>) {
    let LinkSpec { name, remote, ports, security, .. } = &item.spec;
    let Some(via) = &security.via else { return };
    let between = desired.links.iter().find(|other| other.spec.name == *via).map(|other| &other.spec);
    let good = between.is_some_and(|between| {
        let sealed = between.encapsulation == Encapsulation::Native && between.security.peer.is_some();
        sealed && between.security.via.is_none() && between.remote != ANYWHERE
    });
    if !good {
        let text = format!(
            "link {name} goes via {}, which is no sealed native link with a remote; name one",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
    if *remote != ANYWHERE || *ports != 1 {
        let text = format!(
            "link {name} goes via {}, so its remote is found out; remove remote and ports",
            quote(via)
        );
        problems.push(Problem::new(&item.place, text));
    }
}

/// Why a link that the overlay asks for is refused: no mistake in the configuration, but nothing to be done.
pub(super) fn unsafe_link(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let Some(peer) = &link.security.peer else { return clear(desired, link) };
    let own = peer.eq_ignore_ascii_case(&desired.host.spec.name);
    let own = own.then(|| format!("link {} would be sealed with this host's own name", link.name));
    own.or_else(|| server_name(peer).err().map(|why| format!("link {} cannot be sealed: {why}", link.name)))
}

/// Why a link in clear text is refused.
fn clear(desired: &Desired, link: &LinkSpec) -> Option<String> {
    let LinkSpec { name, remote, security, tunnel, .. } = link;
    if security.trusted {
        return None;
    }
    if let Tunnel::Stream(StreamOptions { proxy: Some(_), .. }) = tunnel {
        // The path goes on behind the proxy, nobody knows where.
        return Some(format!(
            "link {name} would carry frames through a proxy to {} in clear text; write sealed = true, or trusted = true if \
             its path is safe",
            super::tunnel::remote(link)
        ));
    }
    let flood = if let Tunnel::Vxlan(vxlan) = tunnel { &vxlan.flood[..] } else { &[] };
    let near =
        |ip: IpAddr| ip.is_loopback() || desired.bridge.spec.trusted.iter().any(|prefix| prefix.contains(ip));
    let mut leads_to = std::iter::once(remote.ip()).chain(flood.iter().copied()).map(|ip| ip.to_canonical());
    let ip = leads_to.find(|ip| !near(*ip))?;
    Some(match link.encapsulation {
        Encapsulation::Native | Encapsulation::Stream => format!(
            "link {name} would carry frames to {ip} in clear text; write sealed = true, or trusted = true if its path is safe \
             (or the path's network in [bridge] trusted)"
        ),
        encapsulation => format!(
            "link {name} would carry frames to {ip} in clear text, as the {encapsulation} encapsulation does; use a sealed \
             native or stream link, or write trusted = true if its path is safe"
        ),
    })
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
