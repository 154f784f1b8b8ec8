//! Interfaces: how guests are attached, and how interfaces are driven.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use vnet::dispatch::mode::ModeSettings;
use vnet::dispatch::share::ShareSettings;
use vnet::frame::NetworkId;
use vnet::interface::interrupts::InterruptSettings;
use vnet::interface::pair::Pair;
use vnet::interface::tap::Netns;
use vnet::route::STORM_FRAMES_PER_S;
use vnet::wire::ethernet::Mac;

use super::front_end::FrontEndSpec;
use super::host::KernelPath;
use super::limits::MTU_DEFAULT;

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSpec {
    /// Name of the interface on this host.
    pub name: String,
    /// How the guest is attached.
    pub attachment: Attachment,
    /// Network of the interface.
    pub network: NetworkId,
    /// The guest's MAC address; learned when absent.
    pub mac: Option<Mac>,
    /// The guest's IP addresses: other hosts of the overlay answer ARP and ND for them.
    pub addresses: Vec<IpAddr>,
    /// MTU: maximum payload of a frame, in bytes.
    pub mtu: u32,
    /// Number of queue pairs.
    pub queues: u32,
    /// Storm control: maximum rate of flooded frames from the guest, per second.
    pub storm_limit: u32,
    /// Port security: drop frames from the guest whose source address is not `mac`.
    pub port_security: bool,
    /// Address security: drop frames from the guest whose source IP address is not one of `addresses`.
    pub address_security: bool,
    /// Negotiate direct ports: UDP ports of the interface alone, one for each link, for receive in place.
    pub direct: bool,
    /// Whether the kernel forwards known flows of a veth.
    pub kernel_path: KernelPath,
    /// Which pair of devices connects a container on the kernel's path.
    pub pair: Pair,
    /// Polling mode and interrupt coalescing.
    pub driving: Driving,
}

impl Default for InterfaceSpec {
    fn default() -> InterfaceSpec {
        InterfaceSpec {
            name: String::new(),
            attachment: Attachment::VhostUser {
                socket: PathBuf::new(),
                server: true,
                front_end: FrontEndSpec::default(),
                direct: None,
            },
            network: NetworkId::DEFAULT,
            mac: None,
            addresses: vec![],
            mtu: MTU_DEFAULT,
            queues: 1,
            storm_limit: STORM_FRAMES_PER_S,
            port_security: false,
            address_security: false,
            direct: false,
            kernel_path: KernelPath::default(),
            pair: Pair::default(),
            driving: Driving::default(),
        }
    }
}

/// How a guest is attached to an interface.
#[derive(Clone, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Attachment {
    /// A virtual machine's virtio-net device, by vhost-user.
    VhostUser {
        /// Unix socket between the front end and vnetd.
        socket: PathBuf,
        /// True: vnetd listens; false: vnetd connects.
        server: bool,
        /// Access rules of the socket.
        front_end: FrontEndSpec,
        /// The interface's own underlay port, for receive in place.
        direct: Option<DirectSpec>,
    },
    /// A TAP device, for containers and hosts.
    Tap {
        /// Name of the device.
        device: String,
        /// Network namespace of the device; vnetd's own when absent.
        netns: Option<Netns>,
    },
    /// A container's veth, whose known flows the kernel forwards without vnetd.
    Veth {
        /// Name of the device.
        device: String,
        /// Network namespace of the device; vnetd's own when absent.
        netns: Option<Netns>,
    },
    /// A network device of this host, bridged to its LAN.
    Local {
        /// Name of the device.
        device: String,
        /// Network namespace of the device; vnetd's own when absent.
        netns: Option<Netns>,
        /// Promiscuous mode: receive frames for all addresses.
        promiscuous: bool,
    },
}

/// Receive in place: an underlay port of one interface, from which the kernel copies into the guest's buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectSpec {
    /// The port (UDP), at the bridge's address.
    pub port: u16,
    /// The link whose remote host sends there.
    pub link: String,
}

/// A host resource that only one interface can use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// A Unix socket.
    Socket(PathBuf),
    /// A network device in a network namespace (as configured).
    Device(String, Option<String>),
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resource::Socket(path) => write!(f, "socket '{}'", path.display()),
            Resource::Device(device, None) => write!(f, "device '{device}'"),
            Resource::Device(device, Some(netns)) => write!(f, "device '{device}' in netns '{netns}'"),
        }
    }
}

impl Attachment {
    /// The host resource that the attachment occupies.
    pub fn resource(&self) -> Resource {
        match self {
            Attachment::VhostUser { socket, .. } => Resource::Socket(socket.clone()),
            Attachment::Tap { device, netns }
            | Attachment::Veth { device, netns }
            | Attachment::Local { device, netns, .. } => {
                Resource::Device(device.clone(), netns.as_ref().map(ToString::to_string))
            }
        }
    }

    /// True if its device is a TAP, or may be one: that of a container, if there is no kernel path.
    pub fn may_have_tap(&self) -> bool {
        matches!(self, Attachment::Tap { .. } | Attachment::Veth { .. })
    }

    /// The network namespace of its device; `None`: vnetd's own, or no device.
    pub fn netns(&self) -> Option<&Netns> {
        match self {
            Attachment::Tap { netns, .. }
            | Attachment::Veth { netns, .. }
            | Attachment::Local { netns, .. } => netns.as_ref(),
            Attachment::VhostUser { .. } => None,
        }
    }

    /// The configured direct port, if it has one.
    pub fn direct(&self) -> Option<&DirectSpec> {
        match self {
            Attachment::VhostUser { direct, .. } => direct.as_ref(),
            Attachment::Tap { .. } | Attachment::Veth { .. } | Attachment::Local { .. } => None,
        }
    }

    /// Value of `kind` in the configuration.
    pub fn kind(&self) -> &'static str {
        self.into()
    }
}

/// How an interface is driven and how its guest is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Driving {
    /// `mode`, `rate_low`, `rate_high`, `window_us`
    pub mode: ModeSettings,
    /// `interrupts`, `receive_density_low`, `receive_density_high`, `early_bytes`
    pub interrupts: InterruptSettings,
    /// `weight`, `rate_limit`, `frame_limit`, `learning_limit`
    pub share: ShareSettings,
}
