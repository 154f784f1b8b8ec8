//! Which pull asks next for bytes, and for how many.
//!
//! One budget bounds the bytes that were requested from all peers together and have not arrived. It is the capacity of the
//! socket's receive buffer. Each *sender*, an endpoint of a peer, has an equal part of it for its pulls: so one that sends slowly, because its
//! share or rate is small, does not end up with the whole budget, and how fast each one sends is decided where it sends. Senders
//! take turns; the pulls of a sender ask one after the other.

use std::collections::{HashMap, VecDeque};

use super::slab::Slab;

/// Maximum number of bytes that one packet requests: large enough to keep the cost per request low, small enough that peers
/// share the budget. With many senders requests are smaller, so that each one has two.
const CHUNK: u64 = 256 << 10;
const CHUNK_MIN: u64 = 32 << 10;
/// Maximum number of senders: more than there can be pulls.
const GROUPS_MAX: usize = 1 << 16;

/// A channel, and the endpoint of its peer that sends.
pub(super) type Sender = (u32, u16);

struct Group {
    sender: Sender,
    /// Pulls in progress.
    pulls: u32,
    /// Those with bytes that have not been requested. Pulls that have ended may be among them.
    waiting: VecDeque<u32>,
    /// Bytes that were requested and have not arrived.
    outstanding: u64,
    /// The sender is in `turn`.
    has_turn: bool,
}

pub(super) struct Asking {
    budget_max: i64,
    /// Bytes that may still be requested; negative after a request that was larger than the whole budget.
    budget: i64,
    /// Senders with pulls. There are at most as many as pulls, and those that have not left their turn yet.
    groups: Slab<Group>,
    numbers: HashMap<Sender, u32>,
    /// Senders with pulls that wait, each once.
    turn: VecDeque<u32>,
    /// Something has changed since the last pull had to wait.
    is_due: bool,
}

impl Asking {
    pub(super) fn new(budget: usize) -> Self {
        let budget = budget as i64;
        let (groups, numbers) = (Slab::new(GROUPS_MAX), HashMap::new());
        Self { budget_max: budget, budget, groups, numbers, turn: VecDeque::new(), is_due: false }
    }

    /// A pull begins. Returns the number of its sender's group; `None`: there are too many.
    pub(super) fn join(&mut self, sender: Sender, id: u32) -> Option<u32> {
        if self.groups.is_full() {
            self.tidy();
        }
        let number = match self.numbers.get(&sender) {
            Some(number) => *number,
            None => {
                let waiting = VecDeque::new();
                let group = Group { sender, pulls: 0, waiting, outstanding: 0, has_turn: false };
                let number = self.groups.insert(group)?;
                self.numbers.insert(sender, number);
                number
            }
        };
        let group = self.groups.get_mut(number)?;
        group.pulls += 1;
        group.waiting.push_back(id);
        if !std::mem::replace(&mut group.has_turn, true) {
            self.turn.push_back(number);
        }
        self.is_due = true;
        Some(number)
    }

    /// Requested bytes have arrived, or will not.
    pub(super) fn arrived(&mut self, group: u32, bytes: u64) {
        self.budget += bytes as i64;
        if let Some(group) = self.groups.get_mut(group) {
            group.outstanding -= bytes;
        }
        self.is_due = true;
    }

    /// A pull has ended.
    pub(super) fn leave(&mut self, number: u32) {
        let Some(group) = self.groups.get_mut(number) else { return };
        group.pulls -= 1;
        if group.pulls == 0 && !group.has_turn {
            self.remove(number);
        }
    }

    fn remove(&mut self, number: u32) {
        if let Some(group) = self.groups.remove(number) {
            self.numbers.remove(&group.sender);
        }
    }

    /// Removes the senders without pulls.
    fn tidy(&mut self) {
        for number in self.groups.numbers(|group| group.pulls == 0) {
            self.remove(number);
        }
        let groups = &self.groups;
        self.turn.retain(|number| groups.get(*number).is_some());
    }

    /// A pull that waits may be able to ask now.
    pub(super) fn set_due(&mut self) {
        self.is_due = true;
    }

    /// Whether to look for pulls that can ask.
    pub(super) fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.is_due)
    }

    /// Number of senders with pulls that wait.
    pub(super) fn waiting(&self) -> usize {
        self.turn.len()
    }

    /// The sender whose turn it is, and its first pull.
    pub(super) fn front(&self) -> Option<(u32, Option<u32>)> {
        let number = *self.turn.front()?;
        Some((number, self.groups.get(number).and_then(|group| group.waiting.front().copied())))
    }

    /// Bytes to request now, of `left`; 0: the budget is used up. `None`: the sender's part of it is.
    pub(super) fn chunk(&self, group: u32, left: u64) -> Option<u64> {
        let part = self.budget_max as u64 / self.groups.len().max(1) as u64;
        let most = (part / 2).clamp(CHUNK_MIN, CHUNK);
        let chunk = most.min(left);
        let outstanding = self.groups.get(group).map_or(0, |group| group.outstanding);
        if outstanding > 0 && outstanding + chunk > part.max(most) {
            return None;
        }
        let is_used_up = self.budget <= 0 || chunk as i64 > self.budget && self.budget < self.budget_max;
        Some(if is_used_up { 0 } else { chunk })
    }

    /// The first pull of the sender whose turn it is asks for these bytes, and stays the first one if it `has_more`.
    pub(super) fn take(&mut self, bytes: u64, has_more: bool) {
        self.budget -= bytes as i64;
        if let Some(group) = self.turn.front().and_then(|number| self.groups.get_mut(*number)) {
            group.outstanding += bytes;
            if !has_more {
                group.waiting.pop_front();
            }
        }
        self.pass();
    }

    /// The first pull of the sender whose turn it is has ended.
    pub(super) fn skip(&mut self) {
        if let Some(group) = self.turn.front().and_then(|number| self.groups.get_mut(*number)) {
            group.waiting.pop_front();
        }
    }

    /// Passes the turn to the next sender. One without pulls that wait leaves.
    pub(super) fn pass(&mut self) {
        let Some(number) = self.turn.pop_front() else { return };
        let Some(group) = self.groups.get_mut(number) else { return };
        group.has_turn = !group.waiting.is_empty();
        if group.has_turn {
            self.turn.push_back(number);
        } else if group.pulls == 0 {
            self.remove(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What each sender has asked for when nobody can ask for more; each has one pull of this many bytes.
    fn asked(asking: &mut Asking, senders: u32, bytes: u64) -> Vec<u64> {
        let mut asked = vec![0; senders as usize];
        for sender in 0..senders {
            asking.join((7, sender as u16), sender).unwrap();
        }
        let mut tries = senders;
        while tries > 0 {
            let Some((group, Some(pull))) = asking.front() else { break };
            match asking.chunk(group, bytes - asked[pull as usize]) {
                Some(0) => break,
                None => {
                    asking.pass();
                    tries -= 1;
                }
                Some(chunk) => {
                    asked[pull as usize] += chunk;
                    asking.take(chunk, asked[pull as usize] < bytes);
                    tries = senders;
                }
            }
        }
        asked
    }

    #[test]
    fn every_sender_has_an_equal_part_of_the_budget() {
        const BUDGET: u64 = 1 << 20;
        for senders in [1, 2, 3, 4, 8, 16] {
            let asked = asked(&mut Asking::new(BUDGET as usize), senders, 1 << 30);
            let part = BUDGET / u64::from(senders);
            assert!(asked.iter().all(|bytes| *bytes > part / 2 && *bytes <= part), "{asked:?}");
        }
        let asked = asked(&mut Asking::new(BUDGET as usize), 1000, 1 << 30);
        assert_eq!(asked.iter().sum::<u64>(), BUDGET, "no more senders than the budget is for");
    }

    #[test]
    fn a_sender_that_has_ended_leaves_its_part_to_the_others() {
        let mut asking = Asking::new(1 << 20);
        let slow = asking.join((7, 1), 1).unwrap();
        let fast = asking.join((7, 2), 2).unwrap();
        assert_eq!(asking.front(), Some((slow, Some(1))));
        asking.take(100, false);
        assert_eq!((asking.front(), asking.waiting()), (Some((fast, Some(2))), 1));
        asking.arrived(slow, 60);
        // The pull fails: its other bytes will not arrive.
        asking.arrived(slow, 40);
        asking.leave(slow);
        for _ in 0..4 {
            assert_eq!(asking.chunk(fast, 1 << 30), Some(CHUNK));
            asking.take(CHUNK, true);
        }
        assert_eq!(asking.chunk(fast, 1 << 30), None);
        asking.skip();
        asking.leave(fast);
        asking.pass();
        assert_eq!((asking.groups.len(), asking.waiting(), asking.front()), (0, 0, None));
    }

    #[test]
    fn senders_that_have_ended_take_no_room() {
        let mut asking = Asking::new(1 << 20);
        for sender in 0..3 * GROUPS_MAX as u32 {
            let group = asking.join((sender, 0), 1).unwrap();
            asking.leave(group);
        }
        assert!(asking.groups.len() <= GROUPS_MAX && asking.turn.len() <= GROUPS_MAX);
    }
}
