//! Polls the engine for state changes, moved MAC addresses and numbers of threads, which do not pass through the engine.
//!
//! A change that is undone between two polls is not reported.

use std::collections::HashMap;

use super::desired::Target;
use super::engine::Engine;
use super::events::Event;
use vnet::route::Moved;

/// State, reason and path of an interface or link.
type Sight = (String, Option<String>, Option<String>);

/// Polls for changes of state, moved MAC addresses, and recruited or released threads.
#[derive(Default)]
pub struct Watch {
    states: HashMap<Target, Sight>,
    moves: u64,
    threads: usize,
    /// False until the first poll.
    begun: bool,
}

impl Watch {
    /// Events since the previous poll; none at the first one.
    pub fn poll(&mut self, engine: &Engine) -> Vec<Event> {
        let mut events = vec![];
        let mut states = HashMap::new();
        for (target, now) in engine.states() {
            if self.begun && self.states.get(&target) != Some(&now) {
                let (object, name) = match &target {
                    Target::Interface(name) => ("interface", name.clone()),
                    Target::Link(name) => ("link", name.clone()),
                };
                let (state, reason, path) = now.clone();
                events.push(Event::State { object: object.into(), name, state, reason, path });
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
        let before = std::mem::replace(&mut self.threads, engine.threads().now);
        let now = self.threads;
        events.extend((self.begun && before != now).then_some(Event::Threads { before, now }));
        (self.moves, self.begun) = (next, true);
        events
    }
}

impl Engine {
    fn states(&self) -> impl Iterator<Item = (Target, Sight)> {
        let interfaces = self.interfaces().into_iter();
        let interfaces = interfaces.map(|i| (Target::Interface(i.name), (i.state, i.reason, Some(i.path))));
        let links = self.links().into_iter();
        let links = links.map(|link| {
            // Hosts without the kernel path keep the events of earlier versions.
            let path = (link.path == "kernel" || link.path_reason.is_some()).then_some(link.path);
            (Target::Link(link.name), (link.state, link.reason, path))
        });
        interfaces.chain(links)
    }

    /// Moves of learned addresses from number `since` on, unless already overwritten, and the number of the next move.
    fn moves(&self, since: u64) -> (Vec<Event>, u64) {
        let (moves, next) = self.core.learned().moves_since(since);
        let targets = self.targets();
        let target = |port| targets.get(&port).map_or("removed".into(), ToString::to_string);
        let event = |Moved { network, mac, from, to, frozen }: Moved| Event::Moved {
            network,
            mac,
            from: target(from),
            to: target(to),
            frozen,
        };
        (moves.into_iter().map(event).collect(), next)
    }
}
