//! Messages and descriptors over a Unix socket (unix(7), `SCM_RIGHTS`), with deadlines.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vnet::link::succession::{SEALED_STATE_MAX, SealedBytes};
use vnet_control::take_over::message::{HEAD, Message, MessageError, PASSED_MAX};

/// How long the other side may take to read a message.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of a message read at a time: memory grows with what arrives, not with what is announced.
const CHUNK: usize = 64 << 10;

/// Error of a conversation.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    #[error("the other vnetd did not answer in time")]
    Late,
    #[error("the other vnetd has ended")]
    Ended,
    #[error("the other vnetd refused: {0}")]
    Refused(String),
    #[error("the other vnetd sent a message at a wrong time; it may be another version")]
    Unexpected,
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error("cannot talk to the other vnetd: {0}")]
    System(io::Error),
}

impl From<io::Error> for ChannelError {
    fn from(error: io::Error) -> ChannelError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ChannelError::Late,
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ChannelError::Ended
            }
            _ => ChannelError::System(error),
        }
    }
}

/// One end of a conversation.
pub struct Channel(UnixStream);

impl Channel {
    pub fn new(stream: UnixStream) -> Result<Channel, ChannelError> {
        stream.set_write_timeout(Some(READ_WITHIN))?;
        Ok(Channel(stream))
    }

    /// Sends a message, with as many descriptors as it names.
    pub fn send(&self, message: &Message, descriptors: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
        let bytes = message.to_bytes()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(MessageError::Descriptors(descriptors.len(), PASSED_MAX).into());
        }
        // The descriptors come with the first byte.
        let sent = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
        let sent = sent.map_err(io::Error::from)?;
        Ok((&self.0).write_all(&bytes[sent..])?)
    }

    /// Sends a sealed link with its keys: a length as of messages, then the bytes.
    pub fn send_sealed(&self, bytes: &SealedBytes) -> Result<(), ChannelError> {
        let len = u32::try_from(bytes.len()).ok().filter(|len| *len as usize <= SEALED_STATE_MAX);
        let len = len.ok_or(MessageError::TooLong(bytes.len() as u64))?;
        (&self.0).write_all(&len.to_le_bytes())?;
        Ok((&self.0).write_all(bytes)?)
    }

    /// Receives a sealed link with its keys, all within `within`.
    pub fn receive_sealed(&self, within: Duration) -> Result<SealedBytes, ChannelError> {
        let deadline = Instant::now() + within;
        let mut head = [0; HEAD];
        self.fill(&mut head, deadline)?;
        let len = u32::from_le_bytes(head) as usize;
        if len > SEALED_STATE_MAX {
            return Err(MessageError::TooLong(len as u64).into());
        }
        // Does not grow: a vector that grows leaves its former bytes in freed memory.
        let mut bytes = SealedBytes::new(vec![0; len]);
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    fn fill(&self, mut room: &mut [u8], deadline: Instant) -> Result<(), ChannelError> {
        while !room.is_empty() {
            self.wait_until(deadline)?;
            match (&self.0).read(room)? {
                0 => return Err(ChannelError::Ended),
                len => room = &mut room[len..],
            }
        }
        Ok(())
    }

    /// Receives a message with its descriptors, all within `within`. One that refuses is an error.
    pub fn receive(&self, within: Duration) -> Result<(Message, Vec<OwnedFd>), ChannelError> {
        let deadline = Instant::now() + within;
        let (mut head, mut filled, mut passed) = ([0; HEAD], 0, vec![]);
        while filled < HEAD {
            self.wait_until(deadline)?;
            match self.receive_head(&mut head[filled..], &mut passed)? {
                0 => return Err(ChannelError::Ended),
                len => filled += len,
            }
        }
        let mut left = Message::length(head)?;
        let mut bytes = vec![];
        while left > 0 {
            self.wait_until(deadline)?;
            let read = (&self.0).take(left.min(CHUNK) as u64).read_to_end(&mut bytes)?;
            if read == 0 {
                return Err(ChannelError::Ended);
            }
            left -= read;
        }
        match Message::parse(&bytes, passed.len())? {
            Message::Refused { why } => Err(ChannelError::Refused(why)),
            message => Ok((message, passed)),
        }
    }

    fn receive_head(&self, room: &mut [u8], passed: &mut Vec<OwnedFd>) -> Result<usize, ChannelError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(PASSED_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let vector = &mut [IoSliceMut::new(room)];
        let received = recvmsg(&self.0, vector, &mut control, RecvFlags::CMSG_CLOEXEC);
        let received = received.map_err(io::Error::from)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                passed.extend(descriptors);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            let text = "it passed more descriptors than this process may open; raise LimitNOFILE";
            return Err(ChannelError::System(io::Error::other(text)));
        }
        Ok(received.bytes)
    }

    /// Lets the next read wait until `deadline`.
    fn wait_until(&self, deadline: Instant) -> Result<(), ChannelError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ChannelError::Late);
        }
        Ok(self.0.set_read_timeout(Some(left))?)
    }

    /// Waits until the other side has closed its end; false if it does not within `within`.
    pub fn until_closed(&self, within: Duration) -> bool {
        matches!(self.receive(within), Err(ChannelError::Ended))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn pair() -> (Channel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Channel::new(ours).unwrap(), theirs)
    }

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn messages_arrive_with_their_descriptors() {
        let (ours, theirs) = pair();
        let theirs = Channel::new(theirs).unwrap();
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(b"handed over").unwrap();
        let names = Message::Descriptors { names: vec!["a".into(), "b".into()] };
        theirs.send(&names, &[file.as_fd(), file.as_fd()]).unwrap();
        let long = Message::Refused { why: "x".repeat(3 * CHUNK) };
        std::thread::scope(|scope| {
            scope.spawn(|| theirs.send(&long, &[]).unwrap());
            let (message, passed) = ours.receive(SOON).unwrap();
            assert_eq!((message, passed.len()), (names, 2));
            let mut text = String::new();
            let mut copy = std::fs::File::from(passed.into_iter().next().unwrap());
            io::Seek::rewind(&mut copy).unwrap();
            copy.read_to_string(&mut text).unwrap();
            assert_eq!(text, "handed over");
            let refused = ours.receive(Duration::from_secs(5));
            assert!(matches!(refused, Err(ChannelError::Refused(why)) if why.len() == 3 * CHUNK));
        });
        drop(theirs);
        assert!(ours.until_closed(SOON));
    }

    #[test]
    fn sealed_links_arrive_whole_and_are_bounded() {
        let (ours, theirs) = pair();
        let theirs = Channel::new(theirs).unwrap();
        let long = SealedBytes::new((0..SEALED_STATE_MAX).map(|at| at as u8).collect());
        std::thread::scope(|scope| {
            scope.spawn(|| theirs.send_sealed(&long).unwrap());
            assert!(ours.receive_sealed(Duration::from_secs(5)).unwrap() == long);
        });
        let longer = SealedBytes::new(vec![0; SEALED_STATE_MAX + 1]);
        assert!(matches!(theirs.send_sealed(&longer), Err(ChannelError::Message(MessageError::TooLong(_)))));
        assert!(matches!(ours.receive_sealed(SOON), Err(ChannelError::Late)));
        let (ours, theirs) = pair();
        (&theirs).write_all(&(SEALED_STATE_MAX as u32 + 1).to_le_bytes()).unwrap();
        assert!(matches!(ours.receive_sealed(SOON), Err(ChannelError::Message(MessageError::TooLong(_)))));
        let (ours, theirs) = pair();
        (&theirs).write_all(&[2, 0, 0, 0, 7]).unwrap();
        assert!(matches!(ours.receive_sealed(SOON), Err(ChannelError::Late)));
        drop(theirs);
        assert!(matches!(ours.receive_sealed(SOON), Err(ChannelError::Ended)));
    }

    #[test]
    fn who_is_silent_slow_or_wrong_is_not_waited_for() {
        let (ours, theirs) = pair();
        assert!(matches!(ours.receive(SOON), Err(ChannelError::Late)));
        assert!(!ours.until_closed(SOON));
        // A length, and less than that.
        (&theirs).write_all(&9_u32.to_le_bytes()).unwrap();
        (&theirs).write_all(b"{").unwrap();
        assert!(matches!(ours.receive(SOON), Err(ChannelError::Late)));
        let (ours, theirs) = pair();
        (&theirs).write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(matches!(ours.receive(SOON), Err(ChannelError::Message(MessageError::TooLong(_)))));
        let (ours, theirs) = pair();
        (&theirs).write_all(&2_u32.to_le_bytes()).unwrap();
        (&theirs).write_all(b"{}").unwrap();
        assert!(matches!(ours.receive(SOON), Err(ChannelError::Message(MessageError::Form(_)))));
        let (ours, theirs) = pair();
        (&theirs).write_all(&[1, 0]).unwrap();
        drop(theirs);
        assert!(matches!(ours.receive(SOON), Err(ChannelError::Ended)));
    }
}
