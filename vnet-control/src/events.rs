//! Events: configuration changes with their requester, state changes of interfaces and links, moved MAC addresses, recruited and
//! released threads.
//!
//! The engine reports configuration changes itself, through a [`Witness`]; a [`super::watch::Watch`] polls for states and moves.
//! The sink that receives events must not block; it decides how many events it buffers.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::api;
use super::plan::Plan;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// Maximum number of changes that an event or the log lists.
pub const CHANGES_MAX: usize = 256;

/// The requester of a change, for the log and events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asker {
    /// A part of vnetd itself, such as "the configuration file".
    Part(&'static str),
    /// SIGHUP.
    Hangup,
    /// A process of this host, over the control socket.
    Unix {
        /// User id of the process.
        uid: u32,
        /// Process id at the time of the connection, if the kernel knows it.
        pid: Option<i32>,
    },
    /// A client of the API over TCP, authenticated by the token.
    Http(SocketAddr),
    /// A client of the console over TCP.
    Console(SocketAddr),
}

impl fmt::Display for Asker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asker::Part(name) => f.write_str(name),
            Asker::Hangup => f.write_str("SIGHUP"),
            Asker::Unix { uid, pid: Some(pid) } => write!(f, "uid {uid} pid {pid}"),
            Asker::Unix { uid, pid: None } => write!(f, "uid {uid}"),
            Asker::Http(peer) => write!(f, "HTTP client {peer}"),
            Asker::Console(peer) => write!(f, "console client {peer}"),
        }
    }
}

/// An event of `GET /v1/events`; the field `event` is its kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The configuration changed.
    Configuration {
        /// The requester.
        who: String,
        /// The changes, at most 256.
        changes: Vec<api::Change>,
        /// The number of changes.
        changes_total: usize,
    },
    /// An interface or link changed its state or was added.
    State {
        /// `interface` or `link`.
        object: String,
        /// Name of the interface or link.
        name: String,
        /// The new state, as in the lists of interfaces and links.
        state: String,
        /// Why the interface or link is not up.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// The path of the interface or link, as in their lists: `kernel` or `vnetd`; absent for a link if no interface has the path
        /// `kernel`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
    /// A learned MAC address moved to another port.
    Moved {
        /// Network of the address.
        network: NetworkId,
        /// The MAC address.
        mac: Mac,
        /// Old port: `interface NAME` or `link NAME`.
        from: String,
        /// New port.
        to: String,
        /// True if the address moved too often and is frozen at the new port for a while (RFC 7432, section 15.1).
        frozen: bool,
    },
    /// Threads of dispatchers were recruited or released.
    Threads {
        /// Number of threads before.
        before: usize,
        /// Number of threads now.
        now: usize,
    },
    /// The subscriber was too slow and missed events.
    Lagged {
        /// Number of missed events.
        missed: u64,
    },
}

impl Event {
    /// The event's kind, as in the field `event`.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::Configuration { .. } => "configuration",
            Event::State { .. } => "state",
            Event::Moved { .. } => "moved",
            Event::Threads { .. } => "threads",
            Event::Lagged { .. } => "lagged",
        }
    }
}

/// Receives events from the engine; must not block.
pub type Sink = Box<dyn Fn(Event) + Send>;

/// Logs configuration changes with their requester and passes them to the sink.
pub(super) struct Witness {
    pub asker: Asker,
    pub sink: Option<Sink>,
}

impl Default for Witness {
    fn default() -> Witness {
        Witness { asker: Asker::Part("vnetd itself"), sink: None }
    }
}

impl Witness {
    /// Logs a change and passes it to the sink.
    pub fn report(&self, plan: &Plan) {
        let mut changes = plan.changes();
        let (who, changes_total) = (self.asker.to_string(), changes.len());
        changes.truncate(CHANGES_MAX);
        for change in &changes {
            tracing::info!(%who, "{change}");
        }
        if changes_total > changes.len() {
            tracing::info!(%who, "and {} more changes", changes_total - changes.len());
        }
        if let Some(sink) = &self.sink {
            sink(Event::Configuration { who, changes, changes_total });
        }
    }
}
