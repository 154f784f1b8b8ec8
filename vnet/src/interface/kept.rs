//! TAP devices that outlive vnetd (TUNSETPERSIST), so that the next vnetd adopts them with their addresses and routes.
//!
//! The device's alias (`ip link`) is the mark of the vnetd that made it. vnetd removes devices with its own mark only, and takes no
//! device with the mark of another one. Whoever owns a namespace can write an alias there, so the device's owner (TUNSETOWNER) must also be
//! vnetd's user, whom another user namespace cannot name. While no process holds a queue, the device has no carrier and drops all frames; the kernel keeps
//! addresses and routes, and forgets learned neighbours.
//!
//! The owner of a namespace may rename the device, or move it to another namespace. A vnetd that holds the device knows its [`Place`]; the
//! next one finds it there.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, absolute};

use netlink_packet_core::Nla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use serde::{Deserialize, Serialize};

use super::link_request;
use super::netns::{NamespaceId, Netns};
use super::tun_request::{name_of, namespace_of, persist, set_owner};
use crate::helper;
use crate::netlink::{self, Netlink};
use crate::wire::ethernet::Mac;

/// Beginning of every mark.
const VNETD: &str = "vnetd at ";

/// The mark of a vnetd on the devices that it made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark(String);

impl Mark {
    /// The mark of the vnetd with this control socket.
    pub fn of(control: &Path) -> Mark {
        Mark(format!("{VNETD}{}", absolute(control).unwrap_or_else(|_| control.into()).display()))
    }
}

/// Where a device is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// The network namespace.
    pub namespace: NamespaceId,
    /// The device's name there.
    pub name: String,
}

/// How a device outlives this process.
#[derive(Clone, Debug)]
pub struct Keep {
    /// This vnetd's mark.
    pub mark: Mark,
    /// Where the device was moved or renamed to, if the vnetd before saw that.
    pub moved: Option<Place>,
}

/// Whose an open device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// This process made it.
    Made,
    /// A vnetd with the same mark made it.
    Adopted,
    /// An administrator or another program made it, and removes it.
    Foreign,
}

/// An existing device of the thread's target namespace.
pub(super) struct Found {
    is_tap: bool,
    alias: Option<String>,
    /// The user that may open it, as this process's user namespace names it.
    owner: Option<u32>,
    /// Its MAC address.
    pub(super) mac: Option<Mac>,
}

impl Found {
    /// The device of that name; `None` if there is none.
    pub(super) fn of(device: &str) -> io::Result<Option<Found>> {
        let index = match helper::device_index(device) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
            index => index?,
        };
        let link = netlink::link(index)?;
        let mut found = Found { is_tap: false, alias: None, owner: None, mac: None };
        for attribute in link.attributes {
            match attribute {
                LinkAttribute::IfAlias(alias) => found.alias = Some(alias),
                LinkAttribute::Address(mac) => found.mac = mac[..].try_into().ok().map(Mac),
                LinkAttribute::LinkInfo(infos) => {
                    found.is_tap = infos.contains(&LinkInfo::Kind(InfoKind::Tun));
                    found.owner = infos.iter().find_map(owner_in);
                }
                _ => {}
            }
        }
        Ok(Some(found))
    }

    /// True if there is a TAP of that name with this mark, and of vnetd's user.
    pub(super) fn is_own(device: &str, mark: &Mark) -> io::Result<bool> {
        Ok(Found::of(device)?.is_some_and(|found| found.has(mark)))
    }

    /// True if it is a TAP with this mark, and of vnetd's user. Or of root: a vnetd that ran as root made it.
    pub(super) fn has(&self, mark: &Mark) -> bool {
        let users = [0, rustix::process::geteuid().as_raw()];
        self.is_marked(mark) && self.owner.is_some_and(|owner| users.contains(&owner))
    }

    fn is_marked(&self, mark: &Mark) -> bool {
        self.is_tap && self.alias.as_ref() == Some(&mark.0)
    }

    /// The other vnetd whose mark it has, if it has one. The owner of its namespace can have written anything: `mark`, this vnetd's, on a
    /// device of another user is not vnetd's.
    pub(super) fn vnetd(&self, mark: Option<&Mark>) -> Option<String> {
        let alias = self.alias.as_deref().filter(|alias| self.is_tap && alias.starts_with(VNETD))?;
        let forged = mark.is_some_and(|mark| self.is_marked(mark));
        (!forged).then(|| alias.escape_debug().to_string())
    }
}

fn owner_in(info: &LinkInfo) -> Option<u32> {
    /// IFLA_TUN_OWNER of `linux/if_link.h`: 4 bytes.
    const OWNER: u16 = 1;
    let LinkInfo::Data(InfoData::Tun(about)) = info else { return None };
    let found = about.iter().find(|each| each.kind() == OWNER && each.value_len() == 4)?;
    let mut owner = [0; 4];
    found.emit_value(&mut owner);
    Some(u32::from_ne_bytes(owner))
}

/// The network namespace of an open device's queue, and its name there.
pub(super) fn place_of(file: &File) -> io::Result<Place> {
    let about = namespace_of(file)?.metadata()?;
    Ok(Place { namespace: (about.dev(), about.ino()), name: name_of(file)? })
}

/// True if the device of this queue has the mark.
pub(super) fn is_own(file: &File, mark: &Mark) -> io::Result<bool> {
    let name = name_of(file)?;
    helper::within(namespace_of(file)?, || Found::is_own(&name, mark))?
}

/// Marks the device of this queue, and has it outlive the process.
pub(super) fn claim(file: &File, mark: &Mark) -> io::Result<()> {
    let name = name_of(file)?;
    // First: a marked device of another user is not vnetd's.
    set_owner(file)?;
    helper::within(namespace_of(file)?, || set_alias(&name, mark))??;
    persist(file, true)
}

fn set_alias(device: &str, mark: &Mark) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = helper::device_index(device)?;
    link.attributes.push(LinkAttribute::IfAlias(mark.0.clone()));
    Netlink::new()?.change(RouteNetlinkMessage::SetLink(link), 0)
}

/// Removes a device of the thread's target namespace if it is a TAP with this mark. True if it was.
pub(super) fn remove_own(device: &str, mark: &Mark) -> io::Result<bool> {
    let is_own = Found::is_own(device, mark)?;
    if is_own {
        link_request::remove(device)?;
    }
    Ok(is_own)
}

/// Removes the device of a vnetd with this mark that has ended, at its last known place or else where it was configured. True if there was one.
///
/// # Errors
/// The kernel refused.
pub fn remove_left(
    mark: &Mark,
    place: Option<&Place>,
    configured: (&str, Option<&Netns>),
) -> io::Result<bool> {
    let (device, netns) = configured;
    let name = place.map_or(device, |place| &place.name);
    if let Some(Place { namespace, .. }) = place.filter(|place| home(netns) != Some(place.namespace)) {
        return match helper::namespace_with(*namespace) {
            Ok(namespace) => helper::within(namespace, || remove_own(name, mark))?,
            // It went with its namespace.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        };
    }
    match netns.map(|netns| netns.run(|| remove_own(name, mark))) {
        None => remove_own(name, mark),
        Some(Ok((_, done))) => done,
        // It went with its namespace.
        Some(Err(_)) => Ok(false),
    }
}

/// True if no network namespace with this number is found: it has ended, or only a mount outside /run/netns holds it.
pub fn is_gone(namespace: NamespaceId) -> bool {
    helper::namespace_with(namespace).is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The network namespace of a configured device; `None` if it does not exist.
pub fn home(netns: Option<&Netns>) -> Option<NamespaceId> {
    netns.map_or_else(|| Netns::Path("/proc/self/ns/net".into()).identity(), Netns::identity)
}
