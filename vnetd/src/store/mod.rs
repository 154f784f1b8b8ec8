//! The agent of the distributed overlay: carries news between etcd and the state machine
//! ([`vnet_control::overlay::Overlay`]), and what that computes to the host.
//!
//! ```text
//!   etcd -- reading, watch --> Overlay -- computed --> Host (the engine)
//!        <-- writes, lease --          <-- locals ---
//! ```
//!
//! Where links are sealed, an [`Authenticator`] stands between the two on the left.
//!
//! A *session* is one connection: a lease, one whole reading, page by page, then a watch from the revision behind it. Whatever
//! goes wrong in it (the store stops, is partitioned, has compacted what the watch wanted) ends the session; the next one
//! begins with a reading again. Between sessions the overlay is away, and stays as it is. Time goes on for the overlay
//! whatever the store does: guests come and go without it.
//!
//! Memory is bounded by the size of one message ([`MESSAGE_MAX`]) besides the overlay itself; a page that would be larger is
//! read in smaller ones.

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
use vnet_control::api;
use vnet_control::overlay::spec::OverlaySpec;
use vnet_control::overlay::{Alarm, Authenticator, Computed, Local, Overlay, Settings, Write};

pub use host::EngineHost;

/// Largest message that is taken from the store, in bytes: five times its own default limit of a request.
pub const MESSAGE_MAX: usize = 8 << 20;
/// After how long the store forgets a host that is gone; whole seconds.
const LEASE: Duration = Duration::from_secs(15);
/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(3);
/// How long a page of a reading may take in the end, when a busy store makes each reading too late: with the third of a lease
/// that may have passed before, less than a lease.
const PATIENCE_MAX: Duration = Duration::from_secs(9);
/// After how long a connection on which nothing happens is tried, and for how long: etcd closes connections that are tried
/// more than every five seconds (`--grpc-keepalive-min-time`).
const PROBE: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(3));
/// Pauses between two attempts to reach the store: doubled from the first to the last.
const PAUSES_MS: (u64, u64) = (50, 1000);
/// The shortest time between two computations: what comes in between is carried out together.
const COMPUTE_EVERY: Duration = Duration::from_millis(20);
/// How often the overlay is shown anew, even when nothing happens.
const SHOW_EVERY: Duration = Duration::from_secs(1);
/// Computing and showing rest for this many times as long as they took: however large the overlay is and however fast it
/// changes, each takes a tenth of a core at most.
const REST: u32 = 9;
/// But not longer than this: what took long may have waited for something else.
const REST_MAX: Duration = Duration::from_secs(2);

/// Why the agent cannot work with the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file of the store's TLS cannot be read.
    #[error("[overlay] cannot read '{path}': {error}")]
    File {
        /// The file.
        path: String,
        /// Why not.
        error: std::io::Error,
    },
    /// The store answers with an error, or not at all.
    #[error("{0}")]
    Etcd(#[from] etcd_client::Error),
    /// A request was not answered in time.
    #[error("no answer in time")]
    Silent,
    /// The store ended the watch.
    #[error("the watch ended: {0}")]
    Watch(String),
    /// The store has forgotten this host meanwhile.
    #[error("the lease ran out")]
    Lease,
}

/// What an agent works for: a host with an engine, or one that is only simulated.
pub trait Host {
    /// What stands on the host.
    fn locals(&mut self) -> Vec<Local>;

    /// The hosts whose links brought something lately.
    fn heard(&mut self) -> Vec<String>;

    /// Makes what was computed part of what the host is; gives a line for everything that cannot be.
    fn join(&mut self, computed: Computed) -> Vec<String>;

    /// Shows the overlay as it is now.
    fn show(&mut self, shown: api::Overlay);
}

/// How an agent works.
#[derive(Clone)]
pub struct Options {
    /// Members of the etcd cluster.
    pub endpoints: Vec<String>,
    /// TLS towards the store.
    pub tls: Option<TlsOptions>,
    /// Where links arrive, for finding out the address that is published.
    pub bridge: SocketAddr,
    /// How often the host is looked at.
    pub poll: Duration,
    /// How often the whole store is read, although the watch tells of every change.
    pub reread: Duration,
}

impl Options {
    /// What the configuration asks for; reads the files it names.
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

/// The state machine's settings, as the configuration has them.
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
    /// The lease of the last session; it may live longer than that did.
    lease: i64,
    /// The store's revision that was seen last.
    revision: i64,
    /// When the lease was renewed last.
    kept: Instant,
    /// How long a page of a reading may take: longer each time that this was too short.
    patience: Duration,
    computed: Pace,
    shown: Pace,
}

/// How often something may be done, by when it was done last and how long that took.
#[derive(Default)]
struct Pace {
    last: Option<(Instant, Duration)>,
}

impl Pace {
    /// True when the last time is `least` ago, and the rest after it over.
    fn is_due(&self, least: Duration) -> bool {
        self.last.is_none_or(|(ended, took)| ended.elapsed() >= least.max((took * REST).min(REST_MAX)))
    }

    /// It was done just now, from `began` on.
    fn done(&mut self, began: Instant) {
        self.last = Some((Instant::now(), began.elapsed()));
    }
}

impl<H: Host> Agent<H> {
    /// An agent that has not reached the store yet. Has to be made within a Tokio runtime.
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

    /// The same, which signs what it writes and believes only what is signed.
    pub fn with_authenticator(self, authenticator: Authenticator) -> Agent<H> {
        Agent { authenticator: Some(authenticator), ..self }
    }

    /// Works until `stop` changes, then takes leave of the other hosts, if the store is there.
    pub async fn run(mut self, mut stop: Receiver<bool>) {
        let (first_ms, last_ms) = PAUSES_MS;
        let mut pause_ms = first_ms;
        let mut told = false;
        loop {
            let before = self.overlay.in_step();
            let Err(error) = self.session(&mut stop).await else { return };
            let worked = self.overlay.in_step();
            if worked || before {
                self.overlay.away(self.now_ms());
                pause_ms = first_ms;
                told = false;
            }
            // Once for each time that the store goes away.
            if !std::mem::replace(&mut told, true) {
                tracing::warn!("overlay: the store is out of reach, everything stays as it is: {error}");
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
        // From 1: 0 is "never".
        self.started.elapsed().as_millis() as u64 + 1
    }

    /// Waits for a future while time goes on for the overlay.
    async fn meanwhile<T>(&mut self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return done,
                _ = self.ticks.tick() => self.turn(),
            }
        }
    }

    /// The same, but `None` when the agent is to stop before.
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

    /// The same for a request to the store, which may not take for ever.
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

    /// Looks at the host and at the time, and carries out what follows from either.
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

    /// The store has something under a key.
    fn put(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        let (key, value, lease, revision) = (kv.key(), kv.value(), kv.lease(), kv.mod_revision());
        match &mut self.authenticator {
            Some(judge) => judge.put(&mut self.overlay, key, value, lease, revision, now_ms),
            None => self.overlay.put(key, value, lease, revision, now_ms),
        }
    }

    /// It has nothing there.
    fn delete(&mut self, kv: &KeyValue) {
        let now_ms = self.now_ms();
        match &mut self.authenticator {
            Some(judge) => judge.delete(&mut self.overlay, kv.key(), kv.mod_revision(), now_ms),
            None => self.overlay.delete(kv.key(), kv.mod_revision(), now_ms),
        }
    }

    /// All of it was read.
    fn end_reading(&mut self) {
        let now_ms = self.now_ms();
        match &mut self.authenticator {
            Some(judge) => judge.end_reading(&mut self.overlay, now_ms),
            None => self.overlay.end_reading(now_ms),
        }
    }

    /// What is to be written, signed where that is needed; without what cannot be.
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

    /// Finds out where other hosts reach this one: at the address from which the store is reached.
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
        let text = "the store is on this very host, so the address for other hosts is not known; set [overlay] address";
        self.overlay.alarm(Alarm::Apply, self.now_ms(), text.into());
    }
}

/// The address from which `to` is reached. Nothing is sent.
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
    fn a_file_that_is_not_there_is_named() {
        let spec = spec("etcd = [\"https://store:2379\"]\nca = \"/nowhere/ca.pem\"");
        let error = Options::new(&spec, ([0, 0, 0, 0], 9000).into()).err().unwrap().to_string();
        assert!(error.starts_with("[overlay] cannot read '/nowhere/ca.pem': "), "{error}");
    }

    #[test]
    fn all_declared_networks_take_part_unless_some_are_listed() {
        let declared = || [1, 5].into_iter().filter_map(vnet::frame::NetworkId::new);
        let etcd = "etcd = [\"http://[::1]:2379\"]";
        assert_eq!(settings(&spec(etcd), declared()).networks.len(), 2);
        let listed = settings(&spec(&format!("{etcd}\nnetworks = [1]")), declared());
        assert_eq!(listed.networks.into_iter().map(u32::from).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn the_own_address_is_the_one_from_which_another_is_reached() {
        assert_eq!(source(([127, 0, 0, 1], 2379).into()), Some([127, 0, 0, 1].into()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_took_long_rests_long() {
        let ms = Duration::from_millis;
        let mut pace = Pace::default();
        assert!(pace.is_due(ms(20)), "it was never done");
        let began = Instant::now();
        tokio::time::advance(ms(10)).await;
        pace.done(began);
        tokio::time::advance(ms(89)).await;
        assert!(!pace.is_due(ms(20)));
        tokio::time::advance(ms(1)).await;
        assert!(pace.is_due(ms(20)) && !pace.is_due(ms(91)));
    }
}
