//! `[[link]]`: its keys, and constraints between them.
//!
//! Keys are read into a [`LinkForm`], which has a member for each key; a [`LinkSpec`] holds only those of the link's kind.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use vnet::frame::NetworkId;
use vnet::link::sealed::identity::server_name;
use vnet::link::{
    ANYWHERE, DIRECT_MAX, Encapsulation, FLOOD_MAX, LinkKind, PORTS_MAX, Proxy, SourceMatch, StreamOptions,
    VxlanOptions,
};
use vnet::wire::ethernet::Mac;
use vnet::wire::socks::{Credentials, Destination, TEXT_MAX};
use vnet::wire::vxlan;

use super::host::judge_ports;
use super::key::{Applies, Declaration, Selector, Takes, field};
use super::kinds::{Kind, Show, flag, list, name, networks, number, socket_address, text, word};
use crate::desired::*;
use crate::table::{KeyTable, Notes, Placed, Reader, quote};

/// Syntax of a proxy, for error messages.
const PROXY: &str = "socks5://127.0.0.1:9050 or socks5://USER:PASSWORD@ADDRESS:PORT";

/// The keys of a link, of all encapsulations.
pub struct LinkForm {
    name: String,
    encapsulation: Encapsulation,
    remote: Option<String>,
    ports: u16,
    networks: Option<Vec<NetworkId>>,
    mtu: Option<u16>,
    source: SourceMatch,
    vxlan: VxlanOptions,
    proxy: Option<Proxy>,
    connect: bool,
    direct: Vec<(Mac, u16)>,
    sealed: bool,
    security: LinkSecurity,
}

impl Default for LinkForm {
    fn default() -> LinkForm {
        LinkForm {
            name: String::new(),
            encapsulation: Encapsulation::Native,
            remote: None,
            ports: 1,
            networks: None,
            mtu: None,
            source: SourceMatch::default(),
            vxlan: VxlanOptions::default(),
            proxy: None,
            connect: true,
            direct: vec![],
            sealed: false,
            security: LinkSecurity::default(),
        }
    }
}

/// `[[link]]`
pub static LINK: Declaration<LinkForm> = Declaration {
    title: "[[link]]",
    applies: Applies::Reopen,
    selector: Some(Selector { key: "encapsulation", chosen: |link| link.encapsulation.into() }),
    default: LinkForm::default,
    fields: &[
        field!("name", name(), |link: LinkForm| link.name, "name of the link on this host").needed("\"h2\"").phrase(""),
        field!(
            "encapsulation",
            word::<Encapsulation>(),
            |link: LinkForm| link.encapsulation,
            "encapsulation of frames: native, vnet (VNET/P peers), vxlan or stream (TCP)"
        )
        .phrase(""),
        field!(
            "remote",
            text("ADDRESS:PORT"),
            |link: LinkForm| link.remote,
            "address of the other host, ADDRESS:PORT; with proxy also NAME:PORT; vxlan: default port 4789; one link per remote"
        )
        .absent("needed; of a sealed native link: learned from the peer")
        .note("see [below](#peers-that-move)")
        .unless("sealed")
        .save(|link| link.remote.as_ref().filter(|remote| *remote != UNKNOWN_REMOTE)?.show())
        .phrase(""),
        field!(
            "ports",
            number::<u16>(1, PORTS_MAX as u32),
            |link: LinkForm| link.ports,
            "number of UDP ports of the other host, consecutive from that of remote: its [bridge] ports"
        )
        .only_for(&["native"])
        .phrase("{} ports"),
        field!("networks", networks(), |link: LinkForm| link.networks, "networks that the link carries")
            .absent("all")
            .note("`vnet`, and `vxlan` with `flood` or `group`: exactly one, 1 when left out"),
        field!(
            "mtu",
            number::<u16>(LINK_MTU_MIN, u16::MAX as u32),
            |link: LinkForm| link.mtu,
            "path MTU"
        )
        .unit("bytes")
        .absent("found out"),
        field!(
            "source",
            word::<SourceMatch>(),
            |link: LinkForm| link.source,
            "datagrams that belong to the link: those from the remote's address with any port, or from its address and port"
        )
        .only_for(&["vnet"])
        .note("VNET/P sends from any port; two links to one address need `address-port`"),
        field!(
            "flood",
            flood(),
            |link: LinkForm| link.vxlan.flood,
            "other VTEPs of the network, at the remote's port, as in 10.0.0.3,10.0.0.4; at most 255"
        )
        .only_for(&["vxlan"])
        .absent("none"),
        field!(
            "group",
            group(),
            |link: LinkForm| link.vxlan.group,
            "IPv4 multicast group for flooded frames, instead of a copy to each VTEP"
        )
        .only_for(&["vxlan"])
        .absent("none"),
        field!(
            "offload",
            flag(),
            |link: LinkForm| link.vxlan.offload,
            "send TCP streams through the kernel's VXLAN driver, where available"
        )
        .only_for(&["vxlan"])
        .note("see below")
        .phrase_off("offload off"),
        field!(
            "proxy",
            proxy(),
            |link: LinkForm| link.proxy,
            "SOCKS 5 proxy through which this side connects, as in socks5://[USER:PASSWORD@]ADDRESS:PORT"
        )
        .only_for(&["stream"])
        .absent("none")
        .save(|link| link.proxy.as_ref().map(|proxy| proxy_url(proxy).into())),
        field!("connect", flag(), |link: LinkForm| link.connect, "this side connects; false: it waits for the other side")
            .only_for(&["stream"])
            .phrase_off("waiting"),
        field!(
            "direct",
            guests(),
            |link: LinkForm| link.direct,
            "clear text only: guests of the other host that have direct ports, as in 52:54:00:00:00:02@9101; at most 32"
        )
        .only_for(&["native"])
        .absent("none")
        .note("see [below](#ports-of-guests-own)")
        .conflicts("sealed"),
        field!(
            "sealed",
            flag(),
            |link: LinkForm| link.sealed,
            "native, stream (TLS): encrypt all frames and accept only those of the authenticated peer; needs an [identity]"
        )
        .note("see [security.md](security.md)")
        .phrase(""),
        field!(
            "peer",
            text("NAME"),
            |link: LinkForm| link.security.peer,
            "sealed: the name that the other host's certificate must have"
        )
        .absent("the link's name")
        .requires(&["sealed"])
        .phrase("sealed with {}"),
        field!(
            "trusted",
            flag(),
            |link: LinkForm| link.security.trusted,
            "the link may carry clear text on this path"
        )
        .note(
            "without it, a link that is not sealed and leads neither to this machine nor into a network of `[bridge] \
             trusted` is refused",
        )
        .conflicts("sealed"),
        field!(
            "via",
            text("LINK"),
            |link: LinkForm| link.security.via,
            "sealed native links without remote: the link to the rendezvous host"
        )
        .absent("none")
        .note("see [below](#hosts-that-cannot-reach-each-other)")
        .requires(&["sealed"]),
        field!(
            "macs",
            macs(),
            |link: LinkForm| link.security.macs,
            "admitted source addresses of frames from the other host; frames with others are dropped"
        )
        .absent("all")
        .phrase("{#} source addresses"),
    ],
};

const fn flood() -> Kind<Vec<IpAddr>> {
    Kind::new(Takes::Texts("ADDRESS"), |reader, key| {
        let (place, texts) = reader.texts(key.name)?;
        if texts.len() > FLOOD_MAX {
            let text =
                format!("flood lists {}, the limit is {FLOOD_MAX}; use a multicast group", texts.len());
            reader.problem(&place, text);
        }
        let mut flood = vec![];
        for (place, text) in texts {
            match text.parse::<IpAddr>() {
                Ok(ip) if !ip.is_unspecified() && !ip.is_multicast() => flood.push(ip.to_canonical()),
                _ => {
                    let text = format!("flood: {} is not one host's address; write 10.0.0.3", quote(&text));
                    reader.problem(&place, text);
                }
            }
        }
        Some(flood)
    })
}

const fn group() -> Kind<Ipv4Addr> {
    Kind::new(Takes::Text("ADDRESS"), |reader, key| {
        let (place, text) = reader.text(key.name)?;
        let group = text.parse().ok().filter(Ipv4Addr::is_multicast);
        if group.is_none() {
            let text = format!("group {} is not an IPv4 multicast group; write 239.1.1.1", quote(&text));
            reader.problem(&place, text);
        }
        group
    })
}

const fn macs() -> Kind<Vec<Mac>> {
    Kind::new(Takes::Texts("MAC"), |reader, key| {
        let place = reader.place_of(key.name);
        let before = reader.problems();
        let mut macs: Vec<Mac> = list(reader, key, "52:54:00:00:00:01")?;
        if macs.is_empty() && reader.problems() == before {
            let text = "macs is empty, every frame from the other host would be dropped; list some or remove the line";
            reader.problem(&place, text);
        }
        macs.sort();
        macs.dedup();
        Some(macs)
    })
}

/// Receive in place: guests of the other host that have their own underlay ports.
const fn guests() -> Kind<Vec<(Mac, u16)>> {
    Kind::new(Takes::Texts("MAC@PORT"), |reader, key| {
        let (place, texts) = reader.texts(key.name)?;
        if texts.len() > DIRECT_MAX {
            reader.problem(&place, format!("direct lists {}, the limit is {DIRECT_MAX}", texts.len()));
        }
        let mut guests: Vec<(Mac, u16)> = vec![];
        for (place, text) in texts {
            let parts = text.rsplit_once('@').map(|(mac, port)| (mac.parse::<Mac>(), port.parse::<u16>()));
            match parts {
                Some((Ok(mac), Ok(port))) if port != 0 && !mac.is_multicast() => {
                    if guests.iter().any(|(other, _)| *other == mac) {
                        reader.problem(&place, format!("direct names {mac} twice; remove one of them"));
                    }
                    guests.push((mac, port));
                }
                _ => {
                    let text = format!(
                        "direct: {} is not a guest's address and port; write 52:54:00:00:00:02@9101",
                        quote(&text)
                    );
                    reader.problem(&place, text);
                }
            }
        }
        Some(guests)
    })
}

impl Show for (Mac, u16) {
    fn show(&self) -> Option<serde_json::Value> {
        Some(format!("{}@{}", self.0, self.1).into())
    }
}

impl Show for Proxy {
    /// Displays the proxy without its password.
    fn show(&self) -> Option<serde_json::Value> {
        Some(self.address.to_string().into())
    }
}

/// The URL of a proxy, including its password.
fn proxy_url(Proxy { address, credentials }: &Proxy) -> String {
    let login = |Credentials { user, password }: &Credentials| format!("{user}:{password}@");
    format!("socks5://{}{address}", credentials.as_ref().map(login).unwrap_or_default())
}

const fn proxy() -> Kind<Proxy> {
    Kind::new(Takes::Text("URL"), |reader, key| {
        let (place, text) = reader.text(key.name)?;
        let Some(rest) = text.strip_prefix("socks5://").or_else(|| text.strip_prefix("socks5h://")) else {
            // The text may contain a password: do not quote it.
            reader.problem(&place, format!("proxy is not a SOCKS 5 proxy; write {PROXY}"));
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
    })
}

pub(super) fn read(table: KeyTable, notes: &mut Notes, broken: &mut Vec<Target>) -> Option<Item<LinkSpec>> {
    let before = notes.problems.len();
    let mut reader = Reader::new(LINK.title, table, notes);
    let (place, mut form) = (reader.place(), LinkForm::default());
    LINK.read(&mut reader, &mut form);
    judge_security(&mut reader, &mut form);
    let learns = learns_remote(form.encapsulation, &form.security);
    if !learns {
        reader.require("remote", "\"10.0.0.2:9000\"");
    }
    let remote = form.remote.take().map(|text| (reader.place_of("remote"), text));
    let (remote, kind) = link_kind(&mut reader, &mut form, remote);
    if form.encapsulation == Encapsulation::Native {
        judge_ports(&mut reader, form.ports, remote);
    }
    let one = kind.as_ref().and_then(carries_one);
    judge_networks(&mut reader, &mut form.networks, one);
    reader.finish();
    let LinkForm { name, ports, networks, mtu, security, .. } = form;
    if notes.problems.len() != before {
        if !name.is_empty() {
            broken.push(Target::Link(name));
        }
        return None;
    }
    let (remote, kind) = (remote.or(learns.then_some(ANYWHERE))?, kind?);
    Some(Item { place, spec: LinkSpec { name, remote, ports, networks, mtu, kind, security } })
}

/// The link's remote, if it is valid, and the link's kind; no kind for a stream link without a valid remote.
fn link_kind(
    reader: &mut Reader<'_>,
    form: &mut LinkForm,
    remote: Option<Placed<String>>,
) -> (Option<SocketAddr>, Option<LinkKind>) {
    let address = |reader: &mut Reader<'_>, remote: Option<Placed<String>>, port| {
        remote.and_then(|text| remote_address(reader, text, port))
    };
    let (remote, kind) = match form.encapsulation {
        Encapsulation::Native => {
            let guests = std::mem::take(&mut form.direct);
            (address(reader, remote, None), LinkKind::Native { guests })
        }
        Encapsulation::Vnet => (address(reader, remote, None), LinkKind::Classic(form.source)),
        Encapsulation::Vxlan => {
            let options = std::mem::take(&mut form.vxlan);
            (address(reader, remote, Some(vxlan::PORT)), LinkKind::Vxlan(options))
        }
        Encapsulation::Stream => return remote.and_then(|remote| stream(reader, form, remote)).unzip(),
    };
    (remote, Some(kind))
}

/// The address that a stream link connects to (that of its proxy, if it has one) and the link's kind.
fn stream(
    reader: &mut Reader<'_>,
    form: &mut LinkForm,
    (place, text): Placed<String>,
) -> Option<(SocketAddr, LinkKind)> {
    let (proxy, connect) = (form.proxy.take(), form.connect);
    let (remote, destination) = match (&proxy, text.parse::<SocketAddr>()) {
        // The proxy resolves the name, so only its syntax can be checked here.
        (Some(proxy), Err(_)) => match named(&text) {
            Some(destination) => (proxy.address, destination),
            None => {
                let text =
                    format!("remote {} is not a name with a port; write host.example:9000", quote(&text));
                reader.problem(&place, text);
                return None;
            }
        },
        _ => {
            let address = remote_address(reader, (place, text), None)?;
            (proxy.as_ref().map_or(address, |proxy| proxy.address), Destination::Address(address))
        }
    };
    Some((remote, LinkKind::Stream(StreamOptions { destination, proxy, connect })))
}

fn named(text: &str) -> Option<Destination> {
    let (name, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port != 0)?;
    let good = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '-' || c == '_';
    let fits = !name.is_empty() && name.len() <= TEXT_MAX && name.chars().all(good);
    fits.then(|| Destination::Name(name.into(), port))
}

/// True for a host name such as host.example; false for text that looks like an address.
fn is_dns_name(destination: &Destination) -> bool {
    matches!(destination, Destination::Name(name, _) if name.contains(|c: char| c.is_ascii_alphabetic()))
}

/// Parses a link's remote; `port` is the default port, if the encapsulation has one.
fn remote_address(
    reader: &mut Reader<'_>,
    (place, text): Placed<String>,
    port: Option<u16>,
) -> Option<SocketAddr> {
    let remote = match (text.parse::<IpAddr>(), port) {
        (Ok(ip), Some(port)) => SocketAddr::new(ip.to_canonical(), port),
        _ if text.parse::<SocketAddr>().is_err() && named(&text).is_some_and(|name| is_dns_name(&name)) => {
            let text = format!(
                "remote {}: names are not supported; write an address such as 10.0.0.2:9000 or [fd00::2]:9000",
                quote(&text)
            );
            reader.problem(&place, text);
            return None;
        }
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

/// Checks the networks of a link; `one` is the reason why the link carries exactly one network.
fn judge_networks(reader: &mut Reader<'_>, networks: &mut Option<Vec<NetworkId>>, one: Option<&str>) {
    let place = reader.place_of("networks");
    match (&networks, one) {
        (Some(ids), Some(what)) if ids.len() != 1 => {
            reader.problem(&place, format!("{what}; list exactly one network"));
        }
        (None, Some(_)) if !reader.given("networks") => *networks = Some(vec![NetworkId::DEFAULT]),
        (Some(ids), _) if ids.is_empty() => {
            let text = "networks is empty, the link would carry nothing; list some or remove the line";
            reader.problem(&place, text);
        }
        _ => {}
    }
}

/// Checks `sealed`, `peer` and `via` together; sets the default peer of a sealed link.
fn judge_security(reader: &mut Reader<'_>, form: &mut LinkForm) {
    let LinkForm { name, encapsulation, sealed, security, .. } = form;
    let peer = security.peer.take();
    if reader.given("via") && (*encapsulation != Encapsulation::Native || !*sealed) {
        let text =
            "'via' is for sealed links of encapsulation native; write sealed = true as well, or remove it";
        reader.problem(&reader.place_of("via"), text);
    }
    if !*sealed {
        if peer.is_some() {
            let text = "'peer' names the host at the other end of a sealed link; write sealed = true as well, or remove it";
            reader.problem(&reader.place_of("peer"), text);
        }
        return;
    }
    if !matches!(encapsulation, Encapsulation::Native | Encapsulation::Stream) {
        let text = format!(
            "the {encapsulation} encapsulation cannot be sealed; use native or stream, or trusted = true"
        );
        reader.problem(&reader.place_of("sealed"), text);
    }
    // The default peer is the link's name: links are usually named after the remote host.
    let peer = peer.unwrap_or_else(|| name.clone());
    if !name.is_empty()
        && let Err(why) = server_name(&peer)
    {
        reader.problem(&reader.place_of("peer"), format!("{why}; write peer = \"h2\""));
    }
    security.peer = Some(peer);
}

/// True for links without a fixed remote: authenticated datagrams prove a sealed peer's current address (roaming).
fn learns_remote(encapsulation: Encapsulation, security: &LinkSecurity) -> bool {
    encapsulation == Encapsulation::Native && security.peer.is_some()
}

/// Reason why a link carries exactly one network; `None` if it can carry several.
fn carries_one(kind: &LinkKind) -> Option<&'static str> {
    match kind {
        LinkKind::Classic(_) => Some("the vnet encapsulation carries no network number"),
        LinkKind::Vxlan(VxlanOptions { flood, group, .. }) if !flood.is_empty() || group.is_some() => {
            Some("a vxlan link with flood or group carries one network")
        }
        _ => None,
    }
}

impl From<&LinkSpec> for LinkForm {
    fn from(spec: &LinkSpec) -> LinkForm {
        let LinkSpec { name, ports, networks, mtu, kind, security, .. } = spec.clone();
        let sealed = security.peer.is_some();
        let remote = Some(spec.remote_text());
        let form = LinkForm {
            name,
            encapsulation: kind.encapsulation(),
            remote,
            ports,
            networks,
            mtu,
            sealed,
            security,
            ..LinkForm::default()
        };
        match kind {
            LinkKind::Native { guests } => LinkForm { direct: guests, ..form },
            LinkKind::Classic(source) => LinkForm { source, ..form },
            LinkKind::Vxlan(vxlan) => LinkForm { vxlan, ..form },
            LinkKind::Stream(StreamOptions { proxy, connect, .. }) => LinkForm { proxy, connect, ..form },
        }
    }
}

impl fmt::Display for LinkSpec {
    /// The settings that differ from the defaults, for plans and logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = LinkForm::from(self);
        write!(f, "{} to {}{}", self.encapsulation(), self.remote_text(), LINK.phrases(&form))
    }
}
