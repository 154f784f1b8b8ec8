//! The bell: a socket between the two processes of a ring, for what is rare. It wakes a process that sleeps, and passes registered memory.
//!
//! Words are packets (`SOCK_SEQPACKET`): a kind, then fields in the host's byte order.

use std::io::{IoSlice, IoSliceMut};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, recvmsg, sendmsg, shutdown,
};

use crate::closer::close_or_leak;
use crate::proto::Key;

/// Length in bytes of the longest word.
const WORD_MAX: usize = 11;

/// Number of descriptors that a process can pass with one message (SCM_MAX_FD in the kernel).
pub(crate) const PASSED_MAX: usize = 253;

/// What one process tells the other.
#[derive(Debug)]
pub(crate) enum Word {
    /// A packet is in the lane, and the reader was asleep.
    Ring,
    /// Asks for the memory of the region with this key, registered with this endpoint.
    Ask(u16, Key),
    /// The memory of the region with this key.
    Grant(Key, OwnedFd),
    /// The region with this key is not given away.
    Refuse(Key),
}

impl Word {
    fn memory(self) -> Option<OwnedFd> {
        if let Word::Grant(_, memory) = self { Some(memory) } else { None }
    }
}

/// The peer has closed its end, or says what no process says.
pub(crate) struct Silent;

/// A process's end. Dropping it tells the peer, although the daemon or a child process may hold the same socket.
pub(crate) struct Bell(ManuallyDrop<OwnedFd>);

impl Bell {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(ManuallyDrop::new(socket))
    }

    /// Tells the peer. A word is lost if the socket is full: the bell rings then anyway, and an answer that is missing means that bytes
    /// take the lane.
    pub(crate) fn say(&self, word: &Word) {
        let _ = self.try_say(word);
    }

    /// Tells the peer. Returns false if the socket is full or closed.
    pub(crate) fn try_say(&self, word: &Word) -> bool {
        let mut bytes = [0; WORD_MAX];
        let mut put = |kind: u8, endpoint: &[u8], key: &[u8]| {
            let (end, len) = (1 + endpoint.len(), 1 + endpoint.len() + key.len());
            bytes[0] = kind;
            bytes[1..end].copy_from_slice(endpoint);
            bytes[end..len].copy_from_slice(key);
            len
        };
        let (len, memory) = match word {
            Word::Ring => (put(1, &[], &[]), None),
            Word::Ask(endpoint, key) => (put(2, &endpoint.to_ne_bytes(), &key.to_ne_bytes()), None),
            Word::Grant(key, memory) => (put(3, &[], &key.to_ne_bytes()), Some([memory.as_fd()])),
            Word::Refuse(key) => (put(4, &[], &key.to_ne_bytes()), None),
        };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if let Some(memory) = &memory {
            control.push(SendAncillaryMessage::ScmRights(memory));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(&*self.0, &[IoSlice::new(&bytes[..len])], &mut control, flags).is_ok()
    }

    /// Returns the next word of the peer, if there is one.
    pub(crate) fn hear(&self) -> Result<Option<Word>, Silent> {
        self.hear_with(close_or_leak)
    }

    /// Like `hear`; descriptors that do not belong there are given to `discard`.
    pub(crate) fn hear_with(&self, discard: fn(OwnedFd)) -> Result<Option<Word>, Silent> {
        let mut bytes = [0; WORD_MAX];
        // Without room for all descriptors the kernel would close some in this thread.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let len = match recvmsg(&*self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) => received.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(_) => return Err(Silent),
        };
        let mut passed: Vec<OwnedFd> = vec![];
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                passed.extend(descriptors);
            }
        }
        let memory = passed.pop();
        let is_too_many = !passed.is_empty();
        passed.into_iter().for_each(discard);
        let word = decode(&bytes[..len], memory);
        let word = if is_too_many { word.and_then(|word| Err(word.memory())) } else { word };
        word.map(Some).map_err(|refused| {
            refused.into_iter().for_each(discard);
            Silent
        })
    }

    /// Tells the peer that this end is not used any more.
    pub(crate) fn end(&self) {
        let _ = shutdown(&*self.0, Shutdown::Both);
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.end();
        // SAFETY: the socket is not used after this, because the value is being dropped.
        let socket = unsafe { ManuallyDrop::take(&mut self.0) };
        // Descriptors that the peer has sent may be in flight.
        close_or_leak(socket);
    }
}

fn decode(bytes: &[u8], memory: Option<OwnedFd>) -> Result<Word, Option<OwnedFd>> {
    let key = |bytes: &[u8]| bytes.try_into().ok().map(Key::from_ne_bytes);
    let word = match (bytes.split_first(), &memory) {
        (Some((1, [])), None) => Some(Word::Ring),
        (Some((2, [a, b, rest @ ..])), None) => {
            key(rest).map(|key| Word::Ask(u16::from_ne_bytes([*a, *b]), key))
        }
        (Some((3, rest)), Some(_)) => match (key(rest), memory) {
            (Some(key), Some(memory)) => return Ok(Word::Grant(key, memory)),
            (_, memory) => return Err(memory),
        },
        (Some((4, rest)), None) => key(rest).map(Word::Refuse),
        _ => None,
    };
    word.ok_or(memory)
}
