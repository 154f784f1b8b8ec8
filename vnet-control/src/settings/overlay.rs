//! `[overlay]`: its keys.

use super::key::{Applies, Declaration, Field, Key, Takes, field};
use super::kinds::{Kind, Show, address, file, flag, networks, number, parsed};
use crate::desired::*;
use crate::table::{KeyTable, Notes, Reader, Value, quote};

/// Maximum number of endpoints of an etcd cluster; etcd itself recommends at most seven members.
const ENDPOINTS_MAX: usize = 16;
/// Maximum number of reflectors; every host knows all of them.
const REFLECTORS_MAX: usize = 16;
/// Maximum of `forward_s`.
const FORWARD_MAX_S: u32 = 3600;

/// `[overlay]`
pub static OVERLAY: Declaration<OverlaySpec> = Declaration {
    title: "[overlay]",
    applies: Applies::Restart,
    selector: None,
    default: OverlaySpec::default,
    fields: &[
        field!(
            "etcd",
            Kind::new(Takes::Texts("URL"), |reader, key| texts(reader, key, ENDPOINTS_MAX, endpoint)),
            |overlay: OverlaySpec| overlay.etcd,
            "members of the etcd cluster: http://HOST:PORT or https://HOST:PORT, at most 16"
        )
        .needed("[\"http://10.0.0.1:2379\"]"),
        field!(
            "ca",
            file(),
            |overlay: OverlaySpec| overlay.ca,
            "PEM file: the authorities of the store's certificate; needed with https"
        )
        .absent("none"),
        Field {
            read: |reader, key, overlay: &mut OverlaySpec| {
                let cert = (file().read)(reader, key);
                cert.map(|cert| overlay.identity.get_or_insert_default().0 = cert).is_some()
            },
            show: |overlay: &OverlaySpec| overlay.identity.as_ref()?.0.show(),
            save: None,
            key: Key::new("cert", file().takes, "PEM file: this host's certificate for the store"),
        }
        .absent("none"),
        Field {
            read: |reader, key, overlay: &mut OverlaySpec| {
                let file = (file().read)(reader, key);
                file.map(|file| overlay.identity.get_or_insert_default().1 = file).is_some()
            },
            show: |overlay: &OverlaySpec| overlay.identity.as_ref()?.1.show(),
            save: None,
            key: Key::new("key", file().takes, "PEM file: private key of cert"),
        }
        .absent("none"),
        field!(
            "topology",
            parsed::<Topology>("TOPOLOGY"),
            |overlay: OverlaySpec| overlay.topology,
            "which hosts have links to each other: mesh (all that share a network), hub NAME (all with one, which relays) or \
             explicit (those of [[link]])"
        ),
        field!(
            "reflectors",
            Kind::new(Takes::Texts("HOST"), |reader, key| {
                let name = |text: &str| {
                    is_name(text).then_some(()).ok_or_else(|| "is not a host's name".to_string())
                };
                texts(reader, key, REFLECTORS_MAX, name)
            }),
            |overlay: OverlaySpec| overlay.reflectors,
            "hosts that relay for those behind NAT, the preferred one first, at most 16; the same list on all hosts"
        )
        .absent("none"),
        field!(
            "behind_nat",
            flag(),
            |overlay: OverlaySpec| overlay.behind_nat,
            "only reflectors can reach this host"
        ),
        field!(
            "address",
            Kind::new(Takes::Text("ADDRESS:PORT"), |reader, key| {
                let (place, address) = (reader.place_of(key.name), (address().read)(reader, key)?);
                if is_host_address(address) {
                    return Some(address);
                }
                let text = format!(
                    "address {address} cannot be reached from other hosts; write 10.0.0.1:9000"
                );
                reader.problem(&place, text);
                None
            }),
            |overlay: OverlaySpec| overlay.address,
            "address at which other hosts reach this one"
        )
        .absent("[bridge] listen, or the address from which the store is reached"),
        field!(
            "networks",
            networks(),
            |overlay: OverlaySpec| overlay.networks,
            "networks to publish and join"
        )
        .absent("all that are declared"),
        field!(
            "sealed",
            flag(),
            |overlay: OverlaySpec| overlay.sealed,
            "seal the overlay's links, each with the host that it leads to, and sign records; the same on all hosts"
        )
        .note("needs `[identity]` ([security.md](security.md))"),
        field!(
            "trusted",
            flag(),
            |overlay: OverlaySpec| overlay.trusted,
            "the overlay's links may carry clear text; needed unless they are sealed or lead into networks of [bridge] trusted"
        ),
        field!(
            "forward_s",
            number::<u32>(0, FORWARD_MAX_S),
            |overlay: OverlaySpec| overlay.forward_s,
            "how long this host forwards frames to a virtual machine that has migrated to another host, and keeps its record \
             until that host claims it"
        )
        .unit("s"),
        field!(
            "state",
            file(),
            |overlay: OverlaySpec| overlay.state,
            "folder of the last known state, for a restart while the store is unreachable"
        )
        .absent("`StateDirectory` of the service, or /var/lib/vnet"),
    ],
};

pub(super) fn read(table: KeyTable, notes: &mut Notes) -> Option<Item<OverlaySpec>> {
    let before = notes.problems.len();
    let item = super::host::read(&OVERLAY, table, notes, judge);
    (notes.problems.len() == before).then_some(item)
}

fn judge(reader: &mut Reader<'_>, overlay: &mut OverlaySpec) {
    let place = reader.place();
    let any = |scheme: &str| overlay.etcd.iter().any(|endpoint| endpoint.starts_with(scheme));
    if reader.given("cert") != reader.given("key") {
        reader.problem(&place, "[overlay] cert and key belong together; give both or neither");
    }
    if (overlay.ca.is_some() || reader.given("cert")) && any("http:") {
        reader.problem(
            &place,
            "[overlay] ca, cert and key have no effect with http://; write https:// in etcd",
        );
    }
    if overlay.ca.is_none() && any("https:") {
        let text = "[overlay] https:// needs the authority of the store's certificate; write ca = \"/…\"";
        reader.problem(&place, text);
    }
    if overlay.behind_nat && overlay.reflectors.is_empty() && overlay.topology == Topology::Mesh {
        let text = "behind_nat needs hosts that relay for this one; list them in reflectors";
        reader.problem(&reader.place_of("behind_nat"), text);
    }
}

/// A list of texts, each validated by `check`, whose error is appended to the quoted text.
fn texts(
    reader: &mut Reader<'_>,
    key: &Key,
    most: usize,
    check: impl Fn(&str) -> Result<(), String>,
) -> Option<Vec<String>> {
    let name = key.name;
    let entry = reader.take(name)?;
    let Value::List(list) = entry.value else {
        reader.problem(&entry.place, format!("'{name}' must be a list of texts; write {name} = [\"…\"]"));
        return None;
    };
    if list.is_empty() && key.needed.is_some() || list.len() > most {
        reader.problem(&entry.place, format!("{name} must list 1 to {most} texts"));
        return None;
    }
    let mut texts: Vec<String> = vec![];
    for item in list {
        match item.value {
            Value::Text(text) if texts.contains(&text) => {
                reader.problem(&item.place, format!("{name}: {} is listed twice", quote(&text)));
            }
            Value::Text(text) => match check(&text) {
                Ok(()) => texts.push(text),
                Err(why) => reader.problem(&item.place, format!("{name}: {} {why}", quote(&text))),
            },
            _ => reader.problem(&item.place, format!("{name} takes texts")),
        }
    }
    Some(texts)
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
