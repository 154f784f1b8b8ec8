//! What the HTTP/JSON API says, shared by the daemon that says it and the commands that read it.
//!
//! Requests use the keys of the configuration file; these are the answers. A reader ignores fields that it does not know,
//! so that fields can be added.

mod stats;

pub use stats::*;

use std::fmt;

use serde::{Deserialize, Serialize};

use super::settings::values::{InterfaceSettings, LinkSettings, NetworkSettings, RouteSettings};
use super::traffic::Traffic;
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
    /// Seconds since it was ready.
    pub uptime_s: u64,
    /// Where links arrive (UDP).
    pub bridge: String,
    /// Ports that they arrive at, from that of `bridge` on.
    #[serde(default = "one")]
    pub ports: u16,
    /// Number of dispatchers.
    pub dispatchers: usize,
    /// What they do when there is nothing to do.
    #[serde(rename = "yield")]
    pub yield_strategy: String,
    /// Interfaces.
    pub interfaces: usize,
    /// Interfaces through which frames flow at the moment.
    pub interfaces_up: usize,
    /// Links.
    pub links: usize,
    /// Rules.
    pub routes: usize,
    /// Networks.
    pub networks: usize,
    /// Learned addresses.
    pub learned: usize,
    /// The distributed overlay, where the host takes part in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overlay: Option<OverlaySummary>,
    /// Where the frames went.
    pub balance: Balance,
}

/// The distributed overlay at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverlaySummary {
    /// The store: `starting` (never reached), `connected` or `away`.
    pub state: String,
    /// For how many seconds.
    pub since_s: u64,
    /// Other hosts.
    pub hosts: usize,
    /// Stations that are known, this host's included.
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
    /// For how many seconds.
    pub since_s: u64,
    /// Members of the etcd cluster.
    pub etcd: Vec<String>,
    /// The store's revision that was seen last.
    pub revision: i64,
    /// `mesh`, `hub NAME` or `explicit`.
    pub topology: String,
    /// Where other hosts reach this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Stations of this host that the store has.
    pub published: usize,
    /// Stations that are known, this host's included.
    pub stations: usize,
    /// Hosts and stations that moved too often and stay where they are for a while.
    pub frozen: usize,
    /// Other hosts.
    pub hosts: Vec<OverlayHost>,
    /// Alarms raised so far.
    pub alarms_total: u64,
    /// The last of each kind.
    pub alarms: Vec<Alarm>,
}

/// Another host of the overlay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OverlayHost {
    /// Its name, and that of the link to it.
    pub name: String,
    /// Where its links arrive.
    pub address: String,
    /// The networks it takes part in.
    pub networks: Vec<NetworkId>,
    /// Whether only reflectors reach it.
    pub behind_nat: bool,
    /// For how many seconds the store has not had it, although nobody withdrew it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent_s: Option<u64>,
}

/// Alarms of one kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Alarm {
    /// Its stable name.
    pub name: String,
    /// How often it was raised.
    pub count: u64,
    /// What was wrong, the last time.
    pub text: String,
    /// Seconds since then.
    pub age_s: u64,
}

/// One of `GET /v1/interfaces`; the answer to `POST /v1/interfaces`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// `up`, `down` or `broken`.
    pub state: String,
    /// Why it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Who drives it, and how its guest is notified.
    #[serde(flatten)]
    pub driving: Driving,
    /// Its settings; `mtu` as it is.
    #[serde(flatten)]
    pub settings: InterfaceSettings,
}

/// Who drives an interface and how its guest is notified: part of [`Interface`].
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Driving {
    /// `guest`, `vmm`, or `both` when its queues differ.
    pub driven_by: String,
    /// Frames a second from the guest, over the last window.
    pub rate: u64,
    /// Changes between guest-driven and VMM-driven so far.
    pub switches: u64,
    /// Notifications given for a thousand frames delivered.
    pub notifications_per_1000_frames: u64,
    /// What optimistic interrupts did.
    #[serde(flatten)]
    pub interrupt_counters: InterruptCounters,
}

/// One of `GET /v1/links`; the answer to `POST /v1/links`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Link {
    /// Its name.
    pub name: String,
    /// `up`; `degraded`: it works, but badly or not for long; `down`: the kernel has no route to the other host, this has gone
    /// silent, or, of a sealed link, there are no keys.
    pub state: String,
    /// Why it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds since anything came by it; absent when nothing ever did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heard_s: Option<u64>,
    /// Seconds since the present keys were agreed on (sealed); absent without keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys_s: Option<u64>,
    /// Round trip in microseconds, by keepalives (sealed) or probes (native).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u32>,
    /// Of the last 50 probes, five a second, thousandths that were lost, they or their answers (native); absent when the other host
    /// never answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_permille: Option<u32>,
    /// What passes it, and what was lost.
    #[serde(default)]
    pub traffic: Traffic,
    /// Its settings. As they are at the moment: `remote`, where the other host is (`anywhere` while that is not known); `mtu`,
    /// the largest IP packet that is sent; `sealed` and `peer`; `offload`.
    #[serde(flatten)]
    pub settings: LinkSettings,
}

/// One of `GET /v1/routes`; the answer to `POST /v1/routes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Route {
    /// Counted from 1, never used again.
    pub index: u32,
    /// Its settings.
    #[serde(flatten)]
    pub settings: RouteSettings,
}

/// One of `GET /v1/networks`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Network {
    /// Interfaces in it.
    pub interfaces: usize,
    /// Its settings.
    #[serde(flatten)]
    pub settings: NetworkSettings,
}

/// One of `GET /v1/learned`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Learned {
    /// Network.
    pub network: NetworkId,
    /// Address.
    pub mac: Mac,
    /// Where it is: `interface NAME` or `link NAME`.
    pub at: String,
    /// `learned`, `frozen` (learned, but it moved too often) or `configured`.
    pub held: String,
    /// Seconds since it was last seen; 0 for configured ones.
    pub age_s: u32,
}

/// `GET /v1/trace?src=MAC&dst=MAC`, optionally `&network=ID&from=PLACE`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Trace {
    /// Network.
    pub network: NetworkId,
    /// Source address.
    pub src: Mac,
    /// Destination address.
    pub dst: Mac,
    /// Where the frame would come from: `interface NAME` or `link NAME`.
    pub from: String,
    /// What decides: `guard`, `rules`, `configured`, `learned`, `flood` or `nothing`.
    pub by: String,
    /// The same for people.
    pub why: String,
    /// What the guard says: `admitted`, or the reason under which the frame would be dropped as it enters.
    #[serde(default)]
    pub guard: String,
    /// Indices of the rules that decide.
    pub rules: Vec<u32>,
    /// Their priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// Dispatchers whose cache holds a line for this flow, and so decides without asking further.
    #[serde(default)]
    pub cached_by: Vec<usize>,
    /// Where it would go.
    pub to: Vec<String>,
    /// The same with what is known of each destination, a copy each.
    #[serde(default)]
    pub copies: Vec<TracedCopy>,
    /// Why it would be dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<String>,
}

/// A copy of a traced frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TracedCopy {
    /// Where it would go: `interface NAME` or `link NAME`.
    pub to: String,
    /// What that is at the moment: `up`, or else.
    pub state: String,
    /// MTU of the interface, or of the link's path, in bytes.
    pub mtu: u32,
    /// The link's remote address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// What the host at the other end of the link says would become of the copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(no_recursion))]
    pub next: Option<Box<Hop>>,
    /// Why the other host said nothing, where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
}

/// What one host on the way says: the part of a [`Trace`] that other hosts may know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Hop {
    /// Its name.
    pub host: String,
    /// Where the frame would come from there.
    pub from: String,
    /// What decides there, for people.
    pub why: String,
    /// Where it would go there, a copy each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<HopCopy>,
    /// Why it would be dropped there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drop: Option<String>,
    /// Copies that there was no room to tell of.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub more: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A copy on another host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HopCopy {
    /// Where it would go.
    pub to: String,
    /// What that is, when it is not up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// What the host after that says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(no_recursion))]
    pub next: Option<Box<Hop>>,
    /// Why the host after that said nothing, where it was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silent: Option<String>,
}

/// What happens to an object; in the order in which a plan tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It goes.
    Remove,
    /// It becomes another.
    Change,
    /// It comes.
    Add,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Change {
    /// What happens.
    pub action: Action,
    /// `host`, `network`, `interface`, `link` or `route`.
    pub object: String,
    /// Its name; empty for a route.
    pub name: String,
    /// What it is; for a change: what it was -> what it becomes.
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
    /// True when it was only asked what would be done.
    pub dry_run: bool,
    /// What was (or would be) done.
    pub changes: Vec<Change>,
    /// What the writer of the configuration should know.
    pub warnings: Vec<String>,
}

/// One of the answers to `POST /v1/console`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ConsoleAnswer {
    /// Line that is answered, counted from 1.
    pub line: usize,
    /// False when the answer is `ERROR …`.
    pub good: bool,
    /// The answer as the console would send it.
    pub lines: Vec<String>,
}

/// The answer when something is refused or fails.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Refusal {
    /// One line each.
    pub errors: Vec<String>,
}
