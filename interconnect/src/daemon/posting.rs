//! Operations under way on the process's side: where their bytes are for the daemon, and what to tell the application at the end.

use std::collections::BTreeMap;
use std::io;

use super::arena::{self, Arena};
use super::entry::{Extent, Task, ended};
use super::translation::MAPPINGS_MAX;
use crate::node::pages::Pages;
use crate::proto::slab::Slab;
use crate::proto::{Atomic, Completion, Kind, Outgoing, Peer, PostError, Receive, Shape, Span, Status};
use crate::ring::{Bell, Word};

/// Maximum number of operations and posted buffers.
const POSTED_MAX: usize = 8192;

/// An operation or a posted buffer that the daemon knows by its number.
struct Posted {
    endpoint: u16,
    /// What the application passed.
    context: u64,
    is_receive: bool,
    /// Only a failure is reported.
    is_quiet: bool,
    /// A success was reported when it was posted.
    is_buffered: bool,
    /// Block of the arena that it takes, and where its bytes go at the end: offset in the block and destination.
    block: Option<(Extent, Option<(u64, Span)>)>,
}

/// Memory that the daemon knows, and what is under way.
pub(super) struct Posting {
    /// Registered memory by address: length, and number.
    memory: BTreeMap<usize, (usize, u32)>,
    next_number: u32,
    arena: Option<Arena>,
    /// Size of the arena, which is made when it is first needed.
    arena_bytes: u64,
    posted: Slab<Posted>,
    /// Number of posted buffers among them.
    buffers: usize,
}

impl Posting {
    pub(super) fn new(arena_bytes: u64) -> Self {
        let (memory, next_number) = (BTreeMap::new(), arena::NUMBER + 1);
        Self { memory, next_number, arena: None, arena_bytes, posted: Slab::new(POSTED_MAX), buffers: 0 }
    }

    /// Passes memory to the daemon.
    pub(super) fn lend(&mut self, bell: &Bell, pages: &Pages) -> io::Result<()> {
        if self.memory.len() + 1 >= MAPPINGS_MAX {
            return Err(io::Error::other("the daemon maps no more memory of a process"));
        }
        give(bell, self.next_number, pages)?;
        self.memory.insert(pages.span().start() as usize, (pages.len(), self.next_number));
        self.next_number += 1;
        Ok(())
    }

    /// Finds bytes in memory that the daemon knows.
    pub(super) fn locate(&self, span: Span) -> Option<Extent> {
        let start = span.start() as usize;
        let (first, (len, memory)) = self.memory.range(..=start).next_back()?;
        let (offset, bytes) = ((start - first) as u64, span.len() as u64);
        (offset + bytes <= *len as u64).then_some(Extent { memory: *memory, offset, len: bytes })
    }

    fn block(&mut self, bell: &Bell, len: usize) -> Result<Extent, PostError> {
        if self.arena.is_none() {
            let arena = Arena::new(self.arena_bytes)
                .ok()
                .filter(|arena| give(bell, arena::NUMBER, arena.pages()).is_ok());
            self.arena = Some(arena.ok_or(PostError::Busy)?);
        }
        self.arena.as_mut().and_then(|arena| arena.take(len as u64)).ok_or(PostError::Busy)
    }

    /// Copies to a block of the arena.
    fn fill(&self, block: Extent, offset: u64, from: Span) {
        if let Some(arena) = &self.arena {
            arena.span(block, offset, from.len() as u64).copy_from(0, from);
        }
    }

    /// Prepares an operation. Returns its number, and task and bytes for the daemon.
    pub(super) fn operation(
        &mut self,
        bell: &Bell,
        endpoint: u16,
        out: &Outgoing,
    ) -> Result<(u32, Task, Extent), PostError> {
        let (task, extent, block) = match out.shape {
            Shape::Message { tag } => self.outward(bell, Task::Message(tag), out)?,
            Shape::Write { key, at } => self.outward(bell, Task::Write(key, at), out)?,
            // Only the process engine makes these.
            Shape::Placed { .. } => return Err(PostError::UnknownKey),
            Shape::Read { key, at } => match self.locate(out.span) {
                Some(extent) => (Task::Read(key, at), extent, None),
                None => {
                    let block = self.block(bell, out.span.len())?;
                    (Task::Read(key, at), block, Some((block, Some((0, out.span)))))
                }
            },
            Shape::Atomic(atomic) => self.atomic(bell, &atomic, out.span)?,
        };
        let posted = Posted {
            endpoint,
            context: out.context,
            is_receive: false,
            is_quiet: out.is_quiet,
            is_buffered: out.is_buffered,
            block,
        };
        let number = self.insert(posted)?;
        Ok((number, task, extent))
    }

    #[expect(clippy::type_complexity, reason = "the three parts of an operation")]
    fn outward(
        &mut self,
        bell: &Bell,
        task: Task,
        out: &Outgoing,
    ) -> Result<(Task, Extent, Option<(Extent, Option<(u64, Span)>)>), PostError> {
        if let Some(extent) = self.locate(out.span).filter(|_| !out.is_buffered) {
            return Ok((task, extent, None));
        }
        let block = self.block(bell, out.span.len())?;
        self.fill(block, 0, out.span);
        Ok((task, block, Some((block, None))))
    }

    /// The numbers of an atomic operation are few: they always pass through the arena.
    #[expect(clippy::type_complexity, reason = "the three parts of an operation")]
    fn atomic(
        &mut self,
        bell: &Bell,
        atomic: &Atomic,
        operands: Span,
    ) -> Result<(Task, Extent, Option<(Extent, Option<(u64, Span)>)>), PostError> {
        if !atomic.agrees(operands.len()) {
            return Err(PostError::BadAtomic);
        }
        let Atomic { key, at, change, datatype, count, compare, found } = *atomic;
        let [first, second] = [operands, compare].map(|span| span.len() as u64);
        let fetched = found.map(|found| found.first(atomic.len() as u64));
        let third = fetched.map_or(0, |found| found.len() as u64);
        let block = self.block(bell, (first + second + third) as usize)?;
        self.fill(block, 0, operands);
        self.fill(block, first, compare);
        let part = |offset, len| Extent { memory: block.memory, offset: block.offset + offset, len };
        let (compare, place) = (part(first, second), part(first + second, third));
        let found = fetched.map(|_| place);
        let task = Task::Atomic { key, at, change, datatype, count, compare, found };
        let back = fetched.map(|found| (first + second, found));
        Ok((task, part(0, first), Some((block, back))))
    }

    /// Prepares a buffer. Returns its number and its bytes for the daemon.
    pub(super) fn receive(
        &mut self,
        bell: &Bell,
        endpoint: u16,
        receive: &Receive,
    ) -> Result<(u32, Extent), PostError> {
        let (extent, block) = match self.locate(receive.span) {
            Some(extent) => (extent, None),
            None => {
                let block = self.block(bell, receive.span.len())?;
                (block, Some((block, Some((0, receive.span)))))
            }
        };
        let context = receive.context;
        let (is_quiet, is_buffered) = (false, false);
        let posted = Posted { endpoint, context, is_receive: true, is_quiet, is_buffered, block };
        Ok((self.insert(posted)?, extent))
    }

    fn insert(&mut self, posted: Posted) -> Result<u32, PostError> {
        let block = posted.block.as_ref().map(|(block, _)| *block);
        let is_receive = posted.is_receive;
        let number = self.posted.insert(posted);
        self.buffers += usize::from(is_receive && number.is_some());
        if let (None, Some(block), Some(arena)) = (number, block, &mut self.arena) {
            arena.give_back(block);
        }
        number.ok_or(PostError::Busy)
    }

    /// Number of a posted buffer with this context.
    pub(super) fn buffer(&self, endpoint: u16, context: u64) -> Option<u32> {
        let is_meant =
            |posted: &Posted| posted.is_receive && posted.endpoint == endpoint && posted.context == context;
        self.posted.numbers(is_meant).first().copied()
    }

    /// Posted buffers, in all.
    pub(super) fn buffers(&self) -> usize {
        self.buffers
    }

    /// Operations of an endpoint (or of all) that were reported as complete before they were.
    pub(super) fn buffered(&self, endpoint: Option<u16>) -> usize {
        let is_meant = |posted: &&Posted| endpoint.is_none_or(|endpoint| posted.endpoint == endpoint);
        self.posted.iter().filter(is_meant).filter(|posted| posted.is_buffered).count()
    }

    /// Operations under way.
    pub(super) fn operations(&self) -> usize {
        self.posted.iter().filter(|posted| !posted.is_receive).count()
    }

    /// What the application is told when the daemon reports a completion.
    pub(super) fn finish(&mut self, mut completion: Completion) -> Option<Completion> {
        if completion.kind == Kind::Arrival {
            return Some(completion);
        }
        let number = u32::try_from(completion.context).ok()?;
        let posted = self.posted.get(number)?;
        completion.context = posted.context;
        if let (Some((block, Some((at, to)))), Some(arena)) = (&posted.block, &self.arena)
            && matches!(completion.status, Status::Success | Status::Truncated)
        {
            let (offset, len) = match completion.kind {
                Kind::Receive => (completion.offset, completion.len),
                _ => (0, to.len() as u64),
            };
            let len = len.min((to.len() as u64).saturating_sub(offset));
            to.copy_from(offset, arena.span(*block, at + offset, len));
        }
        let is_told = completion.status != Status::Success || !(posted.is_quiet || posted.is_buffered);
        completion.is_late = posted.is_buffered;
        if !posted.is_receive || completion.is_released {
            self.release(number);
        }
        is_told.then_some(completion)
    }

    /// Forgets what is under way under this number.
    pub(super) fn release(&mut self, number: u32) {
        let Some(posted) = self.posted.remove(number) else { return };
        self.buffers -= usize::from(posted.is_receive);
        if let (Some((block, _)), Some(arena)) = (posted.block, &mut self.arena) {
            arena.give_back(block);
        }
    }

    /// Forgets all that is under way on an endpoint.
    pub(super) fn release_all(&mut self, endpoint: u16) {
        for number in self.posted.numbers(|posted| posted.endpoint == endpoint) {
            self.release(number);
        }
    }

    /// Ends everything that is under way, because the daemon is gone. Returns endpoint, context and kind of what the application has to be told.
    pub(super) fn abandon(&mut self) -> Vec<(u16, u64, Kind)> {
        let mut ended = vec![];
        for number in self.posted.numbers(|_| true) {
            if let Some(posted) = self.posted.get(number) {
                let kind = if posted.is_receive { Kind::Receive } else { Kind::Send };
                ended.push((posted.endpoint, posted.context, kind));
            }
            // The daemon may still read and write the blocks: they are not given back.
            self.posted.remove(number);
        }
        self.buffers = 0;
        ended
    }
}

fn give(bell: &Bell, number: u32, pages: &Pages) -> io::Result<()> {
    let memory = pages.lend().ok_or_else(|| io::Error::other("the memory is private"))?;
    let is_told = bell.try_say(&Word::Grant(number.into(), memory));
    if is_told { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// Completion of an operation that is reported when it is posted.
pub(super) fn buffered(peer: Peer, out: &Outgoing) -> Completion {
    let kind = if matches!(out.shape, Shape::Write { .. }) { Kind::Write } else { Kind::Send };
    let completion = ended(kind, Status::Success, out.context, peer);
    Completion { len: out.span.len() as u64, is_released: false, ..completion }
}
