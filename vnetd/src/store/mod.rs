//! The agent of the distributed overlay: connects the state machine ([`vnet_control::overlay::Overlay`]) to etcd and to the host.
//!
//! ```text
//! etcd -- snapshot, watch --> Overlay -- computed --> Host (the engine)
//! <-- writes, lease ---          <-- locals ---
//! ```
//!
//! On sealed links, an [`Authenticator`] sits between etcd and the overlay.
//!
//! A *session* is one connection: a lease, a snapshot of the store read page by page at one revision, then a watch from the next
//! revision. Any failure (store down, partition, watch revision compacted) ends the session; the next one starts with a new
//! snapshot. Between sessions the overlay keeps its last state. Its clock ticks regardless of the store, because guests connect
//! and disconnect meanwhile.
//!
//! Apart from the overlay itself, memory is bounded by the largest message ([`MESSAGE_MAX`]); a page above that limit is read
//! again in smaller pages.

mod addresses;
mod host;
mod last_known;
mod session;

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, KeyValue, TlsOptions};
use tokio::sync::watch::Receiver;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use vnet_control::desired::OverlaySpec;
use vnet_control::overlay::{Alarm, Authenticator, Overlay, Settings, Write};

use addresses::{AddressNews, MovePause, Whereabouts};
pub use host::{EngineHost, Host};
pub use last_known::LastKnown;

/// Maximum length of a message accepted from the store, in bytes: five times etcd's default request limit.
pub const MESSAGE_MAX: usize = 8 << 20;
/// Lease time-to-live, in whole seconds: the store forgets a dead host after this time.
const LEASE: Duration = Duration::from_secs(15);
/// Timeout of a request.
const REQUEST: Duration = Duration::from_secs(3);
/// Upper bound on the page timeout, which grows if a busy store is too slow for a snapshot. The sum of it and the third of a
/// lease that may have passed before must stay below [`LEASE`].
const PATIENCE_MAX: Duration = Duration::from_secs(9);
/// HTTP/2 keepalive on an idle connection: interval and timeout. etcd closes connections that ping more often than
/// every five seconds (`--grpc-keepalive-min-time`).
const PROBE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3));
/// Reconnection backoff in milliseconds, first and maximum: it doubles.
const PAUSES_MS: (u64, u64) = (50, 1000);
/// Minimum interval between computations; changes in between are batched.
const COMPUTE_EVERY: Duration = Duration::from_millis(20);
/// Interval at which the overlay's state is published to the API even without a change.
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Minimum interval between two writes of the last known state after changes, and interval of writes without a change, because
/// the state ages and certificates are renewed.
const SAVE_EVERY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(600));
/// After computing or publishing, the agent pauses for this multiple of the duration: each takes at most a tenth of a core,
/// however large the overlay is and however fast it changes.
const REST: u32 = 9;
/// Upper bound on that pause: a long duration may be due to waiting, not computing.
const REST_MAX: Duration = Duration::from_secs(2);

/// Errors of the overlay's agent.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Cannot read a TLS file for the store.
    #[error("[overlay] cannot read '{path}': {error}")]
    File {
        /// The file's path.
        path: String,
        /// The error from reading it.
        error: std::io::Error,
    },
    /// etcd's client reports an error.
    #[error("{}", plain(.0))]
    Etcd(#[from] etcd_client::Error),
    /// The store did not answer in time.
    #[error("no answer in time")]
    Silent,
    /// The store cancelled the watch.
    #[error("the watch ended: {0}")]
    Watch(String),
    /// The store no longer has this host's lease.
    #[error("the lease ran out")]
    Lease,
    /// This host's address changed, so the connection's source address is no longer valid.
    #[error("this host's address changed")]
    Moved,
}

/// An error of etcd's client in one line: the error's own text contains dumps of whole structures.
fn plain(error: &etcd_client::Error) -> String {
    const LONGEST: usize = 200;
    fn root(error: &dyn std::error::Error) -> String {
        std::iter::successors(error.source(), |error| error.source())
            .last()
            .map_or_else(|| error.to_string(), ToString::to_string)
    }
    let text = match error {
        etcd_client::Error::GRpcStatus(status) => match std::error::Error::source(status) {
            Some(cause) => root(cause),
            None if status.message().is_empty() => status.code().description().into(),
            None => status.message().into(),
        },
        etcd_client::Error::TransportError(error) => root(error),
        error => error.to_string(),
    };
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect()
}

/// Settings of an agent.
#[derive(Clone)]
pub struct Options {
    /// Endpoints of the etcd cluster.
    pub endpoints: Vec<String>,
    /// TLS to the store.
    pub tls: Option<TlsOptions>,
    /// Address at which links arrive; used to derive the published address.
    pub bridge: SocketAddr,
    /// Polling interval of the host's stations.
    pub poll: Duration,
    /// Interval of full snapshots, a safety net in addition to the watch.
    pub reread: Duration,
}

impl Options {
    /// Options from the configuration; reads the TLS files.
    pub fn new(spec: &OverlaySpec, bridge: SocketAddr) -> Result<Options, StoreError> {
        let https = spec.etcd.iter().any(|endpoint| endpoint.starts_with("https:"));
        let tls = if https { Some(tls(spec)?) } else { None };
        Ok(Options {
            endpoints: spec.etcd.clone(),
            tls,
            bridge,
            poll: Duration::from_millis(50),
            reread: Duration::from_secs(300),
        })
    }

    fn connect(&self) -> ConnectOptions {
        let options = ConnectOptions::new()
            .with_connect_timeout(Duration::from_secs(1))
            .with_keep_alive(PROBE.0, PROBE.1)
            .with_keep_alive_while_idle(true);
        match &self.tls {
            Some(tls) => options.with_tls(tls.clone()),
            None => options,
        }
    }
}

fn tls(spec: &OverlaySpec) -> Result<TlsOptions, StoreError> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| StoreError::File { path: path.display().to_string(), error })
    };
    let mut tls = TlsOptions::new();
    if let Some(ca) = &spec.ca {
        tls = tls.ca_certificate(Certificate::from_pem(read(ca)?));
    }
    if let Some((cert, key)) = &spec.identity {
        tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
    }
    Ok(tls)
}

/// The state machine's settings, derived from the configuration.
pub fn settings(spec: &OverlaySpec, declared: impl Iterator<Item = vnet::frame::NetworkId>) -> Settings {
    let networks = spec.networks.clone().map_or_else(|| declared.collect(), |ids| ids.into_iter().collect());
    Settings {
        topology: spec.topology.clone(),
        reflectors: spec.reflectors.clone(),
        behind_nat: spec.behind_nat,
        address: spec.address,
        networks,
        forward_ms: u64::from(spec.forward_s) * 1000,
    }
}

/// The agent of one host.
pub struct Agent<H> {
    overlay: Overlay,
    authenticator: Option<Authenticator>,
    host: H,
    options: Options,
    /// True if the published address is configured, not derived.
    configured: bool,
    /// Source address of a route to the store, as looked up last.
    source: Option<IpAddr>,
    started: Instant,
    ticks: Interval,
    /// Lease of the previous session, which may still be alive.
    lease: i64,
    /// Latest store revision seen.
    revision: i64,
    /// Time of the last renewal of the lease.
    kept: Instant,
    /// Current page timeout; doubles after each timeout.
    patience: Duration,
    computed: Pace,
    shown: Pace,
    /// File of the last known state.
    file: Option<LastKnown>,
    saving: Option<JoinHandle<()>>,
    save_began: Instant,
    saved: Pace,
    /// True if the last write of the file failed, so that only the first failure is logged.
    unwritable: Arc<AtomicBool>,
}

/// Limits the rate of a task by the time and duration of its last run.
#[derive(Default)]
struct Pace {
    last: Option<(Instant, Duration)>,
}

impl Pace {
    /// True if the last run ended at least `least` ago and its pause has passed.
    fn is_due(&self, least: Duration) -> bool {
        self.last.is_none_or(|(ended, took)| ended.elapsed() >= least.max((took * REST).min(REST_MAX)))
    }

    /// Records a run that started at `began` and ends now.
    fn done(&mut self, began: Instant) {
        self.last = Some((Instant::now(), began.elapsed()));
    }
}

impl<H: Host> Agent<H> {
    /// An agent that is not connected yet. Must be called within a Tokio runtime.
    pub fn new(overlay: Overlay, host: H, options: Options) -> Agent<H> {
        let mut ticks = interval(options.poll);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Agent {
            configured: overlay.address().is_some(),
            source: None,
            overlay,
            authenticator: None,
            host,
            started: Instant::now(),
            ticks,
            options,
            lease: 0,
            revision: 0,
            kept: Instant::now(),
            patience: REQUEST,
            computed: Pace::default(),
            shown: Pace::default(),
            file: None,
            saving: None,
            save_began: Instant::now(),
            saved: Pace::default(),
            unwritable: Arc::default(),
        }
    }

    /// Adds an authenticator: the agent signs its records and accepts only signed ones.
    pub fn with_authenticator(self, authenticator: Authenticator) -> Agent<H> {
        Agent { authenticator: Some(authenticator), ..self }
    }

    /// Sets the file in which the last known state is kept.
    pub fn keeping(self, file: LastKnown) -> Agent<H> {
        Agent { file: Some(file), ..self }
    }

    /// Runs until `stop` changes, then leaves the overlay if the store is reachable.
    pub async fn run(mut self, stop: Receiver<bool>) {
        self.follow_store(stop).await;
        // Two concurrent writers would overwrite each other's file. The runtime waits for the last write before it ends.
        if let Some(saving) = self.saving.take() {
            let _ = saving.await;
        }
        if self.overlay.take_unsaved() {
            self.save();
        }
    }

    async fn follow_store(&mut self, mut stop: Receiver<bool>) {
        let (first_ms, last_ms) = PAUSES_MS;
        let mut pause_ms = first_ms;
        let mut logged = false;
        let (mut news, mut moves) = (AddressNews::subscribe(), MovePause::default());
        loop {
            let before = self.overlay.in_step();
            let ended = self.session_at_one_address(&mut news, &mut stop).await;
            let Err(error) = ended else { return };
            if matches!(error, StoreError::Moved) {
                if self.meanwhile_until(tokio::time::sleep(moves.next()), &mut stop).await.is_none() {
                    return;
                }
                continue;
            }
            let synced = self.overlay.in_step();
            if synced || before {
                self.overlay.away(self.now_ms());
                pause_ms = first_ms;
                logged = false;
            }
            // Log once per outage.
            if !std::mem::replace(&mut logged, true) {
                tracing::warn!("overlay: the store is out of reach, keeping the last known state: {error}");
            }
            self.turn();
            let pause = tokio::time::sleep(Duration::from_millis(pause_ms));
            if self.meanwhile_until(pause, &mut stop).await.is_none() {
                return;
            }
            pause_ms = (pause_ms * 2).min(last_ms);
        }
    }

    /// Runs a session until it fails or this host's address changes.
    async fn session_at_one_address(
        &mut self,
        news: &mut AddressNews,
        stop: &mut Receiver<bool>,
    ) -> Result<(), StoreError> {
        let (endpoints, bridge) = (self.options.endpoints.clone(), self.options.bridge);
        let looked = self.meanwhile_until(Whereabouts::look(&endpoints, bridge), stop).await;
        let Some(here) = looked else { return Ok(()) };
        let Some(here) = here else { return self.session(stop).await };
        self.source = here.source(self.source);
        self.publish_address(&here);
        let before = (here, self.source);
        tokio::select! {
            ended = self.session(stop) => ended,
            () = news.moved(&endpoints, bridge, before) => Err(StoreError::Moved),
        }
    }

    fn now_ms(&self) -> u64 {
        // Times start at 1, because 0 means "never".
        self.started.elapsed().as_millis() as u64 + 1
    }

    /// Awaits a future while the overlay's clock keeps ticking.
    async fn meanwhile<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return done,
                _ = self.ticks.tick() => self.turn(),
            }
        }
    }

    /// Like [`Agent::meanwhile`]; `None` if the agent is stopped first.
    async fn meanwhile_until<T>(
        &mut self,
        future: impl Future<Output = T>,
        stop: &mut Receiver<bool>,
    ) -> Option<T> {
        let future = self.meanwhile(future);
        tokio::select! {
            done = future => Some(done),
            _ = stop.changed() => None,
        }
    }

    /// Awaits a store request with the default timeout.
    async fn request<T>(
        &mut self,
        future: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, StoreError> {
        self.request_within(REQUEST, future).await
    }

    async fn request_within<T>(
        &mut self,
        time: Duration,
        future: impl Future<Output = Result<T, etcd_client::Error>>,
    ) -> Result<T, StoreError> {
        let answer = self.meanwhile(tokio::time::timeout(time, future)).await;
        Ok(answer.map_err(|_| StoreError::Silent)??)
    }

    /// One tick: reads the host's stations, advances the overlay's clock, and computes and publishes if due.
    fn turn(&mut self) {
        let now_ms = self.now_ms();
        if let Some(authenticator) = &mut self.authenticator {
            authenticator.refresh(&mut self.overlay, now_ms);
        }
        let locals = self.host.locals();
        self.overlay.locals(&locals);
        self.overlay.tick(now_ms);
        let mut show = self.shown.is_due(SHOW_EVERY);
        if self.computed.is_due(COMPUTE_EVERY) && self.overlay.take_changed() {
            let began = Instant::now();
            self.overlay.check_addresses(now_ms);
            for line in self.host.join(self.overlay.computed()) {
                self.overlay.alarm(Alarm::Apply, now_ms, line);
            }
            self.computed.done(began);
            show = self.shown.is_due(COMPUTE_EVERY);
        }
        self.save_if_due();
        if show {
            let began = Instant::now();
            for host in self.host.heard() {
                self.overlay.heard(&host, now_ms);
            }
            self.host.show(self.overlay.show(&self.options.endpoints, self.revision, now_ms));
            self.shown.done(began);
        }
    }

    /// Writes the last known state, while the store is reachable, if the state changed or its file is old.
    fn save_if_due(&mut self) {
        let idle = self.saving.as_ref().is_none_or(JoinHandle::is_finished);
        if self.file.is_some() && self.overlay.in_step() && idle && self.saved.is_due(SAVE_EVERY.0) {
            let began = Instant::now();
            if self.saving.take().is_some() {
                // The duration of the write is known only now.
                self.saved.done(self.save_began);
            } else if self.overlay.take_unsaved() || self.saved.is_due(SAVE_EVERY.1) {
                self.save_began = began;
                self.save();
            }
        }
    }

    /// Starts writing the last known state on a blocking thread.
    fn save(&mut self) {
        let Some(file) = self.file.clone() else { return };
        let records = self.overlay.last_known(self.authenticator.as_ref());
        let unwritable = self.unwritable.clone();
        self.saving = Some(tokio::task::spawn_blocking(move || {
            let written = file.write(records);
            let failed_before = unwritable.swap(written.is_err(), Relaxed);
            if let Err(error) = written
                && !failed_before
            {
                let file = file.path().display();
                tracing::warn!(
                    "overlay: cannot keep the last known state in {file}: {error}; see [overlay] state"
                );
            }
        }));
    }

    /// Handles a value from a snapshot or watch event.
    fn put(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        let (key, value, lease, revision) = (kv.key(), kv.value(), kv.lease(), kv.mod_revision());
        match &mut self.authenticator {
            Some(judge) => judge.put(&mut self.overlay, key, value, lease, revision, now_ms),
            None => self.overlay.put(key, value, lease, revision, now_ms),
        }
    }

    /// Handles a deletion in the store.
    fn delete(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        match &mut self.authenticator {
            Some(judge) => judge.delete(&mut self.overlay, kv.key(), kv.mod_revision(), now_ms),
            None => self.overlay.delete(kv.key(), kv.mod_revision(), now_ms),
        }
    }

    /// Handles the end of a snapshot.
    fn end_reading(&mut self) {
        let now_ms = self.now_ms();
        match &mut self.authenticator {
            Some(judge) => judge.end_reading(&mut self.overlay, now_ms),
            None => self.overlay.end_reading(now_ms),
        }
    }

    /// Signs writes if needed; drops those that cannot be signed.
    fn signed(&mut self, mut writes: Vec<Write>) -> Vec<Write> {
        let now_ms = self.now_ms();
        if let Some(authenticator) = &mut self.authenticator {
            writes.retain_mut(|write| match authenticator.sign(write) {
                Ok(()) => true,
                Err(why) => {
                    self.overlay.alarm(Alarm::Write, now_ms, why);
                    false
                }
            });
        }
        writes
    }

    /// Sets the address to publish, at which other hosts reach this one, unless it is configured; raises an alarm if there is
    /// none.
    fn publish_address(&mut self, here: &Whereabouts) {
        if self.configured {
            return;
        }
        let bridge = self.options.bridge;
        let found = match bridge.ip() {
            ip if ip.is_unspecified() => self.source.map(|ip| SocketAddr::new(ip, bridge.port())),
            _ if here.bridge_is_here => Some(bridge),
            _ => None,
        };
        let before = self.overlay.address();
        let text = match (found, before) {
            (Some(now), _) if before == Some(now) => return,
            (Some(now), None) => return self.overlay.set_address(now),
            (Some(now), Some(before)) => {
                tracing::info!("overlay: this host is at {now} now, no longer at {before}");
                return self.overlay.set_address(now);
            }
            (None, Some(before)) => {
                format!("this host has lost its address {before} and has no other that leads to the store")
            }
            (None, None) if bridge.ip().is_unspecified() => {
                "cannot derive this host's address: the store runs on this host; set [overlay] address".into()
            }
            (None, None) => format!("no device of this host has the address of [bridge] listen, {bridge}"),
        };
        let alarm = if before.is_some() { Alarm::Address } else { Alarm::Apply };
        self.overlay.alarm(alarm, self.now_ms(), text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vnet_control::config;

    fn spec(overlay: &str) -> OverlaySpec {
        let text = format!("host.name = \"h1\"\n[overlay]\ntrusted = true\n{overlay}");
        config::parse("f", &text).unwrap().desired.overlay.unwrap().spec
    }

    #[test]
    fn a_missing_file_is_named() {
        let spec = spec("etcd = [\"https://store:2379\"]\nca = \"/nowhere/ca.pem\"");
        let error = Options::new(&spec, ([0, 0, 0, 0], 9000).into()).err().unwrap().to_string();
        assert!(error.starts_with("[overlay] cannot read '/nowhere/ca.pem': "), "{error}");
    }

    #[tokio::test]
    async fn an_error_of_the_store_is_one_line() {
        // No server listens at this port: it was free a moment ago.
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let client = etcd_client::Client::connect([format!("http://{free}")], None).await;
        let error = match client {
            Ok(mut client) => client.lease_grant(15, None).await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(StoreError::from(error).to_string(), "Connection refused (os error 111)");
    }

    #[test]
    fn default_networks_are_the_declared_ones() {
        let declared = || [1, 5].into_iter().filter_map(vnet::frame::NetworkId::new);
        let etcd = "etcd = [\"http://[::1]:2379\"]";
        assert_eq!(settings(&spec(etcd), declared()).networks.len(), 2);
        let listed = settings(&spec(&format!("{etcd}\nnetworks = [1]")), declared());
        assert_eq!(listed.networks.into_iter().map(u32::from).collect::<Vec<_>>(), [1]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_run_is_followed_by_a_long_pause() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        assert!(pace.is_due(ms(20)), "first run");
        let began = Instant::now();
        tokio::time::advance(ms(10)).await;
        pace.done(began);
        tokio::time::advance(ms(89)).await;
        assert!(!pace.is_due(ms(20)));
        tokio::time::advance(ms(1)).await;
        assert!(pace.is_due(ms(20)) && !pace.is_due(ms(91)));
    }
}
