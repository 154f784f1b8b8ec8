//! The agent of the distributed overlay: connects the state machine ([`vnet_control::overlay::Overlay`]) to etcd on
//! one side and to the host on the other.
//!
//! ```text
//! etcd -- snapshot, watch --> Overlay -- computed --> Host (the engine)
//! <-- writes, lease ---          <-- locals ---
//! ```
//!
//! On sealed links, an [`Authenticator`] sits between etcd and the overlay.
//!
//! A *session* is one connection: a lease, a snapshot of the store read page by page at one revision, then a watch
//! from the next revision. Any failure (store down, partition, watch revision compacted) ends the session; the next
//! one starts with a new snapshot. Between sessions the overlay keeps its last state. Its clock ticks regardless of
//! the store, because guests come and go meanwhile.
//!
//! Apart from the overlay itself, memory is bounded by the largest message ([`MESSAGE_MAX`]); a page above that is
//! read again in smaller pages.

mod host;
mod session;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use etcd_client::{Certificate, ConnectOptions, Identity, KeyValue, TlsOptions};
use tokio::sync::watch::Receiver;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval};
use vnet_control::desired::OverlaySpec;
use vnet_control::overlay::{Alarm, Authenticator, Overlay, Settings, Write};

pub use host::{EngineHost, Host};

/// Largest message accepted from the store, in bytes: five times etcd's default request limit.
pub const MESSAGE_MAX: usize = 8 << 20;
/// Lease time-to-live: the store forgets a dead host after this. Whole seconds.
const LEASE: Duration = Duration::from_secs(15);
/// Timeout of a request.
const REQUEST: Duration = Duration::from_secs(3);
/// Upper limit of the page timeout, which grows when a busy store is too slow for a snapshot. Together with the third
/// of a lease that may have passed before, it must stay below [`LEASE`].
const PATIENCE_MAX: Duration = Duration::from_secs(9);
/// HTTP/2 keepalive on an idle connection: interval and timeout. etcd closes connections that ping more often than
/// every five seconds (`--grpc-keepalive-min-time`).
const PROBE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3));
/// Reconnection backoff, first and longest: it doubles.
const PAUSES_MS: (u64, u64) = (50, 1000);
/// Shortest interval between computations; changes in between are batched.
const COMPUTE_EVERY: Duration = Duration::from_millis(20);
/// Interval at which the overlay's state is shown even without a change.
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Computing and showing pause for this multiple of their duration: each takes at most a tenth of a core, however
/// large the overlay is and however fast it changes.
const REST: u32 = 9;
/// Upper limit of that pause: a long duration may have been waiting, not computing.
const REST_MAX: Duration = Duration::from_secs(2);

/// Errors of the store's agent.
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
    #[error("{0}")]
    Etcd(#[from] etcd_client::Error),
    /// A request timed out.
    #[error("no answer in time")]
    Silent,
    /// The store cancelled the watch.
    #[error("the watch ended: {0}")]
    Watch(String),
    /// The store has dropped this host's lease.
    #[error("the lease ran out")]
    Lease,
}

/// Settings of an agent.
#[derive(Clone)]
pub struct Options {
    /// Endpoints of the etcd cluster.
    pub endpoints: Vec<String>,
    /// TLS to the store.
    pub tls: Option<TlsOptions>,
    /// Where links arrive; used to derive the published address.
    pub bridge: SocketAddr,
    /// Polling interval of the host's stations.
    pub poll: Duration,
    /// Interval of full snapshots, as a safety net beside the watch.
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

/// The state machine's settings from the configuration.
pub fn settings(spec: &OverlaySpec, declared: impl Iterator<Item = vnet::frame::NetworkId>) -> Settings {
    let networks = spec.networks.clone().map_or_else(|| declared.collect(), |ids| ids.into_iter().collect());
    Settings {
        topology: spec.topology.clone(),
        reflectors: spec.reflectors.clone(),
        behind_nat: spec.behind_nat,
        address: spec.address,
        networks,
    }
}

/// The agent of one host.
pub struct Agent<H> {
    overlay: Overlay,
    authenticator: Option<Authenticator>,
    host: H,
    options: Options,
    started: Instant,
    ticks: Interval,
    /// Lease of the previous session; it may still be alive.
    lease: i64,
    /// Latest revision seen.
    revision: i64,
    /// Last renewal of the lease.
    kept: Instant,
    /// Page timeout; doubles after each timeout.
    patience: Duration,
    computed: Pace,
    shown: Pace,
}

/// Limits how often something is done, by the time and duration of the last run.
#[derive(Default)]
struct Pace {
    last: Option<(Instant, Duration)>,
}

impl Pace {
    /// True if the last run ended at least `least` ago and its pause is over.
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
        }
    }

    /// Adds an authenticator: the agent signs its records and accepts only signed ones.
    pub fn with_authenticator(self, authenticator: Authenticator) -> Agent<H> {
        Agent { authenticator: Some(authenticator), ..self }
    }

    /// Runs until `stop` changes, then leaves the overlay if the store is reachable.
    pub async fn run(mut self, mut stop: Receiver<bool>) {
        let (first_ms, last_ms) = PAUSES_MS;
        let mut pause_ms = first_ms;
        let mut logged = false;
        loop {
            let before = self.overlay.in_step();
            let Err(error) = self.session(&mut stop).await else { return };
            let synced = self.overlay.in_step();
            if synced || before {
                self.overlay.away(self.now_ms());
                pause_ms = first_ms;
                logged = false;
            }
            // Once per outage.
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

    fn now_ms(&self) -> u64 {
        // Starts at 1: 0 means "never".
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

    /// The same; `None` if the agent is stopped first.
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

    /// One tick: reads the host's stations, advances the overlay's clock, and computes and shows if due.
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
        if show {
            let began = Instant::now();
            for host in self.host.heard() {
                self.overlay.heard(&host, now_ms);
            }
            self.host.show(self.overlay.show(&self.options.endpoints, self.revision, now_ms));
            self.shown.done(began);
        }
    }

    /// The store has a value under a key.
    fn put(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        let (key, value, lease, revision) = (kv.key(), kv.value(), kv.lease(), kv.mod_revision());
        match &mut self.authenticator {
            Some(judge) => judge.put(&mut self.overlay, key, value, lease, revision, now_ms),
            None => self.overlay.put(key, value, lease, revision, now_ms),
        }
    }

    /// The store has deleted a key.
    fn delete(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        match &mut self.authenticator {
            Some(judge) => judge.delete(&mut self.overlay, kv.key(), kv.mod_revision(), now_ms),
            None => self.overlay.delete(kv.key(), kv.mod_revision(), now_ms),
        }
    }

    /// The snapshot is complete.
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

    /// Derives the address to publish: the local address from which the store is reached.
    async fn find_address(&mut self) {
        let bridge = self.options.bridge;
        if self.overlay.address().is_some() {
            return;
        }
        if !bridge.ip().is_unspecified() {
            return self.overlay.set_address(bridge);
        }
        for endpoint in self.options.endpoints.clone() {
            let store = endpoint.split_once("://").map_or(endpoint.as_str(), |(_, rest)| rest).to_string();
            let found = tokio::time::timeout(REQUEST, tokio::net::lookup_host(store)).await;
            for store in found.into_iter().flatten().flatten() {
                if let Some(ip) = source(store).filter(|ip| !ip.is_loopback()) {
                    return self.overlay.set_address(SocketAddr::new(ip, bridge.port()));
                }
            }
        }
        let text = "cannot derive this host's address: the store runs on this host; set [overlay] address";
        self.overlay.alarm(Alarm::Apply, self.now_ms(), text.into());
    }
}

/// Source address of a route to `to`. Sends nothing.
fn source(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|address| address.ip().to_canonical())
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

    #[test]
    fn default_networks_are_the_declared_ones() {
        let declared = || [1, 5].into_iter().filter_map(vnet::frame::NetworkId::new);
        let etcd = "etcd = [\"http://[::1]:2379\"]";
        assert_eq!(settings(&spec(etcd), declared()).networks.len(), 2);
        let listed = settings(&spec(&format!("{etcd}\nnetworks = [1]")), declared());
        assert_eq!(listed.networks.into_iter().map(u32::from).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn the_source_address_is_that_of_the_route() {
        assert_eq!(source(([127, 0, 0, 1], 2379).into()), Some([127, 0, 0, 1].into()));
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
