//! Permission for what is never sealed: packets in raw Ethernet frames.
//!
//! Keys belong to pairs of IP addresses, so such packets leave only while no link of this host is sealed. The daemon is asked before the first one,
//! and again while packets leave. Links seal whole frames between hosts, too, but a packet that the engine seals is also hidden from other
//! stations of the overlay; whoever has sealed links relies on that.

use super::{DOUBT_NS, LOOK_AGAIN_NS, Note, Sealing, Way};
use crate::meeting::{Message, Question, Reach};

/// Pause between two questions while there is no answer.
const PAUSE_NS: u64 = 20_000_000;

/// What the daemon has said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Permission {
    /// Nothing yet.
    #[default]
    Awaited,
    /// No link of this host is sealed.
    Given,
    /// A link of this host is sealed.
    Refused,
}

#[derive(Default)]
pub(super) struct Permit {
    permission: Permission,
    /// The daemon has to answer.
    is_asked: bool,
    ask_at: u64,
}

impl Permit {
    /// The daemon does not answer the question.
    pub(super) fn unheard(&mut self) {
        self.is_asked = false;
    }

    /// Another daemon may have another answer.
    pub(super) fn ask_again(&mut self) {
        (self.is_asked, self.ask_at) = (false, 0);
    }
}

impl Sealing {
    /// Whether packets may leave in clear text, by the daemon's last answer; asks it again if that is old. Without a daemon, or if the user
    /// wants clear text, they may.
    pub(crate) fn permission(&mut self, now: u64) -> Permission {
        let Some(permit) = self.permit.as_mut().filter(|_| self.has_daemon) else {
            return Permission::Given;
        };
        if !permit.is_asked && now >= permit.ask_at {
            (permit.is_asked, permit.ask_at) = (true, now + PAUSE_NS);
            self.asks.push_back(Message::Reach(Question::ANY));
        }
        permit.permission
    }

    /// Decides about a packet in a frame that is about to leave.
    pub(super) fn depart_in_frame(&mut self, now: u64) -> Way<'_> {
        if self.permission(now) == Permission::Given {
            return Way::Clear;
        }
        self.counters.unsent += 1;
        Way::Held
    }

    /// Whether a packet in a frame that has arrived is taken.
    pub(super) fn takes_from_frame(&mut self, now: u64) -> bool {
        if self.permission(now) != Permission::Refused {
            return true;
        }
        self.counters.clear += 1;
        false
    }

    /// The daemon has answered. Every answer but [`Reach::NotYet`], which leaves things as they are, decides.
    pub(super) fn permitted(&mut self, now: u64, reach: Reach) {
        let Some(permit) = &mut self.permit else { return };
        permit.is_asked = false;
        match reach {
            Reach::AllClear => (permit.permission, permit.ask_at) = (Permission::Given, now + LOOK_AGAIN_NS),
            Reach::NotYet => permit.ask_at = now + PAUSE_NS,
            _ => {
                (permit.permission, permit.ask_at) = (Permission::Refused, now + DOUBT_NS);
                self.note(Note::Frames, self.own);
            }
        }
    }
}

/// Why a node that uses raw Ethernet is refused, and what the user can do.
pub(crate) const FRAMES_REFUSED: &str = "a link of this host is sealed, and packets in raw Ethernet frames are not: use UDP, or set VNET_RDMA_SEAL=off, and only links seal them";
