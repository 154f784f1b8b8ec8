//! vnetd: one daemon per host. It makes the host match its configuration file.
//!
//! Startup: read the configuration, bind the control socket, start the engine, report ready. Then vnetd serves requests and
//! signals: SIGHUP reloads the file, SIGTERM and SIGINT stop vnetd cleanly. All of this runs on one thread; the core's
//! dispatchers move frames and never wait for that thread.

mod capture;
mod confine;
mod console;
mod events;
mod follow;
mod gate;
mod guests;
mod handlers;
mod interface_watch;
mod meetings;
mod metrics;
mod overlay;
mod rdma_engine;
#[cfg(test)]
mod reference;
mod remote;
mod script;
mod sealing;
mod serve;
mod shared;
mod tls;
mod watchdog;

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
use vnet::unix::Listener;
use vnet_control::config::{self, Configuration};
use vnet_control::desired::{CONTROL_SOCKET, Desired, Item};
use vnet_control::engine::Engine;
use vnet_control::events::Asker;

use crate::events::Hub;
use crate::follow::Followers;
use crate::handlers::App;
use crate::rdma_engine::RdmaEngine;
use crate::remote::Remote;
use crate::shared::Shared;

/// Mode of the control socket: only root and vnetd's own user may connect.
const CONTROL_SOCKET_MODE: u32 = 0o600;

/// The vnet daemon: puts this host's virtual machines and containers on one Ethernet LAN with those of other hosts.
#[derive(Parser)]
#[command(name = "vnetd", version, long_about = LONG_ABOUT, after_long_help = AFTER_HELP)]
struct Args {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = "/etc/vnet/vnet.toml")]
    config: PathBuf,

    /// Check the configuration file and the certificates and keys that it names, and exit: nothing is changed
    #[arg(long)]
    check: bool,

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
  SIGTERM, SIGINT   stop: guests see their links go down, sockets and TAP devices are removed

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
  systemctl reload vnetd                send SIGHUP";

/// Makes a panic in any thread abort the process. systemd restarts a dead daemon and guests hardly notice; a daemon in which one
/// thread has died would stall them.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

fn main() -> ExitCode {
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
        Args { config, .. } => run(config),
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

fn run(file: &Path) -> Result<(), Failure> {
    confine::begin();
    allow_files();
    let Configuration { desired, warnings } = config::load(file)?;
    warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // Install the handlers first, so that a signal during startup is handled once vnetd is ready.
        let mut signals = Signals::new()?;
        let Item { place, spec: control } = &desired.control;
        let at = |error: &dyn std::fmt::Display| format!("{place}{error}");
        let folder = Folder::of(&control.socket).map_err(|error| at(&error))?;
        let socket = Listener::bind(&control.socket, CONTROL_SOCKET_MODE).map_err(|error| at(&error))?;
        let remote = Remote::open(&control.access).map_err(|error| at(&error))?;
        let mut prepared = None;
        let mut engine = Engine::start_in(desired, |engine, desired| {
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
        };
        let listener = tokio::net::UnixListener::from_std(socket.try_clone()?)?;
        let mut servers = tokio::task::JoinSet::new();
        servers.spawn(serve::unix(listener, handlers::router(app.clone())));
        servers.spawn(events::watch(shared.clone(), events));
        servers.spawn(follow::serve(shared.clone(), followers, inbox));
        remote.serve(app, &mut servers);
        if let Some(period) = sd_notify::watchdog_enabled() {
            servers.spawn(watchdog::serve(period, pulse));
        }
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
        interfaces.stop();
        meetings.stop();
        rdma.stop();
        if let Some(engine) = engine {
            engine.stop();
        }
        drop(socket);
        drop(folder);
        tracing::info!("stopped");
        Ok(())
    })
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

/// Sends a state to the service manager, if vnetd has one.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!("cannot notify the service manager: {error}");
    }
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
