//! What happens, told as it happens: who changed the configuration, what came up or went down, which address moved.
//!
//! The engine tells a configuration's change itself, with who asked for it. States and moves happen elsewhere and are noticed
//! by a [`Watch`], which looks at them now and then; what comes and goes between two looks is not told. The engine gives events to
//! a sink and does not wait for anybody: what is done with them, and how many are kept, is the sink's business.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::api;
use super::desired::Target;
use super::engine::Engine;
use super::plan::Plan;
use vnet::frame::NetworkId;
use vnet::route::Moved;
use vnet::wire::ethernet::Mac;

/// Most changes that an event or the log tells one by one.
pub const CHANGES_MAX: usize = 256;

/// Who asked for a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asker {
    /// A part of vnetd itself, by its name: "the configuration file".
    Part(&'static str),
    /// Whoever sent SIGHUP.
    Hangup,
    /// A process of this host, by the control socket.
    Unix {
        /// Its user.
        uid: u32,
        /// Its process id when it connected, where the kernel knows it.
        pid: Option<i32>,
    },
    /// A client of the API by TCP, who has shown the token.
    Http(SocketAddr),
    /// A client of the console by TCP.
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

/// Something that happened; `GET /v1/events` tells them, each with its `event` as the kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The configuration changed.
    Configuration {
        /// Who asked for it.
        who: String,
        /// What was done, the first 256 steps of it.
        changes: Vec<api::Change>,
        /// How many steps it took.
        changes_total: usize,
    },
    /// An interface or a link is in another state, or is new.
    State {
        /// `interface` or `link`.
        object: String,
        /// Its name.
        name: String,
        /// As the lists of interfaces and links say it.
        state: String,
        /// Why it is not up.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A learned address was heard elsewhere.
    Moved {
        /// Its network.
        network: NetworkId,
        /// The address.
        mac: Mac,
        /// Where it was: `interface NAME` or `link NAME`.
        from: String,
        /// Where it is.
        to: String,
        /// It moved too often and stays there for a while (RFC 7432, section 15.1).
        frozen: bool,
    },
    /// Events that the reader was too slow for are gone.
    Lagged {
        /// How many.
        missed: u64,
    },
}

impl Event {
    /// The kind, as in the field `event`.
    pub fn kind(&self) -> &'static str {
        match self {
            Event::Configuration { .. } => "configuration",
            Event::State { .. } => "state",
            Event::Moved { .. } => "moved",
            Event::Lagged { .. } => "lagged",
        }
    }
}

/// Takes events from the engine; must not wait.
pub type Sink = Box<dyn Fn(Event) + Send>;

/// Whom the engine works for, and who wants to hear of it.
pub(super) struct Witness {
    asker: Asker,
    sink: Option<Sink>,
}

impl Default for Witness {
    fn default() -> Witness {
        Witness { asker: Asker::Part("vnetd itself"), sink: None }
    }
}

impl Witness {
    /// Logs a change that was made and tells it.
    pub fn tell(&self, plan: &Plan) {
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

impl Engine {
    /// Does something that `asker` wants: changes made by it are logged and told with that name.
    pub fn on_behalf<T>(&mut self, asker: Asker, task: impl FnOnce(&mut Engine) -> T) -> T {
        let before = std::mem::replace(&mut self.witness.asker, asker);
        let done = task(self);
        self.witness.asker = before;
        done
    }

    /// Has changes of the configuration told to `sink`.
    pub fn tell(&mut self, sink: Sink) {
        self.witness.sink = Some(sink);
    }
}

/// Indices of links and interfaces: counted from 1, never used again, kept while the name stays.
#[derive(Default)]
pub struct Indices {
    links: Numbers,
    interfaces: Numbers,
}

#[derive(Default)]
struct Numbers {
    by_name: HashMap<String, u32>,
    by_index: BTreeMap<u32, String>,
    used: u32,
}

impl Numbers {
    fn follow<'a>(
        &mut self,
        removed: impl Iterator<Item = &'a String>,
        added: impl Iterator<Item = &'a String>,
    ) {
        for name in removed {
            if let Some(index) = self.by_name.remove(name) {
                self.by_index.remove(&index);
            }
        }
        for name in added {
            self.used += 1;
            self.by_name.insert(name.clone(), self.used);
            self.by_index.insert(self.used, name.clone());
        }
    }

    fn index(&self, name: &str) -> u32 {
        self.by_name.get(name).copied().unwrap_or(0)
    }
}

impl Indices {
    /// Numbers what a plan brings and forgets what it takes.
    pub(super) fn follow(&mut self, plan: &Plan) {
        let (links, interfaces) = (&plan.links, &plan.interfaces);
        self.links.follow(
            links.removed.iter().map(|item| &item.spec.name),
            links.added.iter().map(|item| &item.spec.name),
        );
        self.interfaces.follow(
            interfaces.removed.iter().map(|item| &item.spec.name),
            interfaces.added.iter().map(|item| &item.spec.name),
        );
    }

    /// An interface was lost.
    pub(super) fn forget_interface(&mut self, name: &String) {
        self.interfaces.follow([name].into_iter(), std::iter::empty());
    }

    /// A link's index; 0 when there is none of that name.
    pub fn link(&self, name: &str) -> u32 {
        self.links.index(name)
    }

    /// An interface's index; 0 when there is none of that name.
    pub fn interface(&self, name: &str) -> u32 {
        self.interfaces.index(name)
    }

    /// The name of the link with an index.
    pub fn link_name(&self, index: u32) -> Option<&str> {
        self.links.by_index.get(&index).map(String::as_str)
    }

    /// The name of the interface with an index.
    pub fn interface_name(&self, index: u32) -> Option<&str> {
        self.interfaces.by_index.get(&index).map(String::as_str)
    }

    /// The index that the next link gets.
    pub fn next_link(&self) -> u32 {
        self.links.used + 1
    }

    /// The index that the next interface gets.
    pub fn next_interface(&self) -> u32 {
        self.interfaces.used + 1
    }
}

/// Notices states and moves.
#[derive(Default)]
pub struct Watch {
    states: HashMap<Target, (String, Option<String>)>,
    moves: u64,
    /// False until there is something to compare with.
    begun: bool,
}

impl Watch {
    /// What has happened since the last look; nothing at the first one.
    pub fn look(&mut self, engine: &Engine) -> Vec<Event> {
        let mut events = vec![];
        let mut states = HashMap::new();
        for (target, state, reason) in engine.states() {
            let now = (state, reason);
            if self.begun && self.states.get(&target) != Some(&now) {
                let (object, name) = match &target {
                    Target::Interface(name) => ("interface", name.clone()),
                    Target::Link(name) => ("link", name.clone()),
                };
                let (state, reason) = now.clone();
                events.push(Event::State { object: object.into(), name, state, reason });
            }
            states.insert(target, now);
        }
        self.states = states;
        let (moves, next) = engine.moves(self.moves);
        if self.begun {
            let missed = next - self.moves - moves.len() as u64;
            events.extend((missed > 0).then_some(Event::Lagged { missed }));
            events.extend(moves);
        }
        (self.moves, self.begun) = (next, true);
        events
    }
}

impl Engine {
    /// State and reason of every interface and link.
    fn states(&self) -> impl Iterator<Item = (Target, String, Option<String>)> {
        let interfaces =
            self.interfaces().into_iter().map(|i| (Target::Interface(i.name), i.state, i.reason));
        let links = self.links().into_iter().map(|link| (Target::Link(link.name), link.state, link.reason));
        interfaces.chain(links)
    }

    /// Moves of learned addresses from number `since` on, as far as they are remembered, and the next one's number.
    fn moves(&self, since: u64) -> (Vec<Event>, u64) {
        let (moves, next) = self.core.learned().moves_since(since);
        let places = self.places();
        let place = |port| places.get(&port).map_or("removed".into(), ToString::to_string);
        let event = |Moved { network, mac, from, to, frozen }: Moved| Event::Moved {
            network,
            mac,
            from: place(from),
            to: place(to),
            frozen,
        };
        (moves.into_iter().map(event).collect(), next)
    }
}
