//! The running vnetd's side: waits for a new vnetd, hands everything over, and ends; or goes on if the new one fails.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use sd_notify::NotifyState;
use vnet::inherit::Inheritance;
use vnet::unix::{ListenError, Listener, Peer};
use vnet_control::engine::Engine;
use vnet_control::take_over::Given;
use vnet_control::take_over::message::{DESCRIPTORS_MAX, Message, PASSED_MAX, Process, VERSION};

use super::channel::{Channel, ChannelError};
use super::{TAKE_OVER, may_take_part, socket_of};
use crate::shared::Shared;

/// Mode of the socket: only root and vnetd's own user may connect.
const SOCKET_MODE: u32 = 0o600;
/// How long a new vnetd may take to introduce itself.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to open everything, while frames flow: 1 024 interfaces take less than two seconds.
const PREPARED_WITHIN: Duration = Duration::from_secs(10);
/// How long it may take to publish its first setup, while frames wait: milliseconds, unless other programs have the processors.
const RUNNING_WITHIN: Duration = Duration::from_secs(2);
/// How long reading may take of what a process has said before its end: it is in the socket's buffer.
const HEARD_WITHIN: Duration = Duration::from_millis(100);
/// How long a killed process may take to end.
const DEAD_WITHIN: Duration = Duration::from_secs(5);

/// A take-over that failed: frames flow as before.
#[derive(Debug, thiserror::Error)]
pub enum GiveError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("{0}")]
    Refused(String),
}

/// The control part's descriptors, and the process's surroundings.
pub struct Own {
    pub descriptors: Vec<(String, OwnedFd)>,
    pub owns_folder: bool,
}

/// The thread that waits for new vnetds.
pub struct Running {
    listener: Arc<Listener>,
    stopping: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Refuses further take-overs. The engine must have been taken from [`Shared`] before.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the thread, which finds the socket shut down.
        self.listener.close();
        if self.thread.join().is_err() {
            tracing::error!("the thread of take-overs ended in a panic");
        }
    }
}

/// Listens beside the control socket, or goes on listening if the socket was handed over.
pub fn listen(control: &Path, inheritance: Option<&Arc<Inheritance>>) -> Result<Listener, ListenError> {
    let path = socket_of(control);
    match inheritance.and_then(|inheritance| Some((inheritance.take_one(TAKE_OVER)?, inheritance))) {
        Some((socket, inheritance)) => Ok(Listener::inherit(&path, socket, inheritance.clone())),
        None => Listener::bind(&path, SOCKET_MODE),
    }
}

/// Starts the thread.
pub fn start(listener: Listener, shared: &Shared, own: Own) -> io::Result<Running> {
    let (listener, stopping, shared) = (Arc::new(listener), Arc::new(AtomicBool::new(false)), shared.clone());
    let thread = std::thread::Builder::new().name("take-over".into()).spawn({
        let (listener, stopping) = (listener.clone(), stopping.clone());
        move || {
            while !stopping.load(Ordering::Relaxed) {
                let event = wait_for(listener.as_fd(), None);
                match event.and_then(|()| listener.accept()) {
                    Ok(stream) => answer(stream, &shared, &listener, &own),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(_) if stopping.load(Ordering::Relaxed) => return,
                    Err(error) => {
                        tracing::warn!("cannot accept a take-over: {error}");
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        }
    })?;
    Ok(Running { listener, stopping, thread })
}

/// Waits until a descriptor is readable; `TimedOut` if it is not within `within`.
fn wait_for(descriptor: BorrowedFd<'_>, within: Option<Duration>) -> io::Result<()> {
    let deadline = within.map(|within| Instant::now() + within);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut events, timeout.as_ref()) {
            Ok(0) if left.is_some_and(|left| left.is_zero()) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// A new vnetd.
struct Heir {
    pid: i32,
    process: OwnedFd,
    channel: Channel,
}

impl Heir {
    /// The process that has connected, if it may take over.
    fn admit(stream: UnixStream) -> Result<Heir, String> {
        let peer = Peer::of(&stream).map_err(|error| error.to_string())?;
        if !may_take_part(&peer) {
            return Err(format!("{peer} is neither root nor vnetd's own user"));
        }
        let pid = peer.pid.and_then(Pid::from_raw).ok_or("it is in another process id namespace")?;
        let process = pidfd_open(pid, PidfdFlags::empty());
        let process =
            process.map_err(|error| format!("cannot watch process {}: {error}", pid.as_raw_pid()))?;
        let channel = Channel::new(stream).map_err(|error| error.to_string())?;
        Ok(Heir { pid: pid.as_raw_pid(), process, channel })
    }

    /// Kills the process, unless it has ended, and waits for its end: then it reads no frame any more. False if it does not end.
    fn end(&self) -> bool {
        // Fails if it has ended.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
        let ended = wait_for(self.process.as_fd(), Some(DEAD_WITHIN));
        if let Err(error) = &ended {
            tracing::error!("process {}, which has failed to take over, does not end: {error}", self.pid);
        }
        ended.is_ok()
    }

    /// Ends the process. Returns whether it may have used keys of sealed links: it says that it begins before it uses one, so a process that
    /// is dead and has not said so used none (`vnet::link::succession`).
    fn end_and_hear(&self) -> bool {
        if !self.end() {
            return true;
        }
        loop {
            match self.channel.receive(HEARD_WITHIN) {
                Ok((Message::Begins, _)) => return true,
                Ok(_) | Err(ChannelError::Refused(_)) => {}
                Err(ChannelError::Ended) => return false,
                Err(_) => return true,
            }
        }
    }
}

/// Talks to a process that has connected. Returns if this vnetd goes on.
fn answer(stream: UnixStream, shared: &Shared, listener: &Listener, own: &Own) {
    let heir = match Heir::admit(stream) {
        Ok(heir) => heir,
        Err(why) => return tracing::warn!("refused a take-over: {why}"),
    };
    let given = introduction(&heir.channel).and_then(|release| {
        tracing::info!("process {} with version {release} is about to take over", heir.pid);
        // Nobody changes the engine from now on. `None`: vnetd is stopping.
        let locked = shared.lock();
        let engine = locked.as_ref().ok_or_else(|| refuse(&heir.channel, "vnetd is stopping".into()))?;
        give(engine, &heir, listener, own)
    });
    if let Err(error) = given {
        tracing::warn!("process {} has not taken over, this vnetd goes on: {error}", heir.pid);
    }
}

/// The release of the new vnetd.
fn introduction(channel: &Channel) -> Result<String, GiveError> {
    match channel.receive(HELLO_WITHIN)?.0 {
        Message::Hello { version: VERSION, release } => Ok(release),
        Message::Hello { release, .. } => {
            let own = env!("CARGO_PKG_VERSION");
            let why = format!("versions {release} and {own} differ too much: restart vnetd instead");
            Err(refuse(channel, why))
        }
        _ => Err(ChannelError::Unexpected.into()),
    }
}

/// Hands everything over and ends this process. Returns the reason if this vnetd goes on.
fn give(engine: &Engine, heir: &Heir, listener: &Listener, own: &Own) -> Result<(), GiveError> {
    let channel = &heir.channel;
    let mut given = engine.estate().map_err(|why| refuse(channel, why))?;
    let mine = own.descriptors.iter().map(|(name, file)| (name.as_str(), file.as_fd()));
    for (name, file) in mine.chain([(TAKE_OVER, listener.as_fd())]) {
        let file = file.try_clone_to_owned().map_err(ChannelError::from)?;
        given.descriptors.push((name.to_owned(), file));
    }
    if let Err(error) = prepare(channel, &given, own) {
        if !matches!(error, ChannelError::Refused(_)) {
            heir.end();
        }
        return Err(error.into());
    }
    let began = Instant::now();
    let Some(still) = engine.stand_still() else {
        return Err(refuse(channel, "a dispatcher does not stop; see the load of this host".into()));
    };
    tracing::debug!("dispatchers stand still after {} us", began.elapsed().as_micros());
    let mut has_begun = false;
    let done = last_step(channel, engine, &mut has_begun);
    if let Err(error) = done {
        // After an answer that cannot be read, what follows cannot either.
        let is_clear = matches!(error, ChannelError::Late | ChannelError::Ended | ChannelError::Refused(_));
        let has_ended_unused = !heir.end_and_hear() && is_clear && !has_begun;
        engine.reclaim(!has_ended_unused);
        drop(still);
        engine.go_on();
        return Err(error.into());
    }
    let after_ms = began.elapsed().as_millis();
    tracing::info!("process {} has taken over, {after_ms} ms after this one stood still", heir.pid);
    // A service manager accepts this from its main process only.
    let _ = sd_notify::notify(&[NotifyState::MainPid(heir.pid as u32)]);
    // Nothing is closed or removed in order: the new vnetd has it.
    std::process::exit(0);
}

/// Tells the new vnetd why nothing is handed over.
fn refuse(channel: &Channel, why: String) -> GiveError {
    // It may have ended.
    let _ = channel.send(&Message::Refused { why: why.clone() }, &[]);
    GiveError::Refused(why)
}

/// Passes settings and descriptors, and waits until the new vnetd has opened everything. Frames flow meanwhile.
fn prepare(channel: &Channel, given: &Given<'_>, own: &Own) -> Result<(), ChannelError> {
    let Given { estate, descriptors, .. } = given;
    if descriptors.len() > DESCRIPTORS_MAX {
        let why =
            format!("{} descriptors, more than {DESCRIPTORS_MAX}: restart vnetd instead", descriptors.len());
        channel.send(&Message::Refused { why: why.clone() }, &[])?;
        return Err(ChannelError::Refused(why));
    }
    let process = Process {
        owns_folder: own.owns_folder,
        notify_socket: std::env::var("NOTIFY_SOCKET").ok(),
        watchdog_us: std::env::var("WATCHDOG_USEC").ok().and_then(|us| us.parse().ok()),
    };
    let estate =
        Message::Estate { estate: Box::new(estate.clone()), descriptors: descriptors.len(), process };
    channel.send(&estate, &[])?;
    for some in descriptors.chunks(PASSED_MAX) {
        let names = some.iter().map(|(name, _)| name.clone()).collect();
        let files: Vec<_> = some.iter().map(|(_, file)| file.as_fd()).collect();
        channel.send(&Message::Descriptors { names }, &files)?;
    }
    match channel.receive(PREPARED_WITHIN)?.0 {
        Message::Prepared => Ok(()),
        _ => Err(ChannelError::Unexpected),
    }
}

/// Passes the last state, and waits until frames flow again. `has_begun`: the new vnetd may use keys of sealed links.
fn last_step(channel: &Channel, engine: &Engine, has_begun: &mut bool) -> Result<(), ChannelError> {
    let began = Instant::now();
    let (last, sealed, pairs) = (Box::new(engine.last()), engine.sealed_states(), engine.pair_states());
    channel.send(&Message::Last { last, sealed: sealed.len(), pairs: pairs.len() }, &[])?;
    sealed.iter().chain(&pairs).try_for_each(|state| channel.send_sealed(state))?;
    tracing::debug!("the last state is sent after {} us", began.elapsed().as_micros());
    let deadline = Instant::now() + RUNNING_WITHIN;
    match channel.receive(RUNNING_WITHIN)?.0 {
        Message::Begins => *has_begun = true,
        _ => return Err(ChannelError::Unexpected),
    }
    match channel.receive(deadline.saturating_duration_since(Instant::now()))?.0 {
        Message::Running => Ok(()),
        _ => Err(ChannelError::Unexpected),
    }
}
