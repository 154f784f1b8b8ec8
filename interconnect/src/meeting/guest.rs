//! A process's connection to the daemon of its host.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};

use super::{Decline, Keys, Message, Reach, Request, Token};

/// The connection. Closing it ends all rings of the process, and the daemon forgets its sessions.
pub(crate) struct Guest(OwnedFd);

/// What the daemon says.
pub(crate) enum Heard {
    /// The process has this name.
    Named(Token),
    /// An end of a ring for the channel with this secret.
    Ring { side: u8, secret: Token, memory: OwnedFd, bell: OwnedFd },
    /// No ring for the channel with this secret.
    Absent(Token),
    /// How the peer at this address is reached.
    Reached(SocketAddr, Reach),
    /// Keys of the request with this ticket, or why there are none.
    Keys(u32, Result<Keys, Reach>),
    /// The daemon runs the engine at this address.
    Attached { address: SocketAddr, memory: OwnedFd, bell: OwnedFd },
    /// The daemon does not run the engine.
    Declined(Decline),
}

impl Guest {
    /// Connects to the daemon at this abstract name.
    pub(crate) fn connect(name: &str) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
        if !is_trusted(&socket)? {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Self(socket))
    }

    /// The connection of an engine that the daemon itself runs: `socket` is one end of a socket pair (`SOCK_SEQPACKET`).
    pub(crate) fn on(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Asks for a ring with the process that sent an invitation.
    pub(crate) fn join(&self, name: Token, secret: Token) -> bool {
        self.say(Message::Join(name, secret))
    }

    /// Asks the daemon to run the engine.
    pub(crate) fn attach(&self, request: Request) -> bool {
        self.say(Message::Attach(request))
    }

    /// Sends a message. Returns false if the daemon does not read its messages or has gone.
    pub(crate) fn say(&self, message: Message) -> bool {
        let (bytes, len) = message.encode();
        send(&self.0, &bytes[..len], SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
    }

    /// Returns the daemon's next message, if there is one.
    ///
    /// # Errors
    /// The daemon has closed the connection.
    pub(crate) fn receive(&self) -> io::Result<Option<Heard>> {
        let mut bytes = [0; Message::BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&self.0, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Ok(received) if received.bytes == 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let mut descriptors: Vec<OwnedFd> = vec![];
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        let wrong = || io::Error::from(io::ErrorKind::InvalidData);
        match Message::decode(&bytes[..received]).ok_or_else(wrong)? {
            Message::Named(name) => Ok(Some(Heard::Named(name))),
            Message::Absent(secret) => Ok(Some(Heard::Absent(secret))),
            Message::Ring { side, secret } => {
                let [memory, bell]: [OwnedFd; 2] = descriptors.try_into().map_err(|_| wrong())?;
                Ok(Some(Heard::Ring { side, secret, memory, bell }))
            }
            Message::Attached(address) => {
                let [memory, bell]: [OwnedFd; 2] = descriptors.try_into().map_err(|_| wrong())?;
                Ok(Some(Heard::Attached { address, memory, bell }))
            }
            Message::Declined(why) => Ok(Some(Heard::Declined(why))),
            Message::Reached(peer, reach) => Ok(Some(Heard::Reached(peer, reach))),
            Message::Keys(ticket, answer) => Ok(Some(Heard::Keys(ticket, answer))),
            Message::Join(..) | Message::Attach(_) | Message::Reach(_) | Message::Key(_) => Err(wrong()),
        }
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether the listening process is one that may hand out rings: root as this process sees it, outside its PID namespace, or of the same
/// user, who could read the memory of this process anyway.
fn is_trusted(socket: &OwnedFd) -> io::Result<bool> {
    let mut peer = libc::ucred { pid: -1, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `peer`, which has this length. (rustix cannot represent the process id 0.)
    let result = unsafe {
        let value = std::ptr::from_mut(&mut peer).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, value, &mut len)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(peer.uid == 0 || peer.pid == 0 || peer.uid == rustix::process::geteuid().as_raw())
}
