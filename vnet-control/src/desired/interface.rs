//! Interfaces: what is attached to this host, and how it is driven.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use vnet::dispatch::mode::ModeSettings;
use vnet::frame::NetworkId;
use vnet::interface::interrupts::InterruptSettings;
use vnet::interface::tap::Netns;
use vnet::route::STORM_FRAMES_PER_S;
use vnet::wire::ethernet::Mac;

use super::limits::MTU_DEFAULT;

/// One interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceSpec {
    /// Its name on this host.
    pub name: String,
    /// What it is attached by.
    pub attachment: Attachment,
    /// The network it stands in.
    pub network: NetworkId,
    /// The guest's address; learned when absent.
    pub mac: Option<Mac>,
    /// The guest's IP addresses: other hosts of the overlay answer questions for them.
    pub addresses: Vec<IpAddr>,
    /// Largest payload of a frame, in bytes.
    pub mtu: u32,
    /// Queue pairs.
    pub queues: u32,
    /// Most flooded frames it may send a second.
    pub storm_limit: u32,
    /// Whether frames from it must carry its own address as their source.
    pub port_security: bool,
    /// Who drives it, and how its guest is notified.
    pub driving: Driving,
}

impl Default for InterfaceSpec {
    fn default() -> InterfaceSpec {
        InterfaceSpec {
            name: String::new(),
            attachment: Attachment::VhostUser { socket: PathBuf::new(), server: true, direct: None },
            network: NetworkId::DEFAULT,
            mac: None,
            addresses: vec![],
            mtu: MTU_DEFAULT,
            queues: 1,
            storm_limit: STORM_FRAMES_PER_S,
            port_security: false,
            driving: Driving::default(),
        }
    }
}

/// What an interface is attached by.
#[derive(Clone, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum Attachment {
    /// A virtual machine's virtio-net device, by vhost-user.
    VhostUser {
        /// Unix socket between the front end and vnetd.
        socket: PathBuf,
        /// True: vnetd listens; false: vnetd connects.
        server: bool,
        /// An underlay port of its own.
        direct: Option<DirectSpec>,
    },
    /// A TAP device, for containers and hosts.
    Tap {
        /// The device's name.
        device: String,
        /// Where the device lives; beside vnetd when absent.
        netns: Option<Netns>,
    },
    /// A device on the user's own LAN.
    Local {
        /// The device's name.
        device: String,
        /// Where the device lives; beside vnetd when absent.
        netns: Option<Netns>,
        /// Whether frames for all addresses are taken.
        promiscuous: bool,
    },
}

/// An underlay port of an interface's own, by which frames come straight into its guest's buffers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectSpec {
    /// The port (UDP), at the bridge's address.
    pub port: u16,
    /// The link whose other host sends there.
    pub link: String,
}

/// A thing of the host that only one interface can have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Resource {
    /// A Unix socket.
    Socket(PathBuf),
    /// A network device in a network namespace, the latter as it is written.
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
    /// What the attachment takes from the host.
    pub fn resource(&self) -> Resource {
        match self {
            Attachment::VhostUser { socket, .. } => Resource::Socket(socket.clone()),
            Attachment::Tap { device, netns } | Attachment::Local { device, netns, .. } => {
                Resource::Device(device.clone(), netns.as_ref().map(ToString::to_string))
            }
        }
    }

    /// Its `kind` in the configuration.
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
}
