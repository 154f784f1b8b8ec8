//! The control thread of one interface: accepts or connects to a front end, serves its messages, and then waits for the next
//! front end.
//!
//! Crate `vhost` reads and checks most messages. This thread takes four messages off the socket before the crate sees them:
//! SET_VRING_ENABLE, because QEMU sends it before SET_FEATURES, which the crate refuses; SEND_RARP, NET_SET_MTU and SET_LOG_FD,
//! because the crate does not support them.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{self, Arc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use vhost::vhost_user::message::FrontendReq;
use vhost::vhost_user::{BackendReqHandler, Error, Result, VhostUserBackendReqHandlerMut};

use super::closer;
use super::queue_pairs::Device;
use super::session::{Session, refuse};
use crate::log_limit::LogLimit;
use crate::unix::{Listener, Peer, connect};

/// Minimum and maximum backoff between two attempts to connect. A connection that lasted longer than the maximum resets the
/// backoff.
const BACKOFF_MIN: Duration = Duration::from_millis(10);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Pause after a front end that disconnected at once, so that a reconnect loop costs little processor time.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);
/// Size of a message's header in bytes, and of a message with a 64-bit payload.
const HEADER_LEN: usize = 12;
const MESSAGE_LEN: usize = HEADER_LEN + 8;
// Flag bits of the header (vhost-user, "Header").
const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;

/// vnetd's end of the Unix socket.
pub(super) enum Endpoint {
    /// Server: front ends connect to vnetd.
    Listen(Listener),
    /// Client: vnetd connects to the front end.
    Connect(PathBuf),
}

/// Lets another thread stop the control thread wherever it is waiting.
pub(super) struct Stop {
    requested: AtomicBool,
    /// An eventfd that wakes the control thread.
    bell: OwnedFd,
    /// The connection being served: shutting it down ends blocked reads and writes.
    serving: Mutex<Option<Served>>,
}

/// A connection with a front end.
struct Served {
    stream: UnixStream,
    session: Arc<sync::Mutex<Session>>,
}

impl Stop {
    pub(super) fn new() -> std::io::Result<Stop> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Stop { requested: AtomicBool::new(false), bell, serving: Mutex::new(None) })
    }

    /// Requests that the control thread stop.
    pub(super) fn request(&self) {
        self.requested.store(true, Ordering::SeqCst);
        // The bell is never read, so its counter cannot be full.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        if let Some(Served { stream, .. }) = &*self.serving.lock() {
            // Fails only if the connection has already ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub(super) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// Registers the connection being served. Returns false if a stop has been requested.
    fn serve(&self, connection: &Connection) -> std::io::Result<bool> {
        let (stream, session) = (connection.ours.try_clone()?, connection.session.clone());
        *self.serving.lock() = Some(Served { stream, session });
        Ok(!self.is_requested())
    }

    /// Runs `look` on the connection being served, and on what its front end has said.
    pub(super) fn served<R>(&self, look: impl FnOnce(&UnixStream, &Session) -> R) -> Option<R> {
        let serving = self.serving.lock();
        let Served { stream, session } = serving.as_ref()?;
        Some(look(stream, &locked(session)))
    }

    /// Ends the connection being served. Descriptors that the front end sent may still be in flight on it.
    fn end(&self) {
        let Some(Served { stream, .. }) = self.serving.lock().take() else { return };
        // Tells the front end now, even if the closer blocks.
        let _ = stream.shutdown(Shutdown::Both);
        closer::close(stream);
    }

    /// Waits until one of `fds` is readable or `timeout` expires. Returns the index of the first readable descriptor, or
    /// `fds.len()` if there is none. `None` if the thread must stop.
    fn wait(&self, fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Option<usize> {
        let timeout =
            timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: t.subsec_nanos().into() });
        let mut polled = vec![PollFd::new(&self.bell, PollFlags::IN)];
        polled.extend(fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        if let Err(error) = poll(&mut polled, timeout.as_ref())
            && error != rustix::io::Errno::INTR
        {
            tracing::error!(%error, "cannot wait for the front end");
            return None;
        }
        let ready = polled[1..].iter().position(|fd| !fd.revents().is_empty());
        (!self.is_requested()).then(|| ready.unwrap_or(fds.len()))
    }
}

/// Body of the control thread. It serves `first`, if there is one, before other front ends.
pub(super) fn run(device: &Arc<Device>, endpoint: &Endpoint, stop: &Stop, mut first: Option<Connection>) {
    let path = device.options.socket.display();
    let (mut backoff, mut log_limit) = (Backoff::default(), LogLimit::default());
    loop {
        if let Some(connection) = first.take() {
            let result = serve(device, endpoint, Ok(connection), stop);
            end(device, stop);
            match result {
                Ok(()) => tracing::info!(%path, "QEMU (vhost-user front end) disconnected"),
                Err(error) => tracing::warn!(
                    %path,
                    "front end broke the vhost-user protocol, connection dropped: {error}"
                ),
            }
        }
        let Some((stream, peer)) = next_front_end(device, endpoint, stop, &mut backoff) else { return };
        // A front end that reconnects in a loop causes one pair of log lines per second.
        let logged = log_limit.allow();
        if let Some(suppressed) = logged {
            tracing::info!(%path, %peer, suppressed, "QEMU (vhost-user front end) connected");
        }
        device.set_status(
            "QEMU (the vhost-user front end) is connected; the guest's driver has not started its queues"
                .to_owned(),
        );
        let began = Instant::now();
        let connection = Connection::new(device.clone(), stream, peer);
        let result = serve(device, endpoint, connection, stop);
        end(device, stop);
        let lasted = began.elapsed() >= BACKOFF_MAX;
        match result {
            Ok(()) if lasted || logged.is_some() => {
                tracing::info!(%path, "QEMU (vhost-user front end) disconnected")
            }
            Err(error) if lasted || logged.is_some() => {
                tracing::warn!(%path, "front end broke the vhost-user protocol, connection dropped: {error}");
            }
            _ => {}
        }
        if lasted {
            backoff = Backoff::default();
        } else {
            device.set_status(format!("QEMU (the vhost-user front end) at {path} disconnected at once"));
            let pause = match endpoint {
                Endpoint::Listen(_) => RECONNECT_PAUSE,
                Endpoint::Connect(_) => backoff.next(),
            };
            stop.wait(&[], Some(pause));
        }
    }
}

/// Ends a connection.
fn end(device: &Device, stop: &Stop) {
    let _turn = device.turn.lock();
    device.signals.slow.allowance.charged(|| {
        stop.end();
        device.reset_all();
    });
}

/// Exponential backoff: each pause is twice as long as the previous one, up to [`BACKOFF_MAX`].
struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff(BACKOFF_MIN)
    }
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(BACKOFF_MAX);
        pause
    }
}

/// Waits for the next front end's connection. `None` if the thread must stop.
fn next_front_end(
    device: &Device,
    endpoint: &Endpoint,
    stop: &Stop,
    backoff: &mut Backoff,
) -> Option<(UnixStream, Peer)> {
    let path = device.options.socket.display();
    match endpoint {
        Endpoint::Listen(listener) => {
            device.set_status(format!("waiting for QEMU (a vhost-user front end) to connect to {path}"));
            while stop.wait(&[listener.as_fd()], None).is_some() {
                match listener.accept() {
                    Ok(stream) => {
                        if let Some(admitted) = device.admission.admit(stream) {
                            return Some(admitted);
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%path, %error, "cannot accept a front end");
                        stop.wait(&[], Some(RECONNECT_PAUSE));
                    }
                }
            }
            None
        }
        Endpoint::Connect(socket) => {
            while !stop.is_requested() {
                match connect(socket) {
                    Ok(stream) => match device.admission.admit(stream) {
                        Some(admitted) => return Some(admitted),
                        None => device.set_status(format!("the front end at {path} is refused, see the log")),
                    },
                    Err(error) => device
                        .set_status(format!("cannot reach QEMU (a vhost-user front end) at {path}: {error}")),
                }
                stop.wait(&[], Some(backoff.next()));
            }
            None
        }
    }
}

/// Waits for the front end's next message, and refuses other front ends during the wait. Returns false if the thread must stop.
fn wait_for_message(device: &Device, endpoint: &Endpoint, ours: &UnixStream, stop: &Stop) -> bool {
    let mut fds = vec![ours.as_fd()];
    let listener = match endpoint {
        Endpoint::Listen(listener) => Some(listener),
        Endpoint::Connect(_) => None,
    };
    fds.extend(listener.map(AsFd::as_fd));
    loop {
        match stop.wait(&fds, None) {
            None => return false,
            // Checked first: the end of this connection takes precedence over new ones, so that no front end is refused because
            // of one that has disconnected.
            Some(0) => return true,
            Some(_) => {}
        }
        if let Some(listener) = listener
            && let Err(error) = device.admission.refuse_waiting(listener)
        {
            tracing::debug!(%error, "cannot accept a front end");
            if stop.wait(&[ours.as_fd()], Some(RECONNECT_PAUSE)) == Some(0) {
                return true;
            }
        }
    }
}

/// Serves one front end until it disconnects, breaks the protocol, or the thread must stop.
fn serve(
    device: &Arc<Device>,
    endpoint: &Endpoint,
    connection: Result<Connection>,
    stop: &Stop,
) -> Result<()> {
    let mut connection = connection?;
    let ours = connection.ours.try_clone().map_err(Error::SocketError)?;
    {
        let _turn = device.turn.lock();
        if !stop.serve(&connection).map_err(Error::SocketError)? {
            return Ok(());
        }
    }
    let allowance = &device.signals.slow.allowance;
    while wait_for_message(device, endpoint, &ours, stop) {
        if let Some(rest) = allowance.rest()
            && stop.wait(&[], Some(rest)).is_none()
        {
            return Ok(());
        }
        let _turn = device.turn.lock();
        match allowance.charged(|| connection.message()) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            // This side shut the connection down.
            Err(_) if stop.is_requested() => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The session is used by the control thread, and by another one while no message is handled.
fn locked(session: &sync::Mutex<Session>) -> sync::MutexGuard<'_, Session> {
    session.lock().expect("a panic ends the process")
}

/// A connection with a front end.
pub(super) struct Connection {
    ours: UnixStream,
    /// Crate `vhost` implements its handler trait for the standard library's mutex only.
    session: Arc<sync::Mutex<Session>>,
    handler: BackendReqHandler<sync::Mutex<Session>>,
}

impl Connection {
    pub(super) fn new(device: Arc<Device>, stream: UnixStream, peer: Peer) -> Result<Connection> {
        let ours = stream.try_clone().map_err(Error::SocketError)?;
        let session = Arc::new(sync::Mutex::new(Session::new(device, peer)));
        Ok(Connection { ours, handler: BackendReqHandler::from_stream(stream, session.clone()), session })
    }

    /// What the front end has said.
    pub(super) fn session(&self) -> sync::MutexGuard<'_, Session> {
        locked(&self.session)
    }

    /// Goes on with `stream` instead of the socket `place` on which the connection was created.
    pub(super) fn move_to(&mut self, stream: UnixStream, place: RawFd) -> Result<()> {
        // SAFETY: `place` is the handler's socket, which stays open as long as the handler and is used by this thread alone. The call
        // replaces the file behind it in one step, so the handler owns an open descriptor before and after.
        if unsafe { libc::dup3(stream.as_raw_fd(), place, libc::O_CLOEXEC) } < 0 {
            return Err(Error::SocketError(std::io::Error::last_os_error()));
        }
        self.ours = stream;
        Ok(())
    }

    /// Handles the next message, and waits for the rest of it. Returns false at the end of the connection.
    ///
    /// # Errors
    /// The message is malformed or refused: the connection must end.
    pub(super) fn message(&mut self) -> Result<bool> {
        let mut message = [0; MESSAGE_LEN];
        let (_, len) = rustix::net::recv(&self.ours, &mut message[..], RecvFlags::PEEK)
            .map_err(|e| Error::SocketError(e.into()))?;
        let code = u32::from_ne_bytes([message[0], message[1], message[2], message[3]]);
        let request = FrontendReq::try_from(code).ok();
        let ours = &mut self.ours;
        let session = || locked(&self.session);
        let result = match request {
            Some(
                request @ (FrontendReq::SET_VRING_ENABLE | FrontendReq::SEND_RARP | FrontendReq::NET_SET_MTU),
            ) if len == MESSAGE_LEN => {
                ours.read_exact(&mut message).map_err(Error::SocketError)?;
                handle(&mut session(), request, &message, ours)
            }
            Some(FrontendReq::SET_LOG_FD) if len >= HEADER_LEN => handle_log_fd(&mut session(), ours),
            _ => self.handler.handle_request(),
        };
        match result {
            Ok(()) | Err(Error::SocketRetry(_)) => Ok(true),
            Err(Error::Disconnected) => Ok(false),
            Err(error) => {
                let name = request.map_or_else(|| format!("message {code}"), |r| format!("{r:?}"));
                Err(refuse(format!("{name}: {}", text(&error))))
            }
        }
    }
}

/// An error's message, without the prefix that the crate adds to vnet's errors.
pub(super) fn text(error: &Error) -> String {
    match error {
        Error::ReqHandlerError(ours) => ours.to_string(),
        other => other.to_string(),
    }
}

/// Handles the messages that crate `vhost` does not support.
fn handle(
    session: &mut Session,
    request: FrontendReq,
    message: &[u8; MESSAGE_LEN],
    stream: &mut UnixStream,
) -> Result<()> {
    let word =
        |at: usize| u32::from_ne_bytes([message[at], message[at + 1], message[at + 2], message[at + 3]]);
    let (flags, size) = (word(4), word(8));
    if flags & (VERSION_MASK | REPLY) != VERSION || size as usize != MESSAGE_LEN - HEADER_LEN {
        return Err(Error::InvalidMessage);
    }
    let [.., a, b, c, d, e, f, g, h] = *message;
    let payload = [a, b, c, d, e, f, g, h];
    let accepted = match request {
        FrontendReq::SET_VRING_ENABLE => {
            let enable = match word(HEADER_LEN + 4) {
                0 => false,
                1 => true,
                other => return Err(refuse(format!("enable is 0 or 1, not {other}"))),
            };
            session.set_vring_enable(word(HEADER_LEN), enable).map(|()| true)
        }
        FrontendReq::SEND_RARP => session.send_rarp(payload).map(|()| true),
        FrontendReq::NET_SET_MTU => Ok(session.set_mtu(u64::from_ne_bytes(payload))),
        _ => Err(Error::InvalidMessage),
    };
    acknowledge(session, request, flags, matches!(accepted, Ok(true)), stream)?;
    accepted.map(drop)
}

/// Handles SET_LOG_FD: an eventfd without payload.
fn handle_log_fd(session: &mut Session, stream: &mut UnixStream) -> Result<()> {
    let (mut message, mut space) =
        ([0; HEADER_LEN], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
    let mut received = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    // The kernel closes descriptors beyond the first, for which there is no space.
    let got = rustix::net::recvmsg(&*stream, &mut [IoSliceMut::new(&mut message)], &mut received, flags)
        .map_err(|e| Error::SocketError(e.into()))?;
    let mut files = received.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let file = files.by_ref().flatten().next().map(File::from);
    let word =
        |at: usize| u32::from_ne_bytes([message[at], message[at + 1], message[at + 2], message[at + 3]]);
    let (flags, size) = (word(4), word(8));
    let well_formed = got.bytes == HEADER_LEN && flags & (VERSION_MASK | REPLY) == VERSION && size == 0;
    let Some(file) = file else { return Err(Error::IncorrectFds) };
    if !well_formed || got.flags.contains(ReturnFlags::CTRUNC) {
        closer::close(file);
        return Err(Error::InvalidMessage);
    }
    let accepted = session.set_log_fd(file);
    acknowledge(session, FrontendReq::SET_LOG_FD, flags, accepted.is_ok(), stream)?;
    accepted
}

/// Sends the acknowledgement of a message if the front end wants one.
fn acknowledge(
    session: &Session,
    request: FrontendReq,
    flags: u32,
    accepted: bool,
    stream: &mut UnixStream,
) -> Result<()> {
    if flags & NEED_REPLY == 0 || !session.acknowledges() {
        return Ok(());
    }
    let mut reply = [0; MESSAGE_LEN];
    reply[..4].copy_from_slice(&(request as u32).to_ne_bytes());
    reply[4..8].copy_from_slice(&(VERSION | REPLY).to_ne_bytes());
    reply[8..12].copy_from_slice(&8u32.to_ne_bytes());
    reply[12..].copy_from_slice(&u64::from(!accepted).to_ne_bytes());
    stream.write_all(&reply).map_err(Error::SocketError)
}
