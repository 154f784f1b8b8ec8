//! Rings: packets between two processes of one host through shared memory.
//!
//! The memory is a memfd of fixed size with one `lane` for each direction; a *bell* is one end of a socket pair. A process copies a
//! packet into its lane, and rings the bell if the other one sleeps. The daemon of the host creates both and passes them to the two
//! processes (`meeting/`).
//!
//! The other process may be hostile. It can write anything into the memory at any time, so:
//!
//! - each field is read once and then checked, and headers are copied before they are parsed;
//! - each process keeps its own positions in private memory, and never reads them back from the lane;
//! - the memfd is sealed against shrinking, so that no access ends in SIGBUS;
//! - the bell is rung with `MSG_DONTWAIT`, so that a peer that never empties it blocks nobody. An eventfd would not do: the peer could
//!   make its open file blocking, for both. The end of the peer closes the socket pair, which wakes this process.

mod bell;
mod lane;
mod memory;
mod view;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

pub(crate) use bell::{Bell, PASSED_MAX, Silent, Word};
pub use lane::{Arrived, Broken};
use lane::{Incoming, LANE_BYTES, Outgoing};
use memory::Mapping;
pub(crate) use view::{View, create, sealed_len};

use crate::proto::Span;

/// Number of unacknowledged bytes that a lane takes. The rest is for control packets and for the headers of data.
pub(crate) const WINDOW_BYTES: u64 = LANE_BYTES as u64 * 3 / 4;

/// What two processes need for a ring.
pub struct Provided {
    /// The memory for both.
    pub memory: OwnedFd,
    /// One bell for each.
    pub bells: [OwnedFd; 2],
}

/// Creates memory and bells.
pub fn provide() -> io::Result<Provided> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok(Provided { memory: memory::create()?, bells: [a, b] })
}

/// One end of a ring. Dropping it ends the ring for both.
pub struct Ring {
    outgoing: Outgoing,
    incoming: Incoming,
    bell: Bell,
    /// The peer has been asked to ring, and no ring has been heard since.
    is_armed: bool,
    mapping: Mapping,
}

impl Ring {
    /// Opens one of the two ends: `side` is 0 or 1.
    ///
    /// # Errors
    /// The memory does not have the size and the seals of a ring, or cannot be mapped.
    pub fn open(memory: OwnedFd, bell: OwnedFd, side: usize) -> io::Result<Self> {
        let bell = Bell::new(bell);
        let mapping = Mapping::new(memory)?;
        let (own, other) = (mapping.lane(side & 1), mapping.lane(1 - (side & 1)));
        let (outgoing, incoming) = (Outgoing::new(own), Incoming::new(other));
        Ok(Self { outgoing, incoming, bell, is_armed: false, mapping })
    }

    /// Sends a packet. Returns false if the lane is full.
    ///
    /// # Errors
    /// The peer has damaged the lane.
    pub fn send(&mut self, header: &[u8], payload: Span) -> Result<bool, Broken> {
        if !self.outgoing.push(header, payload)? {
            return Ok(false);
        }
        if self.outgoing.wakes_peer() {
            self.bell.say(&Word::Ring);
        }
        Ok(true)
    }

    /// Returns the next packet. It stays in the lane until `release`.
    ///
    /// # Errors
    /// The peer has damaged the lane.
    pub fn receive(&mut self) -> Result<Option<Arrived<'_>>, Broken> {
        self.incoming.next()
    }

    /// Frees the packet that `receive` has returned.
    pub fn release(&mut self) {
        self.incoming.release();
    }

    /// Asks the peer to ring the bell with its next packet. Returns true if a packet is there already, so that the caller must not
    /// sleep.
    pub fn arm(&mut self) -> bool {
        self.is_armed = true;
        self.incoming.arm()
    }

    /// Whether the peer has rung, or is about to, since `arm`.
    pub fn is_rung(&self) -> bool {
        self.is_armed && !self.incoming.is_armed()
    }

    /// Returns the next word of the peer, if there is one.
    pub(crate) fn hear(&mut self) -> Result<Option<Word>, Silent> {
        let word = self.bell.hear()?;
        if matches!(word, Some(Word::Ring)) {
            self.is_armed &= self.incoming.is_armed();
        }
        Ok(word)
    }

    /// Tells the peer what is not a packet.
    pub(crate) fn say(&self, word: &Word) {
        self.bell.say(word);
    }

    /// Hears one word and forgets it. Returns false if the peer has closed its end.
    #[doc(hidden)]
    pub fn listen(&mut self) -> bool {
        self.hear().is_ok()
    }

    /// Descriptor that is readable while the bell rings, and when the peer has closed its end.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.descriptor()
    }

    /// Writes anywhere into the shared memory, as a hostile peer could.
    #[doc(hidden)]
    pub fn scribble(&mut self, offset: usize, bytes: &[u8]) {
        self.mapping.scribble(offset, bytes);
    }
}

#[cfg(test)]
mod tests;
