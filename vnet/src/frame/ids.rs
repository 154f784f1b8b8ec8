//! Numbers of networks and ports.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A network's number in the overlay (VNI), 24 bits; network 1 is the default.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkId(u32);

impl NetworkId {
    /// The default network, for interfaces that name no network.
    pub const DEFAULT: NetworkId = NetworkId(1);

    /// `None` when `id` has more than 24 bits.
    #[inline]
    pub const fn new(id: u32) -> Option<NetworkId> {
        if id < 1 << 24 { Some(NetworkId(id)) } else { None }
    }

    /// The number, below 2^24.
    #[inline]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl Default for NetworkId {
    fn default() -> NetworkId {
        NetworkId::DEFAULT
    }
}

impl TryFrom<u32> for NetworkId {
    type Error = String;
    fn try_from(id: u32) -> Result<NetworkId, String> {
        NetworkId::new(id).ok_or_else(|| format!("network id {id} is larger than 24 bits allow (16777215)"))
    }
}

impl From<NetworkId> for u32 {
    fn from(id: NetworkId) -> u32 {
        id.0
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A port of the core: the slot of an interface or a link in the port table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
pub struct PortId(pub u16);

impl PortId {
    /// Marks the absence of a port.
    pub const NONE: PortId = PortId(u16::MAX);

    /// The slot's number.
    #[inline]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}
