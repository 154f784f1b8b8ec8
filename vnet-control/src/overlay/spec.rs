//! The `[overlay]` table of the configuration: where the store is, and how hosts are joined.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::super::config::{Notes, is_name, network_ids, socket_address};
use super::super::desired::{Desired, Item, is_host_address};
use super::super::table::{Placed, Problem, Reader, Table, Value, quote};
use vnet::frame::NetworkId;

/// Most members of an etcd cluster that are listed: etcd's own advice is at most seven.
const ENDPOINTS_MAX: usize = 16;
/// Most reflectors: each is a host that everybody knows.
const REFLECTORS_MAX: usize = 16;

/// How this host takes part in the distributed overlay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverlaySpec {
    /// Members of the etcd cluster: `http://HOST:PORT` or `https://HOST:PORT`.
    pub etcd: Vec<String>,
    /// PEM file of the authorities that the store's certificate is checked against; there when an endpoint has https.
    pub ca: Option<PathBuf>,
    /// PEM files of this host's certificate and key for the store.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Which hosts have links to each other.
    pub topology: Topology,
    /// Hosts that relay for those behind NAT, the first that is there for all.
    pub reflectors: Vec<String>,
    /// Whether only reflectors can reach this host.
    pub behind_nat: bool,
    /// Where other hosts reach this one; found out when absent.
    pub address: Option<SocketAddr>,
    /// The networks that are published and joined; all that are declared when absent.
    pub networks: Option<Vec<NetworkId>>,
    /// Computed links are sealed, with the host that each leads to.
    pub sealed: bool,
    /// Clear text may travel computed links.
    pub trusted: bool,
}

/// Which hosts have links to each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Topology {
    /// All that share a network; those behind NAT by way of a reflector.
    #[default]
    Mesh,
    /// All with one host, which relays.
    Hub(String),
    /// Those that the file links; the store only tells where stations are.
    Explicit,
}

impl FromStr for Topology {
    type Err = String;

    fn from_str(text: &str) -> Result<Topology, String> {
        match text.split_whitespace().collect::<Vec<_>>()[..] {
            ["mesh"] => Ok(Topology::Mesh),
            ["explicit"] => Ok(Topology::Explicit),
            ["hub", name] if is_name(name) => Ok(Topology::Hub(name.into())),
            _ => Err(format!("{} is not known; use 'mesh', 'hub NAME' or 'explicit'", quote(text))),
        }
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Topology::Mesh => f.write_str("mesh"),
            Topology::Hub(name) => write!(f, "hub {name}"),
            Topology::Explicit => f.write_str("explicit"),
        }
    }
}

/// Reads the table; what is wrong with it goes to `notes`.
pub(crate) fn read(table: Table, notes: &mut Notes) -> Option<Item<OverlaySpec>> {
    let before = notes.problems.len();
    let mut reader = Reader::new("[overlay]", table, &mut notes.problems);
    let place = reader.place();
    reader.require("etcd", "[\"http://10.0.0.1:2379\"]");
    let etcd = texts(&mut reader, "etcd", ENDPOINTS_MAX, endpoint);
    let [ca, cert, key] = ["ca", "cert", "key"].map(|key| file(&mut reader, key));
    if cert.is_some() != key.is_some() {
        reader.problem(&place, "[overlay] cert and key belong together; give both or neither");
    }
    if (ca.is_some() || cert.is_some()) && etcd.iter().any(|endpoint| endpoint.starts_with("http:")) {
        reader.problem(&place, "[overlay] ca, cert and key have no use with http://; write https:// in etcd");
    }
    if ca.is_none() && etcd.iter().any(|endpoint| endpoint.starts_with("https:")) {
        reader.problem(
            &place,
            "[overlay] https:// needs the authority of the store's certificate; write ca = \"/…\"",
        );
    }
    let topology = reader.parsed("topology").map_or(Topology::Mesh, |(_, topology)| topology);
    let name = |text: &str| is_name(text).then_some(()).ok_or_else(|| "is not a host's name".to_string());
    let reflectors = texts(&mut reader, "reflectors", REFLECTORS_MAX, name);
    let behind_nat = reader.flag("behind_nat");
    if let Some((place, true)) = &behind_nat
        && reflectors.is_empty()
        && topology == Topology::Mesh
    {
        reader.problem(place, "behind_nat needs hosts that relay for this one; list them in reflectors");
    }
    let address = reader.text("address").and_then(|text| advertised(&mut reader, text));
    let networks = network_ids(&mut reader, "networks").map(|(_, ids)| ids);
    let (sealed, trusted) = (reader.flag("sealed"), reader.flag("trusted"));
    reader.finish();
    if notes.problems.len() != before {
        return None;
    }
    let behind_nat = behind_nat.is_some_and(|(_, flag)| flag);
    let identity = cert.zip(key);
    let [sealed, trusted] = [sealed, trusted].map(|flag| flag.is_some_and(|(_, flag)| flag));
    let spec = OverlaySpec {
        etcd,
        ca,
        identity,
        topology,
        reflectors,
        behind_nat,
        address,
        networks,
        sealed,
        trusted,
    };
    Some(Item { place, spec })
}

/// A list of texts, each of which passes `check` (whose error goes on behind the text).
fn texts(
    reader: &mut Reader<'_>,
    key: &'static str,
    most: usize,
    check: impl Fn(&str) -> Result<(), String>,
) -> Vec<String> {
    let Some(entry) = reader.take(key) else { return vec![] };
    let Value::List(list) = entry.value else {
        reader.problem(&entry.place, format!("'{key}' must be a list of texts; write {key} = [\"…\"]"));
        return vec![];
    };
    if list.is_empty() && key == "etcd" || list.len() > most {
        reader.problem(&entry.place, format!("{key} must list 1 to {most} texts"));
        return vec![];
    }
    let mut texts: Vec<String> = vec![];
    for item in list {
        match item.value {
            Value::Text(text) if texts.contains(&text) => {
                reader.problem(&item.place, format!("{key}: {} is listed twice", quote(&text)));
            }
            Value::Text(text) => match check(&text) {
                Ok(()) => texts.push(text),
                Err(why) => reader.problem(&item.place, format!("{key}: {} {why}", quote(&text))),
            },
            _ => reader.problem(&item.place, format!("{key} takes texts")),
        }
    }
    texts
}

fn endpoint(text: &str) -> Result<(), String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let good = |rest: &str| {
        let (host, port) = rest.rsplit_once(':')?;
        let legal = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
        let port: u16 = port.parse().ok()?;
        (port != 0 && !host.is_empty() && host.chars().all(legal)).then_some(())
    };
    rest.and_then(good)
        .ok_or("is not a member of an etcd cluster; write http://10.0.0.1:2379 or https://…".into())
}

/// Where other hosts reach this one.
fn advertised(reader: &mut Reader<'_>, text: Placed<String>) -> Option<SocketAddr> {
    let place = text.0.clone();
    let address = socket_address(reader, "address", text)?;
    if is_host_address(address) {
        return Some(address);
    }
    let text = format!("address {address} is not one at which others reach this host; write 10.0.0.1:9000");
    reader.problem(&place, text);
    None
}

fn file(reader: &mut Reader<'_>, key: &'static str) -> Option<PathBuf> {
    let (place, path) = reader.text(key)?;
    if path.starts_with('/') && !path.contains('\0') {
        return Some(path.into());
    }
    reader.problem(&place, format!("{key} {} is not an absolute path; begin it with '/'", quote(&path)));
    None
}

/// What has to hold between `[overlay]` and the rest.
pub(crate) fn check(desired: &Desired, problems: &mut Vec<Problem>) {
    let Some(Item { place, spec }) = &desired.overlay else { return };
    if spec.sealed && desired.identity.is_none() {
        let text = format!(
            "[overlay] sealed needs an [identity] to be known by; make one with 'vnet keys init' and 'vnet keys issue {}'",
            desired.host.spec.name
        );
        problems.push(Problem::new(place, text));
    }
    let safe = spec.sealed || spec.trusted || spec.topology == Topology::Explicit;
    if !safe && desired.bridge.spec.trusted.is_empty() {
        let text = "the overlay's links would carry frames in clear text; write sealed = true, or trusted = true if their \
                    paths are safe (or the paths' networks in [bridge] trusted)";
        problems.push(Problem::new(place, text));
    }
    for network in spec.networks.iter().flatten() {
        let declared = desired.networks.iter().any(|item| item.spec.id == *network);
        if !declared && *network != NetworkId::DEFAULT {
            let text = format!("network {network} is not declared; add [[network]] with id = {network}");
            problems.push(Problem::new(place, text));
        }
    }
    if let Some(address) = spec.address
        && !desired.bridge.spec.listen.ip().is_unspecified()
        && desired.bridge.spec.listen.is_ipv4() != address.is_ipv4()
    {
        let listen = desired.bridge.spec.listen;
        let text = format!("[overlay] address {address} is of another kind than [bridge] listen {listen}");
        problems.push(Problem::new(place, text));
    }
}
