//! Atomic operations: checked at their origin, carried out at their target in the order of the packets, answered with what they found.

use super::super::atomic::{ATOMIC_BYTES_MAX, Change, Datatype, apply};
use super::super::channel::{Form, Numbers, What};
use super::super::memory::{Key, Span};
use super::super::status::Status;
use super::super::wire::{Atomic as Packet, Found, flags};
use super::{Engine, PostError};

/// Changes numbers in registered memory of a peer, each in one step. The operation's span has the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// Names the region.
    pub key: Key,
    /// Offset of the first number there: a multiple of its size.
    pub at: u64,
    /// What happens to each number.
    pub change: Change,
    /// What the numbers are.
    pub datatype: Datatype,
    /// How many there are.
    pub count: u16,
    /// Numbers to compare with, if `change` compares; otherwise empty.
    pub compare: Span,
    /// Where the numbers go that were there before, if they are wanted.
    pub found: Option<Span>,
}

impl Atomic {
    /// Bytes of the numbers.
    fn len(&self) -> usize {
        usize::from(self.count) * self.datatype.size()
    }

    pub(super) fn form(&self) -> Form {
        let Self { key, at, change, datatype, count, found, .. } = *self;
        let found = found.map(|found| found.first(self.len() as u64));
        Form::Atomic { key, at, change, datatype, count, found }
    }
}

impl Engine {
    /// Copies the numbers that travel with an operation: operands, then those to compare with.
    pub(super) fn numbers_of(&mut self, atomic: &Atomic, operands: Span) -> Result<Vec<u8>, PostError> {
        let len = atomic.len();
        let given = operands.len() + atomic.compare.len();
        let agrees = (1..=ATOMIC_BYTES_MAX).contains(&len)
            && atomic.change.suits(atomic.datatype)
            && given == atomic.change.payload_len(atomic.datatype, usize::from(atomic.count))
            && atomic.compare.len() == if atomic.change.compares() { len } else { 0 }
            && atomic.found.is_none_or(|found| found.len() >= len);
        if !agrees {
            return Err(PostError::BadAtomic);
        }
        let mut bytes = self.buffer();
        operands.read_to(&mut bytes);
        atomic.compare.read_to(&mut bytes);
        Ok(bytes)
    }

    /// A peer's operation; all packets before it have been carried out.
    pub(super) fn take_atomic(&mut self, channel: u32, flags: u8, atomic: &Packet, payload: &[u8]) {
        let mut found = self.buffer();
        match self.change_numbers(channel, flags, atomic, payload, &mut found) {
            Err(status) => {
                self.recycle(found);
                self.fail_operation(channel, atomic.op, status);
            }
            Ok(()) if flags & flags::DATA == 0 => self.recycle(found),
            Ok(()) => {
                let Some(own) = self.channels.get_mut(channel) else { return };
                if let Some(found) = own.found.insert(Numbers { op: atomic.op, bytes: found }) {
                    self.control(channel, What::Found { found });
                }
            }
        }
    }

    fn change_numbers(
        &mut self,
        channel: u32,
        flags: u8,
        atomic: &Packet,
        payload: &[u8],
        found: &mut Vec<u8>,
    ) -> Result<(), Status> {
        let len = usize::from(atomic.count) * atomic.datatype.size();
        if !(1..=ATOMIC_BYTES_MAX).contains(&len) {
            return Err(Status::Protocol);
        }
        let wants = flags & flags::DATA != 0;
        if wants && self.channels.get(channel).is_none_or(|own| own.found.is_full()) {
            return Err(Status::NotReady);
        }
        let target = |write| self.memory.find(atomic.to, atomic.key, atomic.at, len as u64, write);
        // Either right is needed for what it allows.
        let target = match (atomic.change, wants) {
            (Change::Read, _) => target(false),
            (_, true) => target(false).and_then(|_| target(true)),
            (_, false) => target(true),
        };
        let done = target.and_then(|target| {
            let is_done = apply(atomic.change, atomic.datatype, target, payload, found);
            if is_done { Ok(()) } else { Err(Status::BadKey) }
        });
        self.counters.bad_keys += u64::from(done.is_err());
        done
    }

    /// The peer has what its operation found.
    pub(super) fn numbers_arrived(&mut self, channel: u32, found: u32) {
        let numbers = self.channels.get_mut(channel).and_then(|own| own.found.remove(found));
        if let Some(numbers) = numbers {
            self.recycle(numbers.bytes);
        }
    }

    /// What an operation of this side found.
    pub(super) fn take_found(&mut self, channel: u32, found: Found, payload: &[u8]) {
        let Some(op) = self.ops.get(found.op).filter(|op| op.channel == channel) else { return };
        let Form::Atomic { found: Some(place), .. } = op.form else { return };
        let is_whole = place.len() == payload.len() && place.write(0, payload);
        let (status, len) =
            if is_whole { (Status::Success, payload.len() as u64) } else { (Status::Protocol, 0) };
        self.complete_op(found.op, status, len);
    }
}
