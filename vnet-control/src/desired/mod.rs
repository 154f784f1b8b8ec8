//! The desired state of a host: its settings, and its networks, interfaces, links and routes.
//!
//! These are plain values. `settings` declares and parses them, `check` compares them with each other, `plan` computes the
//! difference of two states, and the engine applies it. Each item keeps its place in the file for error messages; comparisons
//! ignore the place.

mod account;
mod front_end;
mod host;
mod interface;
mod limits;
mod link;
mod overlay;
mod route;

pub use account::Account;
pub(crate) use account::AccountError;
pub use front_end::*;
pub use host::*;
pub use interface::*;
pub use limits::*;
pub use link::*;
pub use overlay::*;
pub use route::*;

use vnet::link::sealed::identity::IdentityFiles;

use crate::table::Place;

/// A value and the place where it was written.
#[derive(Clone, Debug)]
pub struct Item<T> {
    /// File and line; empty for a command.
    pub place: Place,
    /// The value.
    pub spec: T,
}

impl<T: PartialEq> PartialEq for Item<T> {
    fn eq(&self, other: &Item<T>) -> bool {
        self.spec == other.spec
    }
}

/// The complete desired state of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// `[host]`.
    pub host: Item<HostSpec>,
    /// `[control]`; fixed while vnetd runs.
    pub control: Item<ControlSpec>,
    /// `[dispatch]`; fixed while vnetd runs.
    pub dispatch: Item<DispatchSpec>,
    /// `[bridge]`; fixed while vnetd runs.
    pub bridge: Item<BridgeSpec>,
    /// `[overlay]`, if configured; fixed while vnetd runs.
    pub overlay: Option<Item<OverlaySpec>>,
    /// `[identity]`; the paths are fixed while vnetd runs, the files' contents are reloaded.
    pub identity: Option<Item<IdentityFiles>>,
    /// Networks with explicit settings; network 1 exists even if it is not listed.
    pub networks: Vec<Item<NetworkSpec>>,
    /// Interfaces, in the order of the file.
    pub interfaces: Vec<Item<InterfaceSpec>>,
    /// Links, in the order of the file.
    pub links: Vec<Item<LinkSpec>>,
    /// Rules, in the order of the file.
    pub routes: Vec<Item<RouteSpec>>,
}
