//! vnetd: one daemon per host. It makes the host match its configuration file.
//!
//! Startup: read the configuration, bind the control socket, start the engine, report ready. Then vnetd serves requests and
//! signals: SIGHUP reloads the file, SIGTERM and SIGINT stop vnetd cleanly. All of this runs on one thread; the core's
//! dispatchers move frames and never wait for that thread.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{CommandFactory, Parser};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use vnet::unix::{ListenError, Listener};
use vnet_control::config::{self, Configuration};
use vnet_control::desired::{CONTROL_SOCKET, Desired, Item};
use vnet_control::engine::{Engine, EngineError};
use vnet_control::events::Asker;
use vnet_control::kept;
use vnet_control::overlay::Computed;

use crate::events::Hub;
use crate::follow::Followers;
use crate::handlers::App;
use crate::paced::Pace;
use crate::rdma_engine::RdmaEngine;
use crate::remote::Remote;
use crate::shared::Shared;
use crate::take_over::take::Taker;
use crate::take_over::{CONTROL, background, give};
use crate::watchdog::notify;
use crate::{events, follow, handlers, interface_watch, meetings, overlay, privileges, serve, watchdog};

/// Default path of the configuration file.
const CONFIG: &str = "/etc/vnet/vnet.toml";
/// Mode of the control socket: only root and vnetd's own user may connect.
const CONTROL_SOCKET_MODE: u32 = 0o600;

/// The vnet daemon: puts this host's virtual machines and containers on one Ethernet LAN with those of other hosts.
#[derive(Parser)]
#[command(name = "vnetd", version, long_about = LONG_ABOUT, after_long_help = AFTER_HELP)]
struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    config: PathBuf,

    /// Check the configuration file and the certificates and keys that it names, and exit: nothing is changed
    #[arg(long)]
    check: bool,

    /// Take the place of the running vnetd of this host, under traffic: it hands over interfaces, sockets and state, and ends.
    /// If anything is wrong, it goes on. Upgrades vnetd without a lost frame
    #[arg(long, conflicts_with = "check")]
    take_over: bool,

    /// Return once frames flow through the new vnetd, which goes on in the background
    #[arg(long, requires = "take_over")]
    detach: bool,

    /// Remove the TAP devices that a vnetd with this configuration's control socket has left, and exit: vnetd is not to run on
    /// this host again
    #[arg(long, conflicts_with_all = ["check", "take_over"])]
    remove_taps: bool,

    /// Be the privileged helper of the vnetd that starts this process
    #[arg(long, hide = true, conflicts_with_all = ["check", "take_over"])]
    helper: bool,

    /// Print the manual page, for packages
    #[arg(long, hide = true)]
    man: bool,

    /// What to log on standard error: off, error, warn, info, debug, trace, or TARGET=LEVEL[,...]
    #[arg(long, value_name = "FILTER", env = "RUST_LOG", default_value = "info")]
    log: Targets,
}

const LONG_ABOUT: &str = "\
The vnet daemon. One runs on every host of the overlay. It attaches virtual machines (vhost-user) and containers (veth) \
as interfaces, reaches other hosts by links over UDP, and carries Ethernet frames between them, so that all of them \
are on one LAN.

The configuration file describes the desired state of the host. While vnetd runs, 'vnet' changes that state by commands, or \
SIGHUP makes vnetd reload the file. Both change only objects that differ, without disturbing other traffic. \
A configuration with an error changes nothing.";

const AFTER_HELP: &str = "\
Signals:
  SIGHUP            reload the configuration file and apply the difference; changes made by commands
                    meanwhile and not saved to the file are undone. [control], [dispatch], [identity],
                    [overlay], and [bridge] except trusted, need a restart
  SIGTERM, SIGINT   stop: guests see their links go down, sockets and containers' veths are
                    removed; TAP devices stay, without a carrier, for the next vnetd

Upgrade:
  --take-over connects to the running vnetd at its control socket with '.take-over' appended. That one
  hands over everything and ends; if a step fails, it goes on, and both say why. Under systemd
  'systemctl reload vnetd' does this once another build of vnetd has been installed

Files:
  /etc/vnet/vnet.toml   the configuration, TOML; an example is packaging/vnet.toml
  /run/vnet/vnet.sock   the control socket (HTTP/JSON), for root and vnetd's own user, unless
                        [control] socket names another path. A stale socket is replaced, a socket in use never
  /var/lib/vnet         the overlay's last known state, unless [overlay] state or systemd names another folder

Environment:
  RUST_LOG          like --log, which takes precedence
  NOTIFY_SOCKET     set by systemd: vnetd reports READY, RELOADING and STOPPING there
  WATCHDOG_USEC     set by systemd (WatchdogSec): vnetd reports WATCHDOG while all dispatchers are alive

Exit status:
  0   stopped by a signal, or --check found nothing wrong
  1   refused or failed; one line on standard error for each reason, with file and line
  2   wrong usage

Examples:
  vnetd --check --config vnet.toml      check a file without applying it
  vnetd --config vnet.toml --log debug  run in the foreground with debug messages
  vnetd --take-over --config vnet.toml  take the place of the running vnetd, without a lost frame
  vnetd --remove-taps                   after the last stop: remove the TAP devices that it has left
  systemctl reload vnetd                take over if another vnetd is installed, otherwise send SIGHUP";

/// Makes a panic in any thread abort the process. systemd restarts a dead daemon and guests hardly notice; a daemon in which one
/// thread has died would stall them.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

/// Runs vnetd as its arguments say.
pub fn main() -> ExitCode {
    abort_on_panic();
    let args = Args::parse();
    tracing_subscriber::registry()
        .with(
            tracing_subscriber::fmt::layer()
                .with_writer(std::io::stderr)
                .with_ansi(std::io::stderr().is_terminal()),
        )
        .with(args.log.clone().with_default(args.log.default_level().unwrap_or(LevelFilter::INFO)))
        .init();
    let result = match &args {
        Args { man: true, .. } => man(),
        Args { check: true, config, .. } => check(config),
        Args { remove_taps: true, config, .. } => remove_taps(config),
        Args { helper: true, .. } => privileges::run_helper().map_err(Into::into),
        Args { detach: true, .. } => background::start().map_err(Into::into),
        Args { config, take_over, .. } => run(config, *take_over),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// An error that ends vnetd; its text has one line for each reason.
type Failure = Box<dyn std::error::Error>;

fn man() -> Result<(), Failure> {
    let page = clap_mangen::Man::new(Args::command()).section("8");
    Ok(page.render(&mut std::io::stdout())?)
}

fn check(file: &Path) -> Result<(), Failure> {
    let Configuration { desired, warnings } = config::load(file).and_then(config::check_files)?;
    warnings.iter().for_each(|warning| eprintln!("{}warning: {}", warning.place, warning.text));
    println!("{}: good, {}", file.display(), summary(&desired));
    Ok(())
}

/// Removes what a stopped vnetd has left. Without the default configuration file: one with the default control socket.
fn remove_taps(file: &Path) -> Result<(), Failure> {
    let socket = if file == Path::new(CONFIG) && !file.exists() {
        CONTROL_SOCKET.into()
    } else {
        config::load(file)?.desired.control.spec.socket
    };
    // Held until the end, so that no vnetd starts meanwhile.
    let _held = match Listener::bind(&socket, CONTROL_SOCKET_MODE) {
        Ok(held) => Some(held),
        // Nor is there a list.
        Err(ListenError::NoFolder { .. }) => None,
        Err(ListenError::InUse(_) | ListenError::Locked(_)) => {
            return Err(format!("vnetd runs at '{}'; stop it first", socket.display()).into());
        }
        Err(error) => return Err(error.into()),
    };
    let (removed, stay) = kept::remove_left(&socket);
    if !removed.is_empty() {
        println!("removed: {}", removed.join(", "));
    } else if stay == 0 {
        println!("the vnetd with control socket '{}' has left no TAP device", socket.display());
    }
    match stay {
        0 => Ok(()),
        stay => Err(format!("{stay} of its TAP devices stay, see above; try again").into()),
    }
}

fn summary(desired: &Desired) -> String {
    let count = |n: usize, what| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
    let Desired { interfaces, links, routes, .. } = desired;
    let counts = [(interfaces.len(), "interface"), (links.len(), "link"), (routes.len(), "route")];
    counts.map(|(n, what)| count(n, what)).join(", ")
}

/// vnetd's own directory in /run, as long as vnetd runs. Dropping it removes a directory that this vnetd has made and that is empty.
struct Folder(Option<PathBuf>);

impl Folder {
    /// Creates the directory of the default control socket if `socket` is in it. A service manager may have created it before.
    fn of(socket: &Path) -> Result<Folder, String> {
        let own = Path::new(CONTROL_SOCKET).parent();
        let Some(folder) = socket.parent().filter(|folder| Some(*folder) == own && !folder.exists()) else {
            return Ok(Folder(None));
        };
        std::fs::create_dir_all(folder).map_err(|error| {
            format!(
                "cannot make '{}' for the control socket: {error}; change [control] socket",
                folder.display()
            )
        })?;
        Ok(Folder(Some(folder.into())))
    }

    /// The directory that a running vnetd has made.
    fn inherit(socket: &Path) -> Folder {
        Folder(socket.parent().map(Path::to_owned))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // It is not empty if guests' sockets are in it.
        self.0.iter().for_each(|folder| _ = std::fs::remove_dir(folder));
    }
}

/// Raises the soft limit of open files to the hard limit: each interface takes several descriptors.
fn allow_files() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("cannot raise the limit of open files: {error}");
    }
}

/// What vnetd begins with: opened anew, or handed over by a running vnetd.
struct Beginning {
    desired: Desired,
    folder: Folder,
    socket: Listener,
    remote: Remote,
    /// The socket for take-overs. vnetd runs without it where it cannot be opened.
    take_over: Option<Listener>,
    taker: Option<Taker>,
}

impl Beginning {
    /// Binds the control sockets, or takes those of the vnetd that `taker` takes over.
    fn new(desired: Desired, taker: Option<Taker>) -> Result<Beginning, String> {
        let desired = taker.as_ref().map_or(desired, |taker| taker.desired.clone());
        let Item { place, spec: control } = &desired.control;
        let at = |error: &dyn std::fmt::Display| format!("{place}{error}");
        let inheritance = taker.as_ref().map(|taker| &taker.inheritance);
        let mut folder = Folder::of(&control.socket).map_err(|error| at(&error))?;
        if taker.as_ref().is_some_and(|taker| taker.process.owns_folder) {
            folder = Folder::inherit(&control.socket);
        }
        let handed = inheritance.and_then(|inheritance| Some((inheritance.take_one(CONTROL)?, inheritance)));
        let socket = match handed {
            Some((socket, inheritance)) => Listener::inherit(&control.socket, socket, inheritance.clone()),
            None => Listener::bind(&control.socket, CONTROL_SOCKET_MODE).map_err(|error| at(&error))?,
        };
        let remote = Remote::open(&control.access, inheritance.map(|inheritance| &**inheritance));
        let remote = remote.map_err(|error| at(&error))?;
        let take_over = give::listen(&control.socket, inheritance);
        let take_over = take_over
            .inspect_err(|error| tracing::warn!("no other vnetd can take over from this one: {error}"))
            .ok();
        Ok(Beginning { desired, folder, socket, remote, take_over, taker })
    }

    /// Starts the engine. Returns once frames flow, and a vnetd that was taken over has ended.
    fn engine(
        desired: Desired,
        taker: Option<Taker>,
        last_known: impl FnOnce(&Engine, &Desired) -> Computed,
    ) -> Result<Engine, EngineError> {
        let Some(mut taker) = taker else { return Engine::start_in(desired, last_known) };
        let mut engine = taker.engine(last_known)?;
        taker.finish(&mut engine);
        Ok(engine)
    }
}

/// Connects to the running vnetd, once the configuration file and the files that it names have been found good.
fn connect(configuration: &Configuration) -> Result<Taker, Failure> {
    config::check_files(configuration.clone())?;
    let taker = Taker::connect(&configuration.desired.control.spec.socket)?;
    taker.join_service();
    if taker.desired != configuration.desired {
        tracing::info!(
            "the running vnetd's settings differ from the file and stay; reload (SIGHUP) to apply the file"
        );
    }
    Ok(taker)
}

fn run(file: &Path, take_over: bool) -> Result<(), Failure> {
    privileges::separate()?;
    allow_files();
    let configuration = config::load(file)?;
    configuration.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let taker = if take_over { Some(connect(&configuration)?) } else { None };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Install the handlers first, so that a signal during startup is handled once vnetd is ready.
        let mut signals = Signals::new()?;
        let beginning = Beginning::new(configuration.desired, taker)?;
        let Beginning { desired, folder, socket, remote, take_over, taker } = beginning;
        let mut prepared = None;
        let mut engine = Beginning::engine(desired, taker, |engine, desired| {
            let (overlay, computed) = overlay::prepare(engine, desired).unzip();
            prepared = overlay;
            computed.unwrap_or_default()
        })?;
        let (events, followers) = (Hub::new(), Arc::new(Followers::default()));
        engine.tell(events.sink());
        let ready = ready_line(&engine, &remote);
        let pulse = engine.pulse();
        let inbox = engine.inbox().clone();
        let shared: Shared = Arc::new(Mutex::new(Some(engine)));
        let interfaces = interface_watch::start(&shared)?;
        let rdma = RdmaEngine::start()?;
        let meetings = meetings::start(&shared, &rdma)?;
        let overlay = prepared.map(|prepared| overlay::start(&shared, prepared)).transpose()?.flatten();
        let app = App {
            shared: shared.clone(),
            events: events.clone(),
            followers: followers.clone(),
            token: remote.token.clone(),
            rdma: rdma.clone(),
            pace: Pace::default(),
        };
        let own = own_descriptors(&socket, &remote, &folder)?;
        let listener = tokio::net::UnixListener::from_std(socket.try_clone()?)?;
        let mut servers = tokio::task::JoinSet::new();
        servers.spawn(serve::unix(listener, handlers::router(app.clone())));
        servers.spawn(events::watch(shared.clone(), events));
        servers.spawn(follow::serve(shared.clone(), followers, inbox));
        remote.serve(app, &mut servers);
        if let Some(period) = sd_notify::watchdog_enabled() {
            servers.spawn(watchdog::serve(period, pulse));
        }
        let giver = take_over.map(|listener| give::start(listener, &shared, own)).transpose()?;
        println!("{ready}");
        notify(&[NotifyState::Ready, NotifyState::Status(&ready)]);

        signals.until_stopped(|| reload(file, &shared)).await;
        notify(&[NotifyState::Stopping]);
        servers.abort_all();
        if let Some(overlay) = overlay {
            overlay.stop();
        }
        // Taking the lock waits for requests in progress.
        let engine = shared.lock().take();
        giver.into_iter().for_each(give::Running::stop);
        stop(engine, interfaces, meetings, &rdma);
        drop(socket);
        drop(folder);
        tracing::info!("stopped");
        Ok(())
    })
}

/// Duplicates of the control part's descriptors, for the next vnetd.
fn own_descriptors(socket: &Listener, remote: &Remote, folder: &Folder) -> std::io::Result<give::Own> {
    let mut descriptors = remote.descriptors()?;
    descriptors.push((CONTROL.into(), socket.try_clone()?.into()));
    Ok(give::Own { descriptors, owns_folder: folder.0.is_some() })
}

/// Stops threads and engine.
fn stop(
    engine: Option<Engine>,
    interfaces: interface_watch::Running,
    meetings: meetings::Running,
    rdma: &RdmaEngine,
) {
    interfaces.stop();
    meetings.stop();
    rdma.stop();
    engine.into_iter().for_each(Engine::stop);
}

fn ready_line(engine: &Engine, remote: &Remote) -> String {
    let desired = engine.current();
    format!(
        "vnetd {} ready: host {}, links arrive at {}, control at {}{remote}, {}",
        env!("CARGO_PKG_VERSION"),
        desired.host.spec.name,
        engine.status().bridge,
        desired.control.spec.socket.display(),
        summary(desired)
    )
}

/// Handles SIGHUP: reads the file again and applies the difference. An error is logged and changes nothing.
fn reload(file: &Path, shared: &Shared) {
    let mut reloading = vec![NotifyState::Reloading];
    reloading.extend(NotifyState::monotonic_usec_now().ok());
    notify(&reloading);
    if let Some(engine) = shared.lock().as_ref() {
        engine.refresh_identity();
    }
    match config::load(file) {
        Ok(Configuration { desired, warnings }) => {
            warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
            let apply = |engine: &mut Engine| engine.on_behalf(Asker::Hangup, |engine| engine.apply(desired));
            let applied = shared.lock().as_mut().map(apply);
            match applied {
                Some(Ok(plan)) if plan.is_empty() => tracing::info!("{}: nothing to change", file.display()),
                Some(Ok(_)) => tracing::info!("{}: applied", file.display()),
                Some(Err(error)) => not_applied(file, &error),
                None => {}
            }
        }
        Err(error) => not_applied(file, &error),
    }
    notify(&[NotifyState::Ready]);
}

fn not_applied(file: &Path, error: &dyn std::error::Error) {
    error.to_string().lines().for_each(|line| tracing::error!("{line}"));
    tracing::error!("{}: not applied, everything stays as it is", file.display());
}

/// The signals that vnetd handles.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Calls `reload` on each SIGHUP; returns on SIGTERM or SIGINT.
    async fn until_stopped(&mut self, reload: impl Fn()) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => reload(),
            }
        }
    }
}
