//! What a process knows of its operations: the queues, completions and answers from the daemon, and who waits for them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use super::entry::{Answer, Event, ended};
use super::posting::Posting;
use super::queue::Queues;
use crate::node::notice::Notices;
use crate::node::pages::Pages;
use crate::proto::{Completion, Peer, Status};

/// Maximum number of completions of an endpoint that the application has not taken. Further events stay in the queue.
const COMPLETIONS_MAX: usize = 32_768;

pub(super) struct Inner {
    pub(super) queues: Queues,
    pub(super) posting: Posting,
    /// Completions by open endpoint.
    pub(super) completions: HashMap<u16, VecDeque<Completion>>,
    pub(super) answers: HashMap<u64, Answer>,
    pub(super) next_ticket: u64,
    pub(super) routes: HashSet<SocketAddr>,
    pub(super) notices: Notices,
    /// The daemon has been asked to ring.
    pub(super) is_armed: bool,
    pub(super) is_lost: bool,
    /// Number of times that events were looked for.
    pub(super) looks: u32,
    /// Memory that the daemon may use until the node is closed.
    pub(super) kept: Vec<Arc<Pages>>,
}

impl Inner {
    pub(super) fn new(queues: Queues, arena_bytes: u64) -> Self {
        Self {
            queues,
            posting: Posting::new(arena_bytes),
            completions: HashMap::new(),
            answers: HashMap::new(),
            next_ticket: 1,
            routes: HashSet::new(),
            notices: Notices::default(),
            is_armed: false,
            is_lost: false,
            looks: 0,
            kept: vec![],
        }
    }

    pub(super) fn waiting(&self, endpoint: u16) -> usize {
        self.completions.get(&endpoint).map_or(0, VecDeque::len)
    }

    pub(super) fn report(&mut self, endpoint: u16, completion: Completion) {
        if let Some(queue) = self.completions.get_mut(&endpoint) {
            queue.push_back(completion);
        }
    }

    /// Handles all events that are there.
    pub(super) fn take_events(&mut self) -> Result<(), crate::ring::Broken> {
        while self.completions.values().all(|queue| queue.len() < COMPLETIONS_MAX) {
            let Some(entry) = self.queues.reader.next()? else { break };
            match Event::decode(&entry).ok_or(crate::ring::Broken)? {
                Event::Completed(endpoint, completion) => {
                    if let Some(completion) = self.posting.finish(completion) {
                        self.report(endpoint, completion);
                    }
                }
                Event::Answered(ticket, answer) => _ = self.answers.insert(ticket, answer),
            }
        }
        Ok(())
    }

    /// The daemon is gone: everything under way ends.
    pub(super) fn lose(&mut self) {
        self.is_lost = true;
        let peer = Peer { address: ([0, 0, 0, 0], 0).into(), endpoint: 0 };
        for (endpoint, context, kind) in self.posting.abandon() {
            let completion = ended(kind, Status::Unreachable, context, peer);
            self.report(endpoint, completion);
        }
    }

    /// Wakes threads that wait for completions which are queued now. `own`: the endpoint whose completions the caller takes.
    pub(super) fn signal(&mut self, own: Option<u16>) {
        let queue = |endpoint| self.completions.get(&endpoint);
        self.notices.signal(own, |endpoint| queue(endpoint).is_some_and(|queue| !queue.is_empty()));
    }
}
