//! `[[interface]]`: its keys, and constraints between them.

use std::fmt;
use std::net::IpAddr;

use vnet::dispatch::mode::Mode;
use vnet::dispatch::share::WEIGHT_MAX;
use vnet::frame::MTU_MAX;
use vnet::interface::interrupts::Interrupts;
use vnet::interface::pair::Pair;
use vnet::interface::tap::TAP_MTU_MAX;
use vnet::interface::vhost_user::QUEUES_MAX;

use super::key::{Applies, Declaration, Field, Selector, Takes, field};
use super::kinds::{Kind, Show, device, flag, mac, name, network, number, parsed, socket, text, word};
use crate::desired::*;
use crate::table::{KeyTable, Notes, Reader, Value};

const RATE_MAX: u32 = i32::MAX as u32;
const WINDOW_MAX_US: u32 = 10_000_000;
/// 64 TiB: half of a process's address space.
const MEMORY_LIMIT_MAX_MIB: u32 = 64 << 20;
const AT_ONCE: &str = "the kernel hands frames over at once";

/// `[[interface]]`
pub static INTERFACE: Declaration<InterfaceSpec> = Declaration {
    title: "[[interface]]",
    applies: Applies::Reopen,
    selector: Some(Selector { key: "kind", chosen: |interface| interface.attachment.kind() }),
    default: InterfaceSpec::default,
    fields: &[
        field!("name", name(), |interface: InterfaceSpec| interface.name, "name of the interface on this host")
            .needed("\"vm1\"")
            .phrase(""),
        field!(
            "kind",
            attachment(),
            |interface: InterfaceSpec| interface.attachment,
            "how the guest is attached: vhost-user (virtual machine), veth (container), tap (host, virtual machine) or local (this \
             host's own LAN)"
        )
        .needed("\"vhost-user\" or kind = \"tap\"")
        .phrase(""),
        field!(
            "socket",
            socket(),
            |interface: InterfaceSpec| interface.attachment, Attachment::VhostUser { socket, .. } => socket,
            "Unix socket, an absolute path of at most 107 bytes"
        )
        .only_for(&["vhost-user"])
        .needed("\"/run/vnet/vm1.sock\"")
        .phrase(""),
        field!(
            "server",
            flag(),
            |interface: InterfaceSpec| interface.attachment, Attachment::VhostUser { server, .. } => server,
            "vnetd listens on the socket; false: it connects"
        )
        .only_for(&["vhost-user"])
        .phrase(""),
        field!(
            "socket_owner",
            parsed::<Account>("USER"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { socket_owner, .. }, .. } => socket_owner,
            "owner of the socket file, by name or number"
        )
        .only_for(&["vhost-user"])
        .absent("vnetd's user"),
        field!(
            "socket_group",
            parsed::<Account>("GROUP"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { socket_group, .. }, .. } => socket_group,
            "group of the socket file, by name or number"
        )
        .only_for(&["vhost-user"])
        .absent("vnetd's group"),
        field!(
            "socket_mode",
            parsed::<FileMode>("MODE"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { socket_mode, .. }, .. } => socket_mode,
            "permissions of the socket file in octal, as in 0660: a user with write permission may connect as the guest"
        )
        .only_for(&["vhost-user"])
        .absent("0666 less the umask"),
        field!(
            "peer_user",
            parsed::<Account>("USER"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { peer_user, .. }, .. } => peer_user,
            "the only user, by name or number, whose QEMU is served at the socket"
        )
        .only_for(&["vhost-user"])
        .absent("any"),
        field!(
            "peer_group",
            parsed::<Account>("GROUP"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { peer_group, .. }, .. } => peer_group,
            "the only group, by name or number, whose QEMU is served at the socket"
        )
        .only_for(&["vhost-user"])
        .absent("any"),
        field!(
            "memory_limit",
            number::<u32>(1, MEMORY_LIMIT_MAX_MIB),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::VhostUser { front_end: FrontEndSpec { memory_limit, .. }, .. } => memory_limit,
            "upper bound on the memory that the VM may share"
        )
        .only_for(&["vhost-user"])
        .unit("MiB")
        .absent("this host's memory"),
        field!(
            "device",
            device(),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::Tap { device, .. } | Attachment::Veth { device, .. } => device,
            "name of the device, at most 15 bytes; made if missing, and then removed with the interface; a veth also when vnetd stops"
        )
        .only_for(&["tap", "veth"])
        .needed("\"vnet0\"")
        .phrase(""),
        field!(
            "device",
            device(),
            |interface: InterfaceSpec| interface.attachment, Attachment::Local { device, .. } => device,
            "name of an existing device"
        )
        .only_for(&["local"])
        .needed("\"eth1\"")
        .phrase(""),
        field!(
            "netns",
            parsed::<vnet::interface::tap::Netns>("NETNS"),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::Tap { netns, .. } | Attachment::Veth { netns, .. } | Attachment::Local { netns, .. } => netns,
            "network namespace of the device: a name, a path, or pid:N"
        )
        .only_for(&["tap", "veth", "local"])
        .absent("beside vnetd")
        .phrase(" in {}"),
        field!(
            "promiscuous",
            flag(),
            |interface: InterfaceSpec| interface.attachment,
            Attachment::Local { promiscuous, .. } => promiscuous,
            "promiscuous mode: receive frames for all addresses, not only for those of the overlay"
        )
        .only_for(&["local"]),
        field!("network", network(), |interface: InterfaceSpec| interface.network, "network of the interface"),
        field!(
            "mac",
            mac(),
            |interface: InterfaceSpec| interface.mac,
            "the guest's MAC address, which then need not be learned"
        )
        .absent("learned"),
        field!(
            "addresses",
            addresses(),
            |interface: InterfaceSpec| interface.addresses,
            "the guest's IP addresses, at most 16, as in 10.0.0.1,fd00::1: other hosts of the overlay answer ARP and ND \
             requests for them"
        )
        .absent("none")
        .note("see [overlay.md](overlay.md); needs `mac`")
        .requires(&["mac"])
        .applies(Applies::Reload),
        field!(
            "mtu",
            number::<u32>(MTU_MIN, MTU_MAX as u32),
            |interface: InterfaceSpec| interface.mtu,
            "maximum payload of a frame"
        )
        .unit("bytes")
        .note("tap and veth: what the kernel allows, 65521")
        .always(),
        field!(
            "queues",
            number::<u32>(1, QUEUES_MAX as u32),
            |interface: InterfaceSpec| interface.queues,
            "queue pairs"
        )
        .only_for(&["vhost-user"])
        .phrase("{} queues"),
        field!(
            "queues",
            number::<u32>(1, TAP_QUEUES_MAX),
            |interface: InterfaceSpec| interface.queues,
            "queues"
        )
        .only_for(&["tap"])
        .phrase("{} queues"),
        field!("queues", number::<u32>(1, 1), |interface: InterfaceSpec| interface.queues, "one queue")
            .only_for(&["veth", "local"]),
        field!(
            "kernel_path",
            word::<KernelPath>(),
            |interface: InterfaceSpec| interface.kernel_path,
            "auto: the kernel forwards known flows of the interface without vnetd where possible; off: vnetd forwards all frames"
        )
        .only_for(&["veth", "local"])
        .note("veth: auto needs a `netns` other than vnetd's, local: vnetd's own; see [containers.md](containers.md)")
        .phrase("kernel path {}"),
        field!(
            "pair",
            word::<Pair>(),
            |interface: InterfaceSpec| interface.pair,
            "which devices connect the container on the kernel's path: netkit, veth, or auto: netkit where the kernel has it"
        )
        .only_for(&["veth"])
        .note("see [containers.md](containers.md)")
        .phrase("{} pair"),
        field!(
            "storm_limit",
            number::<u32>(1, RATE_MAX),
            |interface: InterfaceSpec| interface.storm_limit,
            "storm control: maximum rate of flooded frames from the guest; more are dropped and counted"
        )
        .unit("frames/s")
        .live()
        .phrase("storm limit {}/s"),
        field!(
            "port_security",
            flag(),
            |interface: InterfaceSpec| interface.port_security,
            "drop frames from the guest whose source address is not mac"
        )
        .live()
        .phrase("port security"),
        field!(
            "address_security",
            flag(),
            |interface: InterfaceSpec| interface.address_security,
            "drop IPv4, IPv6 and ARP frames from the guest whose source is not one of addresses, nor the IPv6 link-local address \
             that mac forms"
        )
        .only_for(&["vhost-user", "tap", "veth"])
        .live()
        .phrase("address security"),
        field!(
            "mode",
            word::<Mode>(),
            |interface: InterfaceSpec| interface.driving.mode.mode,
            "polling mode: driven by the guest's notifications, by the dispatcher's polling, or by either depending on the rate"
        )
        .live()
        .phrase("{}"),
        field!(
            "rate_low",
            number::<u32>(1, RATE_MAX),
            |interface: InterfaceSpec| interface.driving.mode.rate_low,
            "adaptive: guest-driven below this rate from and to the guest (alpha_l of VNET/P)"
        )
        .unit("frames/s")
        .live()
        .phrase("rate_low {}/s"),
        field!(
            "rate_high",
            number::<u32>(1, RATE_MAX),
            |interface: InterfaceSpec| interface.driving.mode.rate_high,
            "adaptive: VMM-driven above this rate from and to the guest (alpha_u of VNET/P)"
        )
        .unit("frames/s")
        .live()
        .phrase("rate_high {}/s"),
        field!(
            "window_us",
            number::<u32>(1, WINDOW_MAX_US),
            |interface: InterfaceSpec| interface.driving.mode.window_us,
            "adaptive: minimum time over which the rate is measured (omega of VNET/P)"
        )
        .unit("us")
        .live()
        .phrase("window {} us"),
        field!(
            "weight",
            number::<u32>(1, WEIGHT_MAX),
            |interface: InterfaceSpec| interface.driving.share.weight,
            "share of a busy dispatcher among its interfaces, for each queue (deficit round robin)"
        )
        .live()
        .phrase("weight {}"),
        field!(
            "rate_limit",
            number::<u32>(0, RATE_MAX),
            |interface: InterfaceSpec| interface.driving.share.rate_limit,
            "maximum rate from the guest, whose frames above it wait in its ring; 0: no limit"
        )
        .unit("Mbit/s")
        .live()
        .phrase("rate limit {} Mbit/s"),
        field!(
            "frame_limit",
            number::<u32>(0, RATE_MAX),
            |interface: InterfaceSpec| interface.driving.share.frame_limit,
            "maximum rate of frames from the guest; more wait in its ring; 0: no limit"
        )
        .unit("frames/s")
        .live()
        .phrase("frame limit {}/s"),
        field!(
            "learning_limit",
            number::<u32>(0, RATE_MAX),
            |interface: InterfaceSpec| interface.driving.share.learning_limit,
            "maximum rate of unknown source addresses from the guest; its frames wait while it invents more; 0: no limit"
        )
        .unit("addresses/s")
        .live()
        .phrase("learning limit {}/s"),
        field!(
            "interrupts",
            word::<Interrupts>(),
            |interface: InterfaceSpec| interface.driving.interrupts.interrupts,
            "vhost-user: notify the guest after its frames are delivered (direct) or when they arrive (optimistic)"
        )
        .live()
        .idle_for("tap", AT_ONCE)
        .not_for(&["veth", "local"])
        .phrase("{} interrupts"),
        field!(
            "receive_density_low",
            number::<u64>(0, u32::MAX),
            |interface: InterfaceSpec| interface.driving.interrupts.density_low,
            "optimistic: below this receive density, no immediate second notification (alpha of VNET/P+)"
        )
        .unit("bytes/s")
        .live()
        .idle_for("tap", AT_ONCE)
        .not_for(&["veth", "local"])
        .phrase("receive_density_low {} bytes/s"),
        field!(
            "receive_density_high",
            number::<u64>(0, u32::MAX),
            |interface: InterfaceSpec| interface.driving.interrupts.density_high,
            "optimistic: above this receive density, no immediate second notification (beta of VNET/P+)"
        )
        .unit("bytes/s")
        .live()
        .idle_for("tap", AT_ONCE)
        .not_for(&["veth", "local"])
        .phrase("receive_density_high {} bytes/s"),
        field!(
            "early_bytes",
            number::<u64>(0, u32::MAX),
            |interface: InterfaceSpec| interface.driving.interrupts.early_bytes,
            "optimistic: no early notification for less data than this; 0: always notify early, as VNET/P+ does"
        )
        .unit("bytes")
        .live()
        .idle_for("tap", AT_ONCE)
        .not_for(&["veth", "local"])
        .phrase("early from {} bytes"),
        field!(
            "direct",
            flag(),
            |interface: InterfaceSpec| interface.direct,
            "links negotiate UDP ports for this interface alone, at which its large frames are received directly into the guest's buffers"
        )
        .only_for(&["vhost-user"])
        .live()
        .note("see [below](#ports-of-guests-own)")
        .requires(&["mac"])
        .phrase("direct ports"),
        Field {
            read: |reader, key, interface: &mut InterfaceSpec| {
                let port = (PORT.read)(reader, key);
                port.map(|port| own_port(interface).map(|direct| direct.port = port)).is_some()
            },
            show: |interface: &InterfaceSpec| own_port_of(interface).filter(|direct| direct.port != 0)?.port.show(),
            save: None,
            key: super::key::Key::new(
                "direct_port",
                PORT.takes,
                "UDP port on the underlay for this interface alone, to which the other host of direct_link sends its frames",
            ),
        }
        .only_for(&["vhost-user"])
        .absent("none")
        .note("see [below](#ports-of-guests-own)")
        .requires(&["direct_link", "mac"]),
        Field {
            read: |reader, key, interface: &mut InterfaceSpec| {
                let link = (LINK.read)(reader, key);
                link.map(|link| own_port(interface).map(|direct| direct.link = link)).is_some()
            },
            show: |interface: &InterfaceSpec| own_port_of(interface).filter(|direct| !direct.link.is_empty())?.link.show(),
            save: None,
            key: super::key::Key::new(
                "direct_link",
                LINK.takes,
                "name of the link whose other host sends to direct_port",
            ),
        }
        .only_for(&["vhost-user"])
        .absent("none")
        .requires(&["direct_port"]),
    ],
};

const PORT: Kind<u16> = number::<u16>(1, u16::MAX as u32);
const LINK: Kind<String> = text("LINK");

fn own_port(interface: &mut InterfaceSpec) -> Option<&mut DirectSpec> {
    match &mut interface.attachment {
        Attachment::VhostUser { direct, .. } => Some(direct.get_or_insert_default()),
        _ => None,
    }
}

fn own_port_of(interface: &InterfaceSpec) -> Option<&DirectSpec> {
    match &interface.attachment {
        Attachment::VhostUser { direct, .. } => direct.as_ref(),
        _ => None,
    }
}

impl Show for Attachment {
    fn show(&self) -> Option<serde_json::Value> {
        Some(self.kind().into())
    }
}

/// The key `kind`, parsed to an attachment with default values; the keys of this kind are read later.
const fn attachment() -> Kind<Attachment> {
    let Kind { takes, .. } = word::<Attachment>();
    Kind::new(takes, |reader, key| {
        let mut attachment = (word::<Attachment>().read)(reader, key)?;
        if let Attachment::VhostUser { server, .. } = &mut attachment {
            *server = true;
        }
        Some(attachment)
    })
}

/// The guest's IP addresses, published in the overlay with its MAC address.
const fn addresses() -> Kind<Vec<IpAddr>> {
    Kind::new(Takes::Texts("ADDRESS"), |reader, key| {
        let entry = reader.take(key.name)?;
        let Value::List(list) = entry.value else {
            let text = "'addresses' must be a list of texts; write addresses = [\"10.0.0.1\"]";
            reader.problem(&entry.place, text);
            return None;
        };
        if list.len() > ADDRESSES_MAX {
            let text = format!("addresses lists {}; {ADDRESSES_MAX} is the limit", list.len());
            reader.problem(&entry.place, text);
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
        Some(addresses)
    })
}

pub(super) fn read(
    table: KeyTable,
    notes: &mut Notes,
    broken: &mut Vec<Target>,
) -> Option<Item<InterfaceSpec>> {
    let before = notes.problems.len();
    let item = super::host::read(&INTERFACE, table, notes, |reader, interface| {
        judge_direct(reader, interface);
        judge(reader, interface);
    });
    if notes.problems.len() == before {
        return Some(item);
    }
    if !item.spec.name.is_empty() {
        broken.push(Target::Interface(item.spec.name));
    }
    None
}

/// Checks constraints between keys, also for changes of an open interface.
pub(super) fn judge(reader: &mut Reader<'_>, interface: &InterfaceSpec) {
    if reader.given("addresses") && interface.mac.is_none() && !reader.given("mac") {
        let text = "addresses are published with the interface's address; give it a 'mac'";
        reader.problem(&reader.place_of("addresses"), text);
    }
    if reader.given("direct") && interface.direct {
        if interface.mac.is_none() && !reader.given("mac") {
            let text = "direct ports receive frames for the interface's address; give it a 'mac'";
            reader.problem(&reader.place_of("direct"), text);
        }
        if own_port_of(interface).is_some() {
            let text =
                "direct negotiates the interface's ports; remove direct_port and direct_link, or direct";
            reader.problem(&reader.place_of("direct"), text);
        }
    }
    if reader.given("port_security") && interface.port_security && interface.mac.is_none() {
        let text = "port_security compares sources with the interface's address; give it a 'mac'";
        reader.problem(&reader.place_of("port_security"), text);
    }
    if reader.given("address_security") && interface.address_security && interface.addresses.is_empty() {
        let text = "address_security compares sources with the interface's IP addresses; give it 'addresses'";
        reader.problem(&reader.place_of("address_security"), text);
    }
    if let Attachment::VhostUser { server: false, .. } = interface.attachment {
        for key in ["socket_owner", "socket_group", "socket_mode"] {
            if reader.given(key) {
                let text =
                    format!("{key} is of a socket that vnetd makes, but with server = false it makes none");
                reader.problem(&reader.place_of(key), text);
            }
        }
    }
    if interface.pair != Pair::Auto && interface.kernel_path == KernelPath::Off {
        let text = "pair has no effect with kernel_path = \"off\", where a TAP connects the container";
        reader.hint(&reader.place_of("pair"), text);
    }
    if interface.mtu as usize > TAP_MTU_MAX {
        let (place, mtu) = (reader.place_of("mtu"), interface.mtu);
        match interface.attachment {
            Attachment::Tap { .. } => {
                reader.hint(&place, format!("mtu {mtu} is more than a TAP takes; it will be {TAP_MTU_MAX}"));
            }
            Attachment::Veth { .. } => {
                reader.problem(
                    &place,
                    format!("mtu {mtu} is more than a veth takes; use {TAP_MTU_MAX} at most"),
                );
            }
            _ => {}
        }
    }
    let Driving { mode, interrupts, .. } = &interface.driving;
    for (low, high, values) in [
        ("rate_low", "rate_high", (mode.rate_low.into(), mode.rate_high.into())),
        ("receive_density_low", "receive_density_high", (interrupts.density_low, interrupts.density_high)),
    ] {
        let (least, most): (u64, u64) = values;
        if least > most {
            let text = format!("{low} {least} exceeds {high} {most}; swap them");
            reader.problem(&reader.place_of(high), text);
        }
    }
}

/// Checks that `direct_port` and `direct_link` are given together.
fn judge_direct(reader: &mut Reader<'_>, interface: &mut InterfaceSpec) {
    let Some(DirectSpec { port, link }) = own_port_of(interface) else { return };
    let [has_port, has_link] = ["direct_port", "direct_link"].map(|key| reader.given(key));
    if !link.is_empty() && *port != 0 {
        return;
    }
    if has_port && !has_link {
        let text = "direct_port takes datagrams of one link; write direct_link = \"h2\"";
        reader.problem(&reader.place_of("direct_port"), text);
    }
    if has_link && !has_port {
        reader.problem(&reader.place_of("direct_link"), "direct_link needs a port; write direct_port = 9101");
    }
    if let Attachment::VhostUser { direct, .. } = &mut interface.attachment {
        *direct = None;
    }
}

impl fmt::Display for InterfaceSpec {
    /// The settings that differ from the defaults, for plans and logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.attachment {
            Attachment::VhostUser { socket, server, .. } => {
                write!(f, "vhost-user {} {}", if *server { "at" } else { "to" }, socket.display())?;
            }
            Attachment::Tap { device, .. }
            | Attachment::Veth { device, .. }
            | Attachment::Local { device, .. } => {
                write!(f, "{} {device}", self.attachment.kind())?;
            }
        }
        f.write_str(&INTERFACE.phrases(self))
    }
}
