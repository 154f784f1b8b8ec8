//! Reading the configuration: TOML (a file, a request's body) or one JSON object (a command) becomes desired state.
//!
//! Everything that can be judged by looking at one key or one table is judged here, everything that takes several of them
//! in `check`; both say all they find, one line each, and nothing of a text with an error in it is used. The checks look
//! at the text alone, never at the host, so that a file can be checked anywhere.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::access::Access;
use super::check;
use super::desired::*;
use super::direct;
use super::driving::{self, Driving};
use super::overlay::spec;
use super::security;
use super::table::{Entry, Place, Placed, Problem, Reader, Table, Value, quote};
use super::tunnel;
use vnet::dispatch::isolation::{Isolation, PRIORITY_MAX};
use vnet::dispatch::yielding::Strategy;
use vnet::frame::{BATCH_MAX, MTU_MAX, NetworkId};
use vnet::interface::tap::DEVICE_NAME_MAX;
use vnet::interface::vhost_user;
use vnet::link::{ANYWHERE, Encapsulation, PORTS_MAX, ZeroCopy};
use vnet::route::{AGEING_S, Qualifier, STORM_FRAMES_PER_S};
use vnet::wire::ethernet::Mac;

/// Largest configuration file in bytes: a million routes fit.
pub const FILE_MAX: u64 = 128 << 20;
/// Longest name of a host, interface or link in bytes.
pub const NAME_MAX: usize = 64;
const THREADS_MAX: u32 = 64;
const CPU_MAX: u32 = 8_191;
const US_MAX: u32 = 1_000_000;
const AGEING_MAX_S: u32 = 1_000_000;
const RATE_MAX: u32 = i32::MAX as u32;
const NETWORK_MAX: u32 = (1 << 24) - 1;

/// Why a configuration is not used: everything that is wrong with it, in the order of its lines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError(pub Vec<Problem>);

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> ConfigError {
        ConfigError(vec![problem])
    }
}

/// A configuration that was read, and what its writer should know.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// What the host should be.
    pub desired: Desired,
    /// Things that are not wrong but do not do what they seem to.
    pub warnings: Vec<Problem>,
}

/// Reads and checks a configuration file.
pub fn load(path: &Path) -> Result<Configuration, ConfigError> {
    let file = path.display().to_string();
    let cannot = |why: String| ConfigError::from(Problem::new(&Place::default(), format!("{file}: {why}")));
    let length = std::fs::metadata(path).map(|meta| meta.len());
    if length.as_ref().is_ok_and(|length| *length > FILE_MAX) {
        return Err(cannot(format!("larger than {FILE_MAX} bytes, the limit of a configuration file")));
    }
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(error) => {
            Err(cannot(format!("cannot read the configuration: {error}; give its path with --config")))
        }
    }
}

/// Reads and checks a configuration; `file` is its name in messages.
pub fn parse(file: &str, text: &str) -> Result<Configuration, ConfigError> {
    let file: Arc<str> = file.into();
    let table = Table::from_toml(&file, text).map_err(ConfigError)?;
    let mut notes = Notes::default();
    let desired = read_desired(table, &Place::new(&file, 1), &mut notes);
    check::check(&desired, &notes.broken, &mut notes.problems);
    notes.problems.sort();
    notes.problems.dedup();
    notes.warnings.sort();
    if notes.problems.is_empty() {
        Ok(Configuration { desired, warnings: notes.warnings })
    } else {
        Err(ConfigError(notes.problems))
    }
}

/// Checks a desired state that was put together otherwise.
pub fn validate(desired: &Desired) -> Result<(), ConfigError> {
    let mut problems = vec![];
    check::check(desired, &[], &mut problems);
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems)) }
}

/// Reads an interface from a JSON object with the keys of `[[interface]]`.
pub fn interface_from_json(json: &[u8]) -> Result<Item<InterfaceSpec>, ConfigError> {
    from_json(json, read_interface)
}

/// Reads what is to change of an open interface from a JSON object with some of the keys of `[[interface]]`: `mode` and its
/// rates, `interrupts` and its densities, `storm_limit`, `port_security`. The others are refused.
pub fn change_from_json(json: &[u8], spec: &InterfaceSpec) -> Result<InterfaceSpec, ConfigError> {
    let (mut problems, mut spec) = (vec![], spec.clone());
    let mut reader = Reader::new("an open interface", Table::from_json(json)?, &mut problems);
    driving::read_change(&mut reader, &mut spec);
    reader.finish();
    if problems.is_empty() { Ok(spec) } else { Err(ConfigError(problems)) }
}

/// Reads a link from a JSON object with the keys of `[[link]]`.
pub fn link_from_json(json: &[u8]) -> Result<Item<LinkSpec>, ConfigError> {
    from_json(json, read_link)
}

/// Reads a rule from a JSON object with the keys of `[[route]]`.
pub fn route_from_json(json: &[u8]) -> Result<Item<RouteSpec>, ConfigError> {
    from_json(json, read_route)
}

fn from_json<T>(json: &[u8], read: fn(Table, &mut Notes) -> Option<Item<T>>) -> Result<Item<T>, ConfigError> {
    let mut notes = Notes::default();
    let item = read(Table::from_json(json)?, &mut notes);
    match item {
        Some(item) if notes.problems.is_empty() => Ok(item),
        _ => Err(ConfigError(notes.problems)),
    }
}

/// What is found while reading.
#[derive(Default)]
pub(super) struct Notes {
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Problem>,
    broken: Vec<Target>,
}

fn read_desired(table: Table, top: &Place, notes: &mut Notes) -> Desired {
    let mut root = Reader::new("the file", table, &mut notes.problems);
    let [host, control, dispatch, bridge, identity] =
        ["host", "control", "dispatch", "bridge", "identity"].map(|key| root.table(key));
    let networks = root.tables("network");
    let interfaces = root.tables("interface");
    let links = root.tables("link");
    let routes = root.tables("route");
    let overlay = root.table("overlay");
    root.finish();
    let or_top = |table: Option<Table>| table.unwrap_or(Table { place: top.clone(), ..Table::default() });
    Desired {
        host: read_host(or_top(host), notes),
        control: read_control(or_top(control), notes),
        dispatch: read_dispatch(or_top(dispatch), notes),
        bridge: read_bridge(or_top(bridge), notes),
        overlay: overlay.and_then(|table| spec::read(table, notes)),
        identity: identity.and_then(|table| security::read_identity(table, &mut notes.problems)),
        networks: networks.into_iter().filter_map(|table| read_network(table, notes)).collect(),
        interfaces: interfaces.into_iter().filter_map(|table| read_interface(table, notes)).collect(),
        links: links.into_iter().filter_map(|table| read_link(table, notes)).collect(),
        routes: routes.into_iter().filter_map(|table| read_route(table, notes)).collect(),
    }
}

fn read_host(table: Table, notes: &mut Notes) -> Item<HostSpec> {
    let mut reader = Reader::new("[host]", table, &mut notes.problems);
    let place = reader.place();
    let name = read_name(&mut reader, "h1").unwrap_or_default();
    reader.finish();
    Item { place, spec: HostSpec { name } }
}

fn read_control(table: Table, notes: &mut Notes) -> Item<ControlSpec> {
    let mut reader = Reader::new("[control]", table, &mut notes.problems);
    let place = reader.place();
    let socket = reader.text("socket").and_then(|text| socket_path(&mut reader, text));
    let access = Access::read(&mut reader);
    reader.finish();
    let socket = socket.unwrap_or_else(|| ControlSpec::default().socket);
    Item { place, spec: ControlSpec { socket, access } }
}

fn read_dispatch(table: Table, notes: &mut Notes) -> Item<DispatchSpec> {
    const YIELDS: [(&str, Option<Strategy>); 4] = [
        ("block", Some(Strategy::Block)),
        ("immediate", Some(Strategy::Immediate)),
        ("timed", Some(Strategy::Timed)),
        ("adaptive", Some(Strategy::Adaptive)),
    ];
    let default = DispatchSpec::default();
    let mut reader = Reader::new("[dispatch]", table, &mut notes.problems);
    let place = reader.place();
    let threads = reader.number("threads", 1, THREADS_MAX).map_or(default.threads, |n| n as usize);
    let cpus = match reader.numbers("cpus", 0, CPU_MAX) {
        Some((place, cpus)) => {
            if !cpus.is_empty() && cpus.len() != threads {
                let text =
                    format!("cpus lists {} for {threads} threads; list one per thread, or none", cpus.len());
                reader.problem(&place, text);
            }
            cpus.into_iter().map(|cpu| cpu as usize).collect()
        }
        None => default.cpus,
    };
    let yield_strategy = reader.word("yield", &YIELDS).map_or(default.yield_strategy, |(_, word)| word);
    let sleep_us = reader.number("sleep_us", 1, US_MAX).unwrap_or(default.sleep_us);
    let nowork_us = reader.number("nowork_us", 0, US_MAX).unwrap_or(default.nowork_us);
    let burst = reader.number("burst", 1, BATCH_MAX as u32).map_or(default.burst, |n| n as usize);
    let isolation = read_isolation(&mut reader, yield_strategy, cpus.is_empty());
    reader.finish();
    Item {
        place,
        spec: DispatchSpec { threads, cpus, yield_strategy, sleep_us, nowork_us, burst, isolation },
    }
}

fn read_isolation(reader: &mut Reader<'_>, strategy: Strategy, anywhere: bool) -> Isolation {
    let place = reader.place_of("priority");
    let priority = reader.number("priority", 1, PRIORITY_MAX);
    let spins = matches!(strategy, Strategy::Immediate | Strategy::Adaptive);
    if priority.is_some() && spins && anywhere {
        let text = "priority lets a dispatcher that spins keep everybody else from its processor; give it one with \
                    cpus, or yield = \"block\"";
        reader.problem(&place, text);
    }
    let lock_memory = reader.flag("lock_memory").is_some_and(|(_, flag)| flag);
    let busy_poll_us = reader.number("busy_poll_us", 0, US_MAX).unwrap_or(0);
    Isolation { priority, lock_memory, busy_poll_us }
}

fn read_bridge(table: Table, notes: &mut Notes) -> Item<BridgeSpec> {
    const ZERO_COPY: [(&str, Option<ZeroCopy>); 3] =
        [("auto", Some(ZeroCopy::Auto)), ("off", Some(ZeroCopy::Off)), ("on", Some(ZeroCopy::On))];
    let mut reader = Reader::new("[bridge]", table, &mut notes.problems);
    let place = reader.place();
    let default = BridgeSpec::default();
    let listen = reader.text("listen").and_then(|text| socket_address(&mut reader, "listen", text));
    let listen = listen.unwrap_or(default.listen);
    let ports = read_ports(&mut reader, Some(listen));
    let mut address = |key| reader.text(key).and_then(|text| socket_address(&mut reader, key, text));
    let (vxlan_listen, stream_listen) = (address("vxlan_listen"), address("stream_listen"));
    let zero_copy = reader.word("zero_copy", &ZERO_COPY).map_or(default.zero_copy, |(_, word)| word);
    let (trusted, rekey_s) = security::read_bridge(&mut reader);
    let meetings = security::read_meetings(&mut reader, listen, ports);
    reader.finish();
    Item {
        place,
        spec: BridgeSpec {
            listen,
            ports,
            vxlan_listen,
            stream_listen,
            zero_copy,
            trusted,
            rekey_s,
            meetings,
        },
    }
}

/// How many ports there are from that of `first` on.
fn read_ports(reader: &mut Reader<'_>, first: Option<SocketAddr>) -> u16 {
    let place = reader.place_of("ports");
    let ports = reader.number("ports", 1, PORTS_MAX.into()).map_or(1, |ports| ports as u16);
    if let Some(first) = first
        && first.port().checked_add(ports - 1).is_none()
    {
        let text = format!("{ports} ports from {} on end beyond 65535; begin with a lower one", first.port());
        reader.problem(&place, text);
    }
    ports
}

fn read_network(table: Table, notes: &mut Notes) -> Option<Item<NetworkSpec>> {
    let mut reader = Reader::new("[[network]]", table, &mut notes.problems);
    let place = reader.place();
    reader.require("id", "1");
    let id = reader.take("id").and_then(|entry| network_id(&mut reader, "id", &entry));
    let learning = reader.flag("learning").is_none_or(|(_, flag)| flag);
    let ageing_s = reader.number("ageing_s", 0, AGEING_MAX_S).unwrap_or(AGEING_S);
    let relay = reader.flag("relay").is_some_and(|(_, flag)| flag);
    reader.finish();
    Some(Item { place, spec: NetworkSpec { id: id?, learning, ageing_s, relay } })
}

fn read_interface(table: Table, notes: &mut Notes) -> Option<Item<InterfaceSpec>> {
    let before = notes.problems.len();
    let mut reader = Reader::new("[[interface]]", table, &mut notes.problems);
    let place = reader.place();
    let name = read_name(&mut reader, "vm1");
    let attachment = read_attachment(&mut reader);
    let network = read_network_of(&mut reader);
    let mac = read_mac(&mut reader);
    let addresses = read_addresses(&mut reader, mac);
    let mtu = reader.number("mtu", MTU_MIN, MTU_MAX as u32).unwrap_or(MTU_DEFAULT);
    let queues_max = match attachment {
        Some(Attachment::VhostUser { .. }) => vhost_user::QUEUES_MAX as u32,
        Some(Attachment::Local { .. }) => 1,
        _ => TAP_QUEUES_MAX,
    };
    let queues = reader.number("queues", 1, queues_max).unwrap_or(1);
    let storm_limit = reader.number("storm_limit", 1, RATE_MAX).unwrap_or(STORM_FRAMES_PER_S);
    let security = reader.flag("port_security");
    if let (Some((place, true)), None) = (&security, mac) {
        let place = place.clone();
        reader.problem(&place, "port_security holds frames to the interface's address; give it a 'mac'");
    }
    let hints = Driving::without_effect(&reader, matches!(attachment, Some(Attachment::Tap { .. })));
    let driving = Driving::read(&mut reader, Driving::default());
    reader.finish();
    notes.warnings.extend(hints);
    if notes.problems.len() != before {
        notes.broken.extend(name.map(Target::Interface));
        return None;
    }
    Some(Item {
        place,
        spec: InterfaceSpec {
            name: name?,
            attachment: attachment?,
            network,
            mac,
            addresses,
            mtu,
            queues,
            storm_limit,
            port_security: security.is_some_and(|(_, flag)| flag),
            driving,
        },
    })
}

fn read_attachment(reader: &mut Reader<'_>) -> Option<Attachment> {
    #[derive(Clone, Copy)]
    enum Kind {
        VhostUser,
        Tap,
        Local,
    }
    const KINDS: [(&str, Option<Kind>); 3] =
        [("vhost-user", Some(Kind::VhostUser)), ("tap", Some(Kind::Tap)), ("local", Some(Kind::Local))];
    reader.require("kind", "\"vhost-user\" or kind = \"tap\"");
    match reader.word("kind", &KINDS) {
        Some((_, Kind::VhostUser)) => {
            reader.refuse(&["device", "netns", "promiscuous"], "has no meaning for kind vhost-user");
            reader.require("socket", "\"/run/vnet/vm1.sock\"");
            let server = reader.flag("server").is_none_or(|(_, flag)| flag);
            let direct = direct::read_interface(reader);
            let socket = reader.text("socket").and_then(|text| socket_path(reader, text))?;
            Some(Attachment::VhostUser { socket, server, direct })
        }
        Some((_, Kind::Tap)) => {
            reader.refuse(&["socket", "server", "promiscuous"], "has no meaning for kind tap");
            reader.refuse(&direct::KEYS, "has no meaning for kind tap");
            reader.require("device", "\"vnet0\"");
            let netns = reader.parsed("netns").map(|(_, netns)| netns);
            let device = reader.text("device").and_then(|text| device_name(reader, text))?;
            Some(Attachment::Tap { device, netns })
        }
        Some((_, Kind::Local)) => {
            reader.refuse(&["socket", "server"], "has no meaning for kind local");
            reader.refuse(&direct::KEYS, "has no meaning for kind local");
            reader.require("device", "\"eth1\"");
            let netns = reader.parsed("netns").map(|(_, netns)| netns);
            let promiscuous = reader.flag("promiscuous").is_some_and(|(_, flag)| flag);
            let device = reader.text("device").and_then(|text| device_name(reader, text))?;
            Some(Attachment::Local { device, netns, promiscuous })
        }
        None => {
            // They are known, but nothing can be said about them.
            for key in ["socket", "server", "device", "netns", "promiscuous"].into_iter().chain(direct::KEYS)
            {
                reader.take(key);
            }
            None
        }
    }
}

fn read_link(table: Table, notes: &mut Notes) -> Option<Item<LinkSpec>> {
    const ENCAPSULATIONS: [(&str, Option<Encapsulation>); 4] = [
        ("native", Some(Encapsulation::Native)),
        ("vnet", Some(Encapsulation::Vnet)),
        ("vxlan", Some(Encapsulation::Vxlan)),
        ("stream", Some(Encapsulation::Stream)),
    ];
    let before = notes.problems.len();
    let mut reader = Reader::new("[[link]]", table, &mut notes.problems);
    let place = reader.place();
    let name = read_name(&mut reader, "h2");
    let encapsulation =
        reader.word("encapsulation", &ENCAPSULATIONS).map_or(Encapsulation::Native, |(_, word)| word);
    let security = security::read_link(&mut reader, name.as_deref(), encapsulation);
    let learns = tunnel::learns_remote(encapsulation, &security);
    if !learns {
        reader.require("remote", "\"10.0.0.2:9000\"");
    }
    let remote = reader.text("remote");
    let (remote, tunnel) = tunnel::read(&mut reader, encapsulation, remote);
    let networks = read_networks(&mut reader, tunnel::carries_one(encapsulation, &tunnel));
    let ports = if encapsulation == Encapsulation::Native {
        read_ports(&mut reader, remote)
    } else {
        reader.refuse(&["ports"], "has a meaning for encapsulation native only");
        1
    };
    let mtu = reader.number("mtu", LINK_MTU_MIN, u32::from(u16::MAX)).map(|mtu| mtu as u16);
    reader.finish();
    if notes.problems.len() != before {
        notes.broken.extend(name.map(Target::Link));
        return None;
    }
    let (name, remote) = (name?, remote.or(learns.then_some(ANYWHERE))?);
    Some(Item {
        place,
        spec: LinkSpec { name, remote, ports, encapsulation, networks, mtu, tunnel, security },
    })
}

fn read_route(table: Table, notes: &mut Notes) -> Option<Item<RouteSpec>> {
    let before = notes.problems.len();
    let mut reader = Reader::new("[[route]]", table, &mut notes.problems);
    let place = reader.place();
    let network = read_network_of(&mut reader);
    let src = reader.parsed("src").map_or(Qualifier::Any, |(_, src)| src);
    reader.require("dst", "\"52:54:00:00:00:02\"");
    let dst = reader.parsed("dst").map(|(_, dst)| dst);
    let from = reader.parsed("from").map_or(Origin::Any, |(_, from)| from);
    reader.require("to", "\"link h2\"");
    let to = reader.parsed("to").map(|(_, to)| to);
    reader.finish();
    if notes.problems.len() != before {
        return None;
    }
    Some(Item { place, spec: RouteSpec { network, src, dst: dst?, from, to: to? } })
}

fn read_name(reader: &mut Reader<'_>, example: &str) -> Option<String> {
    reader.require("name", &format!("\"{example}\""));
    let (place, name) = reader.text("name")?;
    if is_name(&name) {
        return Some(name);
    }
    let text = format!(
        "name {} cannot be used; take 1 to {NAME_MAX} letters, digits, '.', '_' or '-', not beginning with '.' or '-'",
        quote(&name)
    );
    reader.problem(&place, text);
    None
}

/// True for what can be the name of a host, interface or link.
pub(super) fn is_name(name: &str) -> bool {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !name.is_empty() && name.len() <= NAME_MAX && name.chars().all(good) && !name.starts_with(['.', '-'])
}

fn read_network_of(reader: &mut Reader<'_>) -> NetworkId {
    let Some(entry) = reader.take("network") else { return NetworkId::DEFAULT };
    network_id(reader, "network", &entry).unwrap_or_default()
}

fn network_id(reader: &mut Reader<'_>, key: &str, entry: &Entry) -> Option<NetworkId> {
    let id = match entry.value {
        Value::Integer(id) => u32::try_from(id).ok().and_then(NetworkId::new),
        _ => None,
    };
    if id.is_none() {
        reader.problem(&entry.place, format!("{key} must be a whole number from 0 to {NETWORK_MAX}"));
    }
    id
}

/// The networks of a link; `one` says what it is that carries exactly one, if it is that.
fn read_networks(reader: &mut Reader<'_>, one: Option<&str>) -> Option<Vec<NetworkId>> {
    let given = network_ids(reader, "networks");
    match (given, one) {
        (Some((place, ids)), Some(what)) if ids.len() != 1 => {
            reader.problem(&place, format!("{what}; list exactly one network"));
            Some(ids)
        }
        (None, Some(_)) => Some(vec![NetworkId::DEFAULT]),
        (Some((place, ids)), _) if ids.is_empty() => {
            reader.problem(
                &place,
                "networks is empty, the link would carry nothing; list some or remove the line",
            );
            Some(ids)
        }
        (given, _) => given.map(|(_, ids)| ids),
    }
}

/// A list of networks, sorted, each once.
pub(super) fn network_ids(reader: &mut Reader<'_>, key: &'static str) -> Option<Placed<Vec<NetworkId>>> {
    let (place, ids) = reader.numbers(key, 0, NETWORK_MAX)?;
    let mut ids: Vec<_> = ids.into_iter().filter_map(NetworkId::new).collect();
    ids.sort();
    ids.dedup();
    Some((place, ids))
}

/// The guest's IP addresses, which are published with its MAC address.
fn read_addresses(reader: &mut Reader<'_>, mac: Option<Mac>) -> Vec<IpAddr> {
    let Some(entry) = reader.take("addresses") else { return vec![] };
    let Value::List(list) = entry.value else {
        reader.problem(&entry.place, "'addresses' must be a list of texts; write addresses = [\"10.0.0.1\"]");
        return vec![];
    };
    if mac.is_none() {
        reader.problem(&entry.place, "addresses are published with the interface's address; give it a 'mac'");
    }
    if list.len() > ADDRESSES_MAX {
        reader.problem(&entry.place, format!("addresses lists {}; {ADDRESSES_MAX} is the limit", list.len()));
    }
    let mut addresses = vec![];
    for item in list {
        let parsed = match &item.value {
            Value::Text(text) => text.parse().ok().filter(|address| is_station_address(*address)),
            _ => None,
        };
        match parsed {
            Some(address) if !addresses.contains(&address) => addresses.push(address),
            Some(address) => reader.problem(&item.place, format!("addresses lists {address} twice")),
            None => reader.problem(
                &item.place,
                "addresses takes one station's IP addresses without a prefix length, as in \"10.0.0.1\"",
            ),
        }
    }
    addresses
}

fn read_mac(reader: &mut Reader<'_>) -> Option<Mac> {
    let (place, mac) = reader.parsed::<Mac>("mac")?;
    if mac.is_unicast() {
        return Some(mac);
    }
    reader.problem(
        &place,
        format!("mac: {mac} is no address of one station; take one such as 52:54:00:12:34:56"),
    );
    None
}

fn socket_path(reader: &mut Reader<'_>, (place, path): Placed<String>) -> Option<PathBuf> {
    let why = if !path.starts_with('/') {
        "is not an absolute path; begin it with '/'".into()
    } else if path.contains('\0') || path.ends_with('/') {
        "names no file".into()
    } else if path.len() > SOCKET_PATH_MAX {
        format!("is longer than {SOCKET_PATH_MAX} bytes, the kernel's limit; choose a shorter one")
    } else {
        return Some(path.into());
    };
    reader.problem(&place, format!("socket {} {why}", quote(&path)));
    None
}

fn device_name(reader: &mut Reader<'_>, (place, name): Placed<String>) -> Option<String> {
    // The kernel's dev_valid_name(), and no '%', which it would expand.
    let bad = |c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace() || c.is_control();
    if !name.is_empty() && name.len() <= DEVICE_NAME_MAX && name != "." && name != ".." && !name.contains(bad)
    {
        return Some(name);
    }
    let text = format!(
        "device {} cannot be a device's name; take 1 to {DEVICE_NAME_MAX} bytes without space, '/', ':' or '%'",
        quote(&name)
    );
    reader.problem(&place, text);
    None
}

pub(super) fn socket_address(
    reader: &mut Reader<'_>,
    key: &str,
    (place, text): Placed<String>,
) -> Option<SocketAddr> {
    let Ok(address) = text.parse::<SocketAddr>() else {
        let text = format!(
            "{key} {} is not an address with a port; write 10.0.0.2:9000 or [fd00::2]:9000",
            quote(&text)
        );
        reader.problem(&place, text);
        return None;
    };
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// A link's remote; `port` is the one meant where none is written, if there is such a thing.
pub(super) fn remote_address(
    reader: &mut Reader<'_>,
    (place, text): Placed<String>,
    port: Option<u16>,
) -> Option<SocketAddr> {
    let remote = match (text.parse::<IpAddr>(), port) {
        (Ok(ip), Some(port)) => SocketAddr::new(ip.to_canonical(), port),
        _ => socket_address(reader, "remote", (place.clone(), text))?,
    };
    let ip = remote.ip();
    let broadcast = matches!(remote, SocketAddr::V4(v4) if v4.ip().is_broadcast());
    if remote.port() == 0 {
        reader.problem(&place, format!("remote {remote} has no port; the usual one is {BRIDGE_PORT}"));
        return None;
    }
    if ip.is_unspecified() || ip.is_multicast() || broadcast {
        reader.problem(&place, format!("remote {remote} is not one host's address; name the other host"));
        return None;
    }
    Some(remote)
}
