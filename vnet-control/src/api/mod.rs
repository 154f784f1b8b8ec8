//! Answers of the HTTP/JSON API, shared by the daemon and its clients.
//!
//! Requests use the keys of the configuration file. Clients ignore unknown fields, so new fields can be added.

mod direct;
mod kernel_path;
mod stats;
mod timeline;

pub use direct::*;
pub use kernel_path::*;
pub use stats::*;
pub use timeline::*;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::settings::values::{InterfaceSettings, LinkSettings, NetworkSettings, RouteSettings};
use super::traffic::Traffic;
use vnet::dispatch::recruit;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Serde default: older daemons omit this field.
fn one() -> u16 {
    1
}

/// `GET /v1/status`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Status {
    /// Version of vnetd.
    pub version: String,
    /// Name of the host.
    pub host: String,
    /// Process id of vnetd.
    pub pid: u32,
    /// Seconds since vnetd became ready.
    pub uptime_s: u64,
    /// Address at which links arrive (UDP).
    pub bridge: String,
    /// Number of UDP ports, consecutive from that of `bridge`.
    #[serde(default = "one")]
    pub ports: u16,
    /// Number of dispatchers.
    pub dispatchers: usize,
    /// The threads that run the dispatchers. Older daemons omit this field.
    #[serde(default)]
    pub threads: Threads,
    /// Yield strategy of idle dispatchers.
    #[serde(rename = "yield")]
    pub yield_strategy: String,
    /// Interfaces.
    pub interfaces: usize,
    /// Interfaces in state `up`.
    pub interfaces_up: usize,
    /// Links.
    pub links: usize,
    /// Rules.
    pub routes: usize,
    /// Networks.
    pub networks: usize,
    /// Learned addresses.
    pub learned: usize,
    /// The distributed overlay, if configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<OverlaySummary>,
    /// The kernel's own path; absent on a host without interfaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelSummary>,
    /// Seconds until this host's certificate expires; 0 if it has expired, absent without `[identity]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_s: Option<u64>,
    /// MAC addresses that two stations used within the last ten minutes, the latest last; at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub duplicate_addresses: Vec<DuplicateAddress>,
    /// Where the last datagrams came from that no link takes, within the last ten minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_sender: Option<UnknownSender>,
    /// The balance of all frames.
    pub balance: Balance,
}

/// The threads that run the dispatchers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Threads {
    /// Number of threads that always run.
    pub min: usize,
    /// Number of threads under full load.
    pub max: usize,
    /// Number of threads now.
    pub now: usize,
    /// Number of threads recruited so far.
    pub recruited: u64,
    /// Number of threads released so far.
    pub released: u64,
    /// Number of times that a dispatcher has moved to another thread.
    pub moves: u64,
}

impl fmt::Display for Threads {
    /// What to append to the number of dispatchers; nothing if the number of threads is fixed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Threads { min, max, now, recruited, released, moves } = self;
        if min == max {
            return Ok(());
        }
        write!(
            f,
            " on {now} of {min} to {max} threads ({recruited} recruited, {released} released, {moves} moves)"
        )
    }
}

impl From<recruit::Threads> for Threads {
    fn from(threads: recruit::Threads) -> Threads {
        let recruit::Threads { min, max, now, recruited, released, moves, .. } = threads;
        Threads { min, max, now, recruited, released, moves }
    }
}

/// A MAC address that two stations use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DuplicateAddress {
    /// The network.
    pub network: NetworkId,
    /// The address.
    pub mac: Mac,
    /// The interface or link that frames to the address go to.
    pub at: String,
    /// The other one that frames from the address arrive from.
    pub also: String,
    /// Seconds since that was seen last.
    pub age_s: u64,
}

/// A sender of datagrams that no link takes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UnknownSender {
    /// Its address and port.
    pub address: String,
    /// Datagrams of all unknown senders so far.
    pub datagrams: u64,
    /// Seconds since the log told of it: once a minute for one sender.
    pub age_s: u64,
}

/// The distributed overlay at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverlaySummary {
    /// The store: `starting` (never reached), `connected` or `away`.
    pub state: String,
    /// Seconds in this state.
    pub since_s: u64,
    /// Other hosts.
    pub hosts: usize,
    /// Known stations, including this host's.
    pub stations: usize,
    /// Alarms raised so far.
    pub alarms: u64,
}

/// `GET /v1/overlay`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Overlay {
    /// The store: `starting` (never reached), `connected` or `away`.
    pub state: String,
    /// Seconds in this state.
    pub since_s: u64,
    /// Members of the etcd cluster.
    pub etcd: Vec<String>,
    /// Latest store revision seen.
    pub revision: i64,
    /// `mesh`, `hub NAME` or `explicit`.
    pub topology: String,
    /// Address at which other hosts reach this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Stations of this host that are in the store.
    pub published: usize,
    /// Known stations, including this host's.
    pub stations: usize,
    /// Hosts and stations frozen for a while after moving too often.
    pub frozen: usize,
    /// Other hosts.
    pub hosts: Vec<OverlayHost>,
    /// Alarms raised so far.
    pub alarms_total: u64,
    /// The latest alarm of each kind.
    pub alarms: Vec<Alarm>,
}

/// Another host of the overlay, as its records describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverlayHost {
    /// Name of the host, and of the link to it.
    pub name: String,
    /// Address at which its links arrive.
    pub address: String,
    /// Networks that the host is in.
    pub networks: Vec<NetworkId>,
    /// True if only reflectors can reach the host.
    pub behind_nat: bool,
    /// Seconds since the host's record vanished from the store without a withdrawal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_s: Option<u64>,
}

/// Alarms of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Alarm {
    /// Stable name of the kind.
    pub name: String,
    /// Number of times that it was raised.
    pub count: u64,
    /// Text of the latest alarm.
    pub text: String,
    /// Seconds since the latest alarm.
    pub age_s: u64,
}

/// One of `GET /v1/interfaces`; the answer to `POST /v1/interfaces`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// `up`, `down` or `broken`.
    pub state: String,
    /// Why the interface is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Likely mistakes that lose frames, one short sentence each; the interface may be up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// `kernel`: the kernel forwards known flows from the guest by itself, vnetd all others; `vnetd`: vnetd forwards all frames from it.
    #[serde(default = "vnetd_path")]
    pub path: String,
    /// Why vnetd forwards all frames from the guest; for `kernel`: all that go to other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_reason: Option<String>,
    /// Direct ports, if the interface has `direct`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub direct_ports: Vec<DirectPort>,
    /// Why frames of one or more links do not take a direct port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct_reason: Option<String>,
    /// Polling mode and guest notifications.
    #[serde(flatten)]
    pub driving: Driving,
    /// Settings of the interface; `mtu` and `pair` are the effective ones.
    #[serde(flatten)]
    pub settings: InterfaceSettings,
}

/// Serde default: older daemons omit this field.
fn vnetd_path() -> String {
    "vnetd".into()
}

/// Polling mode and guest notifications: part of [`Interface`].
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driving {
    /// `guest`, `vmm`, or `both` when its queues differ.
    pub driven_by: String,
    /// Frames per second from and to the guest, over the last window.
    pub rate: u64,
    /// Changes between guest-driven and VMM-driven so far.
    pub switches: u64,
    /// Notifications per thousand delivered frames.
    pub notifications_per_1000_frames: u64,
    /// Counters of optimistic interrupts.
    #[serde(flatten)]
    pub interrupt_counters: InterruptCounters,
}

/// One of `GET /v1/links`; the answer to `POST /v1/links`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Link {
    /// Name of the link.
    pub name: String,
    /// `up`; `degraded`: usable, but lossy or about to fail; `down`: no route to the other host, nothing received from it
    /// yet, silent for too long, or a sealed link without keys. Frames are still sent where possible.
    pub state: String,
    /// Why the link is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds since anything was received over the link; absent if nothing ever was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<u64>,
    /// Age of the current keys in seconds (sealed); absent without keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys_s: Option<u64>,
    /// Seconds until the other host's certificate expires (sealed, not stream); 0 if it has expired, absent without keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_s: Option<u64>,
    /// Round-trip time in microseconds, from keepalives (sealed) or probes (native).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u32>,
    /// Loss in permille: probes without an answer among the last 50, five per second (native); absent if the other host never
    /// answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_permille: Option<u32>,
    /// `kernel`: the kernel forwards known flows of containers to the other host by itself; `vnetd`: vnetd forwards all frames.
    #[serde(default = "vnetd_path")]
    pub path: String,
    /// Why vnetd forwards all frames of the link; absent if no interface has the path `kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_reason: Option<String>,
    /// With path `kernel`, native links: why packets take a tunnel, all of them or those of one protocol; absent if they need none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel_reason: Option<String>,
    /// The other host's guests with direct ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub direct_guests: Vec<DirectGuest>,
    /// Traffic and losses.
    #[serde(default)]
    pub traffic: Traffic,
    /// Settings of the link. These show the current state instead of the configuration: `remote` (`anywhere` while unknown),
    /// `mtu` (the path MTU in use), `sealed`, `peer` and `offload`.
    #[serde(flatten)]
    pub settings: LinkSettings,
}

/// One of `GET /v1/routes`; the answer to `POST /v1/routes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Route {
    /// Index of the rule: counted from 1, never reused.
    pub index: u32,
    /// Settings of the rule.
    #[serde(flatten)]
    pub settings: RouteSettings,
}

/// The body of `PATCH /v1/routes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RouteMove {
    /// The address that has moved.
    pub dst: Mac,
    /// Where its frames go now: `interface NAME` or `link NAME`.
    pub to: String,
    /// The network.
    #[serde(default)]
    pub network: NetworkId,
}

/// One of `GET /v1/networks`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Network {
    /// Number of interfaces in the network.
    pub interfaces: usize,
    /// Settings of the network.
    #[serde(flatten)]
    pub settings: NetworkSettings,
}

/// One of `GET /v1/learned`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Learned {
    /// The network.
    pub network: NetworkId,
    /// The MAC address.
    pub mac: Mac,
    /// Where the address is: `interface NAME` or `link NAME`.
    pub at: String,
    /// How the entry is held: `learned`, `frozen` (learned, and frozen because it moved too often) or `configured`.
    pub held: String,
    /// Seconds since a frame from the address was last seen; 0 if configured.
    pub age_s: u32,
}

/// `GET /v1/trace?src=MAC&dst=MAC`, optionally `&network=ID&from=PLACE`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Trace {
    /// The frame's network.
    pub network: NetworkId,
    /// The frame's source address.
    pub src: Mac,
    /// The frame's destination address.
    pub dst: Mac,
    /// Where the frame would enter: `interface NAME` or `link NAME`.
    pub from: String,
    /// The stage that decides: `guard`, `rules`, `configured`, `learned`, `flood` or `nothing`.
    pub by: String,
    /// Explanation of the decision for people.
    pub why: String,
    /// The guard's verdict on entry: `admitted`, or the drop reason.
    #[serde(default)]
    pub guard: String,
    /// Indices of the rules that decide.
    pub rules: Vec<u32>,
    /// Priority of these rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// Dispatchers that have the flow in their cache.
    #[serde(default)]
    pub cached_by: Vec<usize>,
    /// Milliseconds left of the lease under which the kernel forwards this flow without vnetd; absent if vnetd forwards it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_ms: Option<u64>,
    /// Destinations of the frame: `interface NAME` or `link NAME`.
    pub to: Vec<String>,
    /// One copy per destination, with the destination's state.
    #[serde(default)]
    pub copies: Vec<TracedCopy>,
    /// Reason for which the frame would be dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<String>,
}

/// A copy of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TracedCopy {
    /// Destination of the copy: `interface NAME` or `link NAME`.
    pub to: String,
    /// State of the destination, as in the lists of interfaces and links.
    pub state: String,
    /// MTU of the interface, or of the link's path, in bytes.
    pub mtu: u32,
    /// The link's remote address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// The remote host's answer to the trace inquiry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(no_recursion))]
    pub next: Option<Box<Hop>>,
    /// Why there is no answer from the remote host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
}

/// One hop of a trace: the part of a [`Trace`] that is disclosed to other hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Hop {
    /// Name of the host.
    pub host: String,
    /// Where the frame would enter the host.
    pub from: String,
    /// Explanation of the decision for people.
    pub why: String,
    /// One copy per destination.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<HopCopy>,
    /// Reason for which the frame would be dropped there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<String>,
    /// Number of copies omitted because the answer has no room for them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A copy of the frame on another host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HopCopy {
    /// Destination of the copy: `interface NAME` or `link NAME`.
    pub to: String,
    /// State of the destination, if it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// The next host's answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(no_recursion))]
    pub next: Option<Box<Hop>>,
    /// Why there is no answer from the next host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
}

/// What a plan does to an object, in display order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// The object is removed.
    Remove,
    /// The object is changed.
    Change,
    /// The object is added.
    Add,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Change {
    /// What the step does.
    pub action: Action,
    /// `host`, `network`, `interface`, `link` or `route`.
    pub object: String,
    /// Name of the object; empty for a route.
    pub name: String,
    /// Description of the object; for a change `OLD -> NEW`.
    pub detail: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = match self.action {
            Action::Remove => '-',
            Action::Change => '~',
            Action::Add => '+',
        };
        let name = if self.name.is_empty() { String::new() } else { format!(" {}", self.name) };
        write!(f, "{sign} {}{name}: {}", self.object, self.detail)
    }
}

/// The answer to `POST /v1/apply`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Applied {
    /// True if the changes were only computed, not applied.
    pub dry_run: bool,
    /// The changes: applied, or with `dry_run` those that would be.
    pub changes: Vec<Change>,
    /// Warnings about the configuration.
    pub warnings: Vec<String>,
}

/// One of the answers to `POST /v1/console`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConsoleAnswer {
    /// Line number of the command, from 1.
    pub line: usize,
    /// False if the answer is `ERROR …`.
    pub good: bool,
    /// The answer as the console sends it.
    pub lines: Vec<String>,
}

/// The answer to a refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Refusal {
    /// One line per error.
    pub errors: Vec<String>,
}
