//! All processes that the daemon serves, and their turns.
//!
//! Containers take turns: the heaviest first, each with as many bytes as its weight and its rate allow. A container's processes take turns
//! within its share. A packet to another process of the room goes straight there, if the two may meet (`links.rs`).

use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::carrier::RelayCounters;
use super::links::Links;
use super::served::{Counts, End, EndpointReport, Served};
use super::translation::Budget;
use crate::meeting::Place;
use crate::proto::ShareSettings;
use crate::proto::share::Share;
use crate::seal::SealCounters;

/// Containers whose counters are kept. Beyond, those without processes are forgotten.
const CONTAINERS_MAX: usize = 256;
/// Maximum number of warnings about a container's processes, so that they cannot fill the log.
const NOTES_MAX: usize = 16;
/// Longest sleep: peers that have gone silent are noticed by timers.
const SLEEP_MAX_NS: u64 = 1_000_000_000;

/// Identity of a container: device and inode of its network namespace.
pub type ContainerId = (u64, u64);

/// A warning for the daemon's log: the container, and why packets of one of its processes were not sent.
pub type Note = (ContainerId, String);

/// Counters of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerCounters {
    /// Which container.
    pub id: ContainerId,
    /// Processes served now.
    pub processes: u64,
    /// Their open endpoints: at most 16 of each process.
    pub endpoints: Vec<EndpointReport>,
    /// Mappings of registered memory.
    pub mappings: u64,
    /// Bytes of registered memory.
    pub mapped_bytes: u64,
    /// Submissions taken.
    pub submissions: u64,
    /// Submissions with an address outside the registered memory, and memory that was not mapped.
    pub refused: u64,
    /// Processes that were cut off because they wrote nonsense.
    pub broken: u64,
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes of packets sent.
    pub bytes_out: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Turns that ended because the rate was used up.
    pub throttled: u64,
    /// Packets sent that went straight to another process of the daemon.
    pub same_host_packets: u64,
    /// Bytes of these packets.
    pub same_host_bytes: u64,
    /// How often the rate limit of an endpoint began to hold packets back.
    pub held_back: u64,
    /// Packets that the helper of a virtual machine relayed.
    pub relay: RelayCounters,
    /// What was sealed and opened, and what was dropped because it could not be.
    pub seal: SealCounters,
}

struct Container {
    share: Share,
    budget: Budget,
    /// Places of its processes in the room.
    served: Vec<usize>,
    /// Process that begins the next turn.
    next: usize,
    counters: ContainerCounters,
    /// Number of warnings so far, also of those that were not kept.
    noted: usize,
}

/// All containers and their processes, and the clock.
pub(super) struct Room {
    containers: Vec<Container>,
    /// `None`: a free place, or a process whose turn it is.
    served: Vec<Option<Box<Served>>>,
    links: Links,
    notes: Vec<Note>,
    start: Instant,
}

impl Room {
    pub(super) fn new() -> Self {
        let (links, start) = (Links::default(), Instant::now());
        Self { containers: vec![], served: vec![], links, notes: vec![], start }
    }

    pub(super) fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64 + 1
    }

    /// Adds a process of a container.
    pub(super) fn add(&mut self, id: ContainerId, settings: ShareSettings, served: Served, budget: Budget) {
        if self.containers.len() >= CONTAINERS_MAX {
            self.containers.retain(|container| !container.served.is_empty());
        }
        let free = self.served.iter().position(Option::is_none).unwrap_or(self.served.len());
        if free == self.served.len() {
            self.served.push(None);
        }
        self.served[free] = Some(Box::new(served));
        self.links.enter(free, id);
        match self.containers.iter_mut().find(|container| container.counters.id == id) {
            Some(container) => {
                // It may have been another interface's at the same port.
                container.share.set(settings);
                container.served.push(free);
            }
            None => self.containers.push(Container::new(id, settings, free, budget)),
        }
        self.sort();
    }

    pub(super) fn set_shares(&mut self, shares: &[(ContainerId, ShareSettings)]) {
        for (id, settings) in shares {
            if let Some(container) = self.containers.iter_mut().find(|known| known.counters.id == *id) {
                container.share.set(*settings);
            }
        }
        self.sort();
    }

    /// Sets which containers' processes may meet. Links between others end.
    pub(super) fn set_places(&mut self, places: Vec<Place>) {
        self.links.set_places(places, &mut self.served);
    }

    /// The heaviest containers are served first.
    fn sort(&mut self) {
        self.containers.sort_by_key(|container| std::cmp::Reverse(container.share.weight()));
    }

    /// One turn of all containers. Returns whether there was anything to do, and the container of each process that has gone.
    pub(super) fn turn(&mut self, now: u64) -> (bool, Vec<ContainerId>) {
        let (mut worked, mut ended) = (false, vec![]);
        for at in 0..self.containers.len() {
            let (some, gone) = self.turn_of(now, at);
            worked |= some;
            ended.resize(ended.len() + gone, self.containers[at].counters.id);
        }
        (worked, ended)
    }

    /// A turn of one container. Returns whether there was anything to do, and how many of its processes have gone.
    fn turn_of(&mut self, now: u64, at: usize) -> (bool, usize) {
        let (mut worked, mut ended) = (false, vec![]);
        let container = &mut self.containers[at];
        container.share.begin();
        let count = container.served.len();
        container.next = (container.next + 1) % count.max(1);
        let first = container.next;
        for place in (0..count).map(|step| (first + step) % count) {
            match self.serve(now, at, place) {
                Ok(some) => worked |= some,
                Err(end) => ended.push((place, end)),
            }
        }
        let container = &mut self.containers[at];
        container.counters.throttled += u64::from(container.share.wakes_at(now).is_some());
        ended.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (place, end) in &ended {
            let slot = self.containers[at].served.swap_remove(*place);
            self.revoke(now, at, slot, *end);
        }
        (worked, ended.len())
    }

    /// A turn of one process.
    fn serve(&mut self, now: u64, at: usize, place: usize) -> Result<bool, End> {
        let Self { containers, served, links, notes, .. } = self;
        let Container { share, budget, served: own, counters, noted, .. } = &mut containers[at];
        let slot = own[place];
        let Some(mut process) = served[slot].take() else { return Ok(false) };
        let worked = process.turn(now, share, budget, &mut |packet| links.deliver(now, slot, packet, served));
        while let Some(line) = process.next_note() {
            *noted += 1;
            if *noted <= NOTES_MAX {
                notes.push((counters.id, line));
            }
        }
        served[slot] = Some(process);
        links.tend(slot, served);
        worked
    }

    /// Frees what a process had that has gone: its engine, its links, its socket, and the mappings of its memory.
    fn revoke(&mut self, now: u64, at: usize, slot: usize, end: End) {
        // First, so that no packet of another process reaches it any more.
        self.links.leave(slot, &mut self.served);
        let Some(mut process) = self.served[slot].take() else { return };
        process.say_goodbye(now);
        let container = &mut self.containers[at];
        container.counters.broken += u64::from(end == End::Broken);
        container.budget.give_back(process.memory().bytes());
        container.counters.add(process.counts());
        // Unmapping much memory takes long: nobody waits for it. Without a thread it happens here.
        let _ = std::thread::Builder::new().name("vnet-rdma-unmap".into()).spawn(move || drop(process));
    }

    /// Tells the peers of all processes that they are gone.
    pub(super) fn say_goodbye(&mut self) {
        let now = self.now();
        self.served.iter_mut().flatten().for_each(|process| process.say_goodbye(now));
    }

    /// Warnings since the last call.
    pub(super) fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// Counters of all containers, of past and present processes.
    pub(super) fn report(&self) -> Vec<ContainerCounters> {
        let of = |container: &Container| {
            let mut all = container.counters.clone();
            all.processes = container.served.len() as u64;
            for process in container.served.iter().filter_map(|slot| self.served[*slot].as_ref()) {
                all.add(process.counts());
                all.endpoints.extend(process.endpoints());
                all.mappings += process.memory().mappings() as u64;
                all.mapped_bytes += process.memory().bytes();
            }
            all
        };
        self.containers.iter().map(of).collect()
    }

    /// Sleeps until a packet, a bell, a timer, or somebody wakes the thread.
    pub(super) fn sleep(&mut self, wake: &OwnedFd) {
        let now = self.now();
        let Some(until) = self.arm(now) else { return };
        let served = self.served.iter().flatten();
        let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
        polled.extend(
            served
                .flat_map(|process| process.descriptors())
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
        );
        let left = until.saturating_sub(self.now());
        let time = Timespec { tv_sec: (left / 1_000_000_000) as i64, tv_nsec: (left % 1_000_000_000) as i64 };
        let is_idle = polled.len() == 1;
        let _ = poll(&mut polled, Some(&time).filter(|_| !is_idle));
    }

    /// Prepares all processes for the sleep. Returns its end, or `None` if there is something to do already.
    fn arm(&mut self, now: u64) -> Option<u64> {
        let mut until = now + SLEEP_MAX_NS;
        let Self { containers, served, links, .. } = self;
        let delivered = links.delivered();
        for Container { share, served: own, .. } in containers {
            share.begin();
            for slot in own {
                let Some(mut process) = served[*slot].take() else { continue };
                let armed = process.arm(now, share, &mut |packet| links.deliver(now, *slot, packet, served));
                let wakes_at = process.wakes_at(now, share);
                served[*slot] = Some(process);
                match armed {
                    // The next turn finds out what has ended.
                    Ok(true) | Err(_) => return None,
                    Ok(false) => until = until.min(wakes_at.unwrap_or(until)),
                }
            }
        }
        // The last acknowledgements may be what another process has waited for.
        (links.delivered() == delivered).then_some(until)
    }
}

impl Container {
    fn new(id: ContainerId, settings: ShareSettings, slot: usize, budget: Budget) -> Self {
        let counters = ContainerCounters { id, ..ContainerCounters::default() };
        Self { share: Share::new(settings), budget, served: vec![slot], next: 0, counters, noted: 0 }
    }
}

impl ContainerCounters {
    fn add(&mut self, counts: Counts) {
        self.submissions += counts.submissions;
        self.refused += counts.refused;
        self.bytes_out += counts.bytes_out;
        self.packets_out += counts.packets_out;
        self.packets_in += counts.packets_in;
        self.same_host_packets += counts.same_host_packets;
        self.same_host_bytes += counts.same_host_bytes;
        self.held_back += counts.held_back;
        self.relay += counts.relay;
        self.seal += counts.seal;
    }
}
