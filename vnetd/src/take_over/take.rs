//! The new vnetd's side: gets everything from the running vnetd, and takes its place.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::inherit::Inheritance;
use vnet::link::rendezvous::relay_succession::PairState;
use vnet::link::succession::{SealedState, SuccessionError};
use vnet::unix::{self, Peer};
use vnet_control::desired::Desired;
use vnet_control::engine::{Engine, EngineError};
use vnet_control::overlay::Computed;
use vnet_control::take_over::message::{DESCRIPTORS_MAX, Message, PAIRS_MAX, Process, SEALED_MAX, VERSION};
use vnet_control::take_over::{LastState, Taking};

use super::channel::{Channel, ChannelError};
use super::{may_take_part, socket_of};

/// How long the running vnetd may take to answer: a request may be under way.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// How long it may take to stand still and to send its last state.
const LAST_WITHIN: Duration = Duration::from_secs(5);
/// How long it may take to end.
const END_WITHIN: Duration = Duration::from_secs(10);

/// An error of the last state.
#[derive(Debug, thiserror::Error)]
enum TakeError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error(transparent)]
    Sealed(#[from] SuccessionError),
}

/// A take-over under way.
pub struct Taker {
    channel: Arc<Channel>,
    pid: i32,
    /// The descriptors that were handed over.
    pub inheritance: Arc<Inheritance>,
    /// The running vnetd's settings.
    pub desired: Desired,
    /// The running vnetd and its surroundings.
    pub process: Process,
    taking: Option<Taking>,
}

impl Taker {
    /// Connects to the running vnetd with this control socket, and gets its settings and descriptors.
    ///
    /// # Errors
    /// No vnetd runs there, or it refuses; one line.
    pub fn connect(control: &Path) -> Result<Taker, String> {
        let path = socket_of(control);
        let stream = unix::connect(&path).map_err(|error| {
            format!(
                "cannot take over: no vnetd answers at '{}': {error}; start vnetd without --take-over",
                path.display()
            )
        })?;
        let failed = |error: ChannelError| format!("cannot take over: {error}");
        let peer = Peer::of(&stream).map_err(|error| format!("cannot take over: {error}"))?;
        if !may_take_part(&peer) {
            return Err(format!("cannot take over: '{}' is of {peer}", path.display()));
        }
        let pid = peer.pid.unwrap_or(0);
        let channel = Channel::new(stream).map_err(failed)?;
        let hello = Message::Hello { version: VERSION, release: env!("CARGO_PKG_VERSION").into() };
        channel.send(&hello, &[]).map_err(failed)?;
        let (message, _) = channel.receive(ANSWER_WITHIN).map_err(failed)?;
        let Message::Estate { estate, descriptors, process } = message else {
            return Err(failed(ChannelError::Unexpected));
        };
        let mut all = vec![];
        while all.len() < descriptors.min(DESCRIPTORS_MAX) {
            match channel.receive(ANSWER_WITHIN).map_err(failed)? {
                (Message::Descriptors { names }, files) if !names.is_empty() => {
                    all.extend(names.into_iter().zip(files))
                }
                _ => return Err(failed(ChannelError::Unexpected)),
            }
        }
        let inheritance = Arc::new(Inheritance::new(all));
        let taking = Taking::new(*estate, inheritance.clone()).map_err(|error| {
            let why = error.to_string();
            refuse(&channel, &why);
            format!("cannot take over: {why}")
        })?;
        let (channel, desired) = (Arc::new(channel), taking.desired.clone());
        Ok(Taker { channel, pid, inheritance, desired, process, taking: Some(taking) })
    }

    /// Starts the engine in the place of the running vnetd's. Returns once frames flow here.
    ///
    /// # Errors
    /// The running vnetd goes on.
    pub fn engine(
        &mut self,
        last_known: impl FnOnce(&Engine, &Desired) -> Computed,
    ) -> Result<Engine, EngineError> {
        let taking = self.taking.take().expect("an engine is started once");
        let failed = |error: &dyn std::fmt::Display| format!("cannot take over: {error}");
        let channel = self.channel.clone();
        let last = move || last_state(&channel).map_err(|error| failed(&error));
        let channel = self.channel.clone();
        let begins = move || channel.send(&Message::Begins, &[]).map_err(|error| failed(&error));
        let engine = Engine::take_over(taking, last_known, last, begins);
        engine.inspect_err(|error| self.refuse(&error.to_string()))
    }

    /// Tells the running vnetd that this one gives up.
    pub fn refuse(&self, why: &str) {
        refuse(&self.channel, why);
    }

    /// Tells the running vnetd that frames flow here, and waits for its end: then everything belongs to `engine`.
    pub fn finish(self, engine: &mut Engine) {
        let began = Instant::now();
        tracing::debug!("the first setup is published");
        // If it has died, everything belongs to this process all the same.
        let _ = self.channel.send(&Message::Running, &[]);
        while !self.channel.until_closed(END_WITHIN) {
            tracing::warn!("process {}, which has been taken over, does not end", self.pid);
        }
        engine.settle();
        tracing::info!(
            "has taken over from process {}, which has ended after {} ms",
            self.pid,
            began.elapsed().as_millis()
        );
    }

    /// Joins the running vnetd's control group and takes over its service manager's variables. Call it before any thread starts.
    pub fn join_service(&self) {
        let Process { notify_socket: Some(socket), watchdog_us, .. } = &self.process else { return };
        // SAFETY: no other thread reads the environment, because none has been started yet.
        unsafe {
            std::env::set_var("NOTIFY_SOCKET", socket);
            if let Some(us) = watchdog_us {
                std::env::set_var("WATCHDOG_USEC", us.to_string());
            }
        }
        let group = std::fs::read_to_string(format!("/proc/{}/cgroup", self.pid)).unwrap_or_default();
        // The line of version 2 of control groups: 0::/system.slice/vnetd.service
        let Some(group) = group.lines().find_map(|line| line.strip_prefix("0::/")) else { return };
        let file = format!("/sys/fs/cgroup/{group}/cgroup.procs");
        if let Err(error) = std::fs::write(&file, std::process::id().to_string()) {
            tracing::warn!("cannot join the service's control group by '{file}': {error}");
        }
    }
}

/// Has the running vnetd stand still, and gets its last state.
fn last_state(channel: &Channel) -> Result<LastState, TakeError> {
    channel.send(&Message::Prepared, &[])?;
    let Message::Last { last, sealed, pairs } = channel.receive(LAST_WITHIN)?.0 else {
        return Err(ChannelError::Unexpected.into());
    };
    if sealed > SEALED_MAX || pairs > PAIRS_MAX {
        return Err(ChannelError::Unexpected.into());
    }
    let one = |_| channel.receive_sealed(LAST_WITHIN);
    let sealed =
        (0..sealed).map(|at| Ok(SealedState::parse(&one(at)?)?)).collect::<Result<_, TakeError>>()?;
    let pairs = (0..pairs).map(|at| Ok(PairState::parse(&one(at)?)?)).collect::<Result<_, TakeError>>()?;
    tracing::debug!("the last state is here");
    Ok(LastState { last: *last, sealed, pairs })
}

fn refuse(channel: &Channel, why: &str) {
    let why = why.lines().collect::<Vec<_>>().join("; ");
    // It may have ended.
    let _ = channel.send(&Message::Refused { why }, &[]);
}
