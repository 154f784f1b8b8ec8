//! Memory that the engine reads and writes for a process: a memfd of the process, or pages that its virtual machine has lent.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::proto::Span;
use crate::ring::View;

/// Pieces of memory that wait for the engine: more than a process may have in use, so that a hostile one cannot fill the queue unseen.
const WAITING_MAX: usize = 1024;

/// Memory that stays mapped as long as the value, whose owner may write to it at any time.
pub trait Lent: Send + Sync {
    /// All bytes.
    fn span(&self) -> Span;

    /// Number of mappings of this process that the memory takes.
    fn pieces(&self) -> usize;

    /// True if the memory has to be given back.
    fn is_revoked(&self) -> bool;
}

impl Lent for View {
    fn span(&self) -> Span {
        self.all()
    }

    fn pieces(&self) -> usize {
        1
    }

    fn is_revoked(&self) -> bool {
        false
    }
}

/// What arrives for the engine of a process: the process's number of the memory, and the memory, or that it could not be lent.
pub(crate) type Lending = (u32, Option<Arc<dyn Lent>>);

/// Memory on its way to the engine's thread.
#[derive(Default)]
pub(crate) struct Inbox(Mutex<VecDeque<Lending>>);

impl Inbox {
    /// Returns false if too much waits.
    pub(crate) fn put(&self, lending: Lending) -> bool {
        let mut waiting = self.0.lock();
        if waiting.len() >= WAITING_MAX {
            return false;
        }
        waiting.push_back(lending);
        true
    }

    /// Lets go of what waits: nobody takes it any more.
    pub(crate) fn discard(&self) {
        self.0.lock().clear();
    }

    pub(super) fn take(&self) -> Option<Lending> {
        self.0.lock().pop_front()
    }
}
