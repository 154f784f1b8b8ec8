//! Direct ports in answers.

use serde::{Deserialize, Serialize};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

use super::{Interface, Link};

/// A direct port of an interface: a UDP port for its frames over one link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DirectPort {
    /// Name of the link.
    pub link: String,
    /// UDP port, at the address of `[bridge] listen`.
    pub port: u16,
    /// `used`: the other host reaches the port and sends the interface's frames there; `waiting`: nothing comes from it; `down`:
    /// the guest cannot receive, or there is no route to the other host. If it is not used, the frames take the link's port.
    pub state: String,
}

/// A guest of a link's other host with a direct port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DirectGuest {
    /// Network of the guest.
    pub network: NetworkId,
    /// MAC address of the guest.
    pub mac: Mac,
    /// UDP port, at the remote's address.
    pub port: u16,
    /// Frames for the guest take the port; false: the other host has not confirmed that this host reaches it.
    pub used: bool,
}

impl Interface {
    /// How many direct ports of the interface are used, and why one is not.
    pub fn direct_note(&self) -> Option<String> {
        if !self.settings.flag("direct") {
            return None;
        }
        let used = self.direct_ports.iter().filter(|port| port.state == "used").count();
        let reason: String = self.direct_reason.iter().map(|why| format!(", {why}")).collect();
        Some(format!("{used} of {} direct ports used{reason}", self.direct_ports.len()))
    }
}

impl Link {
    /// How many of the announced direct ports of the other host's guests are used.
    pub fn direct_note(&self) -> Option<String> {
        let used = self.direct_guests.iter().filter(|guest| guest.used).count();
        let all = self.direct_guests.len();
        (all > 0).then(|| format!("{used} of {all} direct ports of its guests used"))
    }
}
