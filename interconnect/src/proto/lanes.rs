//! What waits to be sent, in a lane for each endpoint of this engine, so that an endpoint which is held back holds up no other one.
//!
//! Lanes take turns. A lane keeps its turn until the caller passes it on, also when other lanes are added. At most one lane is empty,
//! and only if it is the only one: so lanes cost nothing while one endpoint sends.

use std::collections::VecDeque;

#[derive(Default)]
pub(super) struct Lanes {
    /// Endpoint, and what waits there, in order.
    lanes: Vec<(u16, VecDeque<u32>)>,
    /// Index of the lane whose turn it is; 0 while there are none.
    turn: usize,
}

impl Lanes {
    pub(super) fn push(&mut self, endpoint: u16, id: u32) {
        if let Some((_, lane)) = self.lanes.iter_mut().find(|(own, _)| *own == endpoint) {
            return lane.push_back(id);
        }
        match self.lanes.first_mut() {
            Some((own, lane)) if lane.is_empty() => {
                *own = endpoint;
                lane.push_back(id);
            }
            _ => self.lanes.push((endpoint, VecDeque::from([id]))),
        }
    }

    /// Like `push`, in front of all else of this endpoint.
    pub(super) fn push_front(&mut self, endpoint: u16, id: u32) {
        match self.lanes.iter_mut().find(|(own, _)| *own == endpoint) {
            Some((_, lane)) => lane.push_front(id),
            None => self.push(endpoint, id),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lanes.first().is_none_or(|(_, lane)| lane.is_empty())
    }

    pub(super) fn len(&self) -> usize {
        self.lanes.len()
    }

    /// All that waits, in the order of each lane.
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.lanes.iter().flat_map(|(_, lane)| lane.iter().copied())
    }

    /// First of the lane whose turn it is, and its endpoint.
    pub(super) fn front(&self) -> Option<(u16, u32)> {
        let (endpoint, lane) = self.lanes.get(self.turn)?;
        Some((*endpoint, *lane.front()?))
    }

    /// Removes the first of the lane whose turn it is. An empty lane leaves its turn to the next one.
    pub(super) fn pop(&mut self) {
        let Some((_, lane)) = self.lanes.get_mut(self.turn) else { return };
        lane.pop_front();
        if lane.is_empty() && self.lanes.len() > 1 {
            self.lanes.remove(self.turn);
            self.turn %= self.lanes.len();
        }
    }

    /// Passes the turn to the next lane.
    pub(super) fn pass(&mut self) {
        self.turn = (self.turn + 1) % self.lanes.len().max(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_keep_their_order_and_their_turn() {
        let mut lanes = Lanes::default();
        assert!(lanes.is_empty() && lanes.front().is_none());
        lanes.pop();
        lanes.pass();
        for (endpoint, id) in [(7, 1), (7, 2), (8, 3), (9, 4), (8, 5)] {
            lanes.push(endpoint, id);
        }
        assert_eq!(lanes.iter().collect::<Vec<_>>(), [1, 2, 3, 5, 4]);
        assert_eq!(lanes.front(), Some((7, 1)));
        lanes.pass();
        lanes.push(6, 6);
        assert_eq!(lanes.front(), Some((8, 3)), "a new lane takes nobody's turn");
        lanes.pop();
        assert_eq!(lanes.front(), Some((8, 5)));
        lanes.pop();
        assert_eq!((lanes.front(), lanes.len()), (Some((9, 4)), 3));
        lanes.pop();
        lanes.pop();
        assert_eq!(lanes.front(), Some((7, 1)), "after the last lane the first one");
        lanes.pop();
        lanes.pop();
        assert!(lanes.is_empty() && lanes.len() == 1);
        lanes.push(5, 9);
        assert_eq!((lanes.front(), lanes.len()), (Some((5, 9)), 1), "the empty lane is used again");
        lanes.push_front(5, 10);
        lanes.push_front(4, 11);
        assert_eq!(lanes.iter().collect::<Vec<_>>(), [10, 9, 11]);
    }
}
