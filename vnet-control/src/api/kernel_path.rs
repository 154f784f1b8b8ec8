//! The kernel's own path in answers: its flows, and why an interface or the links lack it.

use serde::{Deserialize, Serialize};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

use super::Interface;

/// One of `GET /v1/flows`: a flow that the kernel forwards by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KernelFlow {
    /// Network.
    pub network: NetworkId,
    /// Source address.
    pub src: Mac,
    /// Destination address.
    pub dst: Mac,
    /// Where the frames enter: `interface NAME` or `link NAME`.
    pub from: String,
    /// Where the frames go: `interface NAME` or `link NAME`.
    pub to: String,
    /// Frames that the kernel has forwarded since the flow was installed.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Milliseconds until the flow ends if it is not renewed; 0 if it has ended.
    pub kernel_ms: u64,
    /// Only these frames of it, across a sealed link: datagrams that two applications of the interconnect have sealed, as `SOURCE >
    /// DESTINATION`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealed: Option<String>,
}

/// [`Interface::path_reason`] of an interface with `rate_limit` or `frame_limit`: vnetd takes its frames at that rate. Frames to it may
/// pass in the kernel.
pub const LIMITED: &str = "it has a rate limit";
/// [`Interface::path_reason`] of an interface with `address_security`: vnetd checks each of its frames. Frames to it may pass in the
/// kernel.
pub const GUARDED: &str = "it has address security";

/// [`KernelSummary::link_reason`] of a host whose links are all sealed.
pub const SEALED_LINKS_ONLY: &str = "sealed links only";

/// Overview of the kernel's own path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct KernelSummary {
    /// Interfaces with the kernel's own path.
    pub interfaces: usize,
    /// Installed flows.
    pub flows: usize,
    /// Number of times a flow was refused at a limit; vnetd forwards its frames.
    pub refused: u64,
    /// Connections and UDP flows of guests whose packets leave for other hosts without a tunnel.
    #[serde(default)]
    pub translated: usize,
    /// Why programs and maps cannot be pinned, so that the next vnetd cannot adopt flows; absent if it can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_error: Option<String>,
    /// Why an interface does not have the path `kernel`: the first one of kind `veth` or `local`, otherwise the first one; absent if
    /// all have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface_reason: Option<String>,
    /// Why no link has the path `kernel`; absent if one has, or if there are no links.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_reason: Option<String>,
}

impl Interface {
    /// True if the interface is of a kind that can have the path `kernel`.
    pub fn may_have_kernel_path(&self) -> bool {
        matches!(&*self.settings.text("kind"), "veth" | "local")
    }
}
