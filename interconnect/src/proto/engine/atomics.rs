//! Atomic operations: the origin checks them, the target executes them in packet order and returns the fetched values.

use super::super::atomic::{ATOMIC_BYTES_MAX, Change, Datatype, apply};
use super::super::channel::{Form, Numbers, What};
use super::super::memory::{Key, Span};
use super::super::status::Status;
use super::super::wire::{Atomic as Packet, Found, flags};
use super::{Engine, PostError};

/// Atomic operation on values in registered memory of a peer; each value changes in one atomic step. The operation's span holds
/// the operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atomic {
    /// Key of the region.
    pub key: Key,
    /// Offset of the first value within the region: a multiple of the value's size.
    pub at: u64,
    /// Function that is applied to each value.
    pub change: Change,
    /// Data type of the values.
    pub datatype: Datatype,
    /// Number of values.
    pub count: u16,
    /// Compare operands if `change` takes any, otherwise empty.
    pub compare: Span,
    /// Destination of the fetched values, if the application wants them.
    pub found: Option<Span>,
}

impl Atomic {
    /// Whether the parameters agree with each other and with this number of bytes of operands.
    pub(crate) fn agrees(&self, operands: usize) -> bool {
        let len = self.len();
        let given = operands + self.compare.len();
        (1..=ATOMIC_BYTES_MAX).contains(&len)
            && self.change.suits(self.datatype)
            && given == self.change.payload_len(self.datatype, usize::from(self.count))
            && self.compare.len() == if self.change.compares() { len } else { 0 }
            && self.found.is_none_or(|found| found.len() >= len)
    }

    /// Total size of the values in bytes.
    pub(crate) fn len(&self) -> usize {
        usize::from(self.count) * self.datatype.size()
    }

    pub(super) fn form(&self) -> Form {
        let Self { key, at, change, datatype, count, found, .. } = *self;
        let found = found.map(|found| found.first(self.len() as u64));
        Form::Atomic { key, at, change, datatype, count, found }
    }
}

impl Engine {
    /// Copies the payload of an operation: the operands, then the compare operands.
    pub(super) fn numbers_of(&mut self, atomic: &Atomic, operands: Span) -> Result<Vec<u8>, PostError> {
        if !atomic.agrees(operands.len()) {
            return Err(PostError::BadAtomic);
        }
        let mut bytes = self.buffer();
        operands.read_to(&mut bytes);
        atomic.compare.read_to(&mut bytes);
        Ok(bytes)
    }

    /// Executes a peer's operation. All earlier packets have been processed.
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
        // Fetching values requires the read right; changing them requires the write right.
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

    /// The peer has received the fetched values.
    pub(super) fn numbers_arrived(&mut self, channel: u32, found: u32) {
        let numbers = self.channels.get_mut(channel).and_then(|own| own.found.remove(found));
        if let Some(numbers) = numbers {
            self.recycle(numbers.bytes);
        }
    }

    /// Handles the fetched values of an operation that this engine originated.
    pub(super) fn take_found(&mut self, channel: u32, found: Found, payload: &[u8]) {
        let Some(op) = self.ops.get(found.op).filter(|op| op.channel == channel) else { return };
        let Form::Atomic { found: Some(place), .. } = op.form else { return };
        let is_whole = place.len() == payload.len() && place.write(0, payload);
        let (status, len) =
            if is_whole { (Status::Success, payload.len() as u64) } else { (Status::Protocol, 0) };
        self.complete_op(found.op, status, len);
    }
}
