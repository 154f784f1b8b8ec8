//! Test world: hosts, a fake etcd, a simulated clock, and an oracle that computes naively what every host should know.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::{Authenticator, Computed, Local, Overlay, Settings, Write};
use crate::desired::Topology;
use vnet::frame::NetworkId;
use vnet::link::sealed::identity::IdentityStore;
use vnet::link::sealed::pki::Pki;
use vnet::wire::ethernet::Mac;

/// Milliseconds per step; a host is polled every fifth.
pub const STEP_MS: u64 = 10;
const POLL_MS: u64 = 50;
/// Interval at which the incremental result is compared with a full computation, in milliseconds.
const FULL_MS: u64 = 500;

/// A stored value: bytes, lease, revision.
type Kept = (Vec<u8>, i64, i64);

/// A watch event: key, new value (`None`: deleted), revision.
type News = (String, Option<Kept>, i64);

/// A host and its connection to the store.
pub struct Host {
    pub overlay: Overlay,
    /// Signs and verifies records, with this host's identity; `None` in clear text.
    pub identity: Option<(Authenticator, Arc<IdentityStore>)>,
    pub locals: Vec<Local>,
    pub connected: bool,
    /// The host's computed links and routes after the last reported change.
    pub computed: Computed,
    lease: i64,
    /// Number of watch events received.
    heard: usize,
}

/// All hosts and the store.
pub struct World {
    pub now_ms: u64,
    pub hosts: Vec<Host>,
    store: BTreeMap<String, Kept>,
    news: Vec<News>,
    revision: i64,
    leases: i64,
}

pub fn name(host: usize) -> String {
    format!("h{host}")
}

pub fn address(host: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host as u8], 9000))
}

pub fn mac(n: usize) -> Mac {
    Mac([2, 0, 0, 0, 0, n as u8])
}

pub fn ip(n: usize) -> IpAddr {
    [10, 77, 0, n as u8].into()
}

pub fn network(id: u32) -> NetworkId {
    NetworkId::new(id).unwrap()
}

pub fn settings(host: usize) -> Settings {
    Settings { address: Some(address(host)), networks: [1, 2].map(network).into(), ..Settings::default() }
}

/// A guest that is connected.
pub fn guest(id: u32, n: usize) -> Local {
    Local {
        network: network(id),
        mac: Some(mac(n)),
        addresses: vec![ip(n)],
        up: true,
        departed: false,
        in_frames: 0,
    }
}

impl World {
    /// Hosts 1 to `count`, connected; host n has guest n in network 1.
    pub fn new(count: usize) -> World {
        World::with((1..=count).map(settings).collect())
    }

    pub fn with(settings: Vec<Settings>) -> World {
        World::made(settings, None)
    }

    /// Like [`World::new`], with signed records.
    pub fn sealed(count: usize, pki: &Pki) -> World {
        World::made((1..=count).map(settings).collect(), Some(pki))
    }

    fn made(settings: Vec<Settings>, pki: Option<&Pki>) -> World {
        let mut world =
            World { now_ms: 1, hosts: vec![], store: BTreeMap::new(), news: vec![], revision: 1, leases: 0 };
        for (index, settings) in settings.into_iter().enumerate() {
            let host = index + 1;
            let overlay = Overlay::new(name(host).into(), host as u64, settings);
            let locals = vec![guest(1, host)];
            let computed = Computed::default();
            let identity = pki.map(|pki| {
                let store = Arc::new(pki.store(&name(host), host as u8));
                (Authenticator::new(store.clone()), store)
            });
            world.hosts.push(Host {
                overlay,
                identity,
                locals,
                connected: false,
                computed,
                lease: 0,
                heard: 0,
            });
            world.connect(host);
        }
        world
    }

    pub fn host(&mut self, host: usize) -> &mut Host {
        &mut self.hosts[host - 1]
    }

    /// Connects a host: it reads the whole store, with a new lease if the old one has expired.
    pub fn connect(&mut self, host: usize) {
        let now_ms = self.now_ms;
        let leased = self.store.values().any(|(_, lease, _)| *lease == self.hosts[host - 1].lease);
        if !leased {
            self.leases += 1;
        }
        let (store, heard, leases) = (&self.store, self.news.len(), self.leases);
        let host = &mut self.hosts[host - 1];
        if !leased {
            host.lease = leases;
        }
        (host.connected, host.heard) = (true, heard);
        host.overlay.connected(host.lease, now_ms);
        Host::read(host, store, now_ms);
    }

    /// Every connected host reads the whole store again.
    pub fn reread(&mut self) {
        for host in self.hosts.iter_mut().filter(|host| host.connected) {
            host.heard = self.news.len();
            host.read(&self.store, self.now_ms);
        }
    }

    pub fn disconnect(&mut self, host: usize) {
        let now_ms = self.now_ms;
        let host = self.host(host);
        host.connected = false;
        host.overlay.away(now_ms);
    }

    /// Expires the lease of a host.
    pub fn expire(&mut self, host: usize) {
        let lease = self.hosts[host - 1].lease;
        let keys: Vec<_> =
            self.store.iter().filter(|(_, kept)| kept.1 == lease).map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| self.delete(key));
    }

    /// Writes any value, as a foreign writer would.
    pub fn put(&mut self, key: &str, value: &str) {
        self.write(key, value.as_bytes().to_vec(), 0);
    }

    fn write(&mut self, key: &str, value: Vec<u8>, lease: i64) {
        self.revision += 1;
        let kept = (value, lease, self.revision);
        self.store.insert(key.into(), kept.clone());
        self.news.push((key.into(), Some(kept), self.revision));
    }

    pub fn delete(&mut self, key: &str) {
        self.revision += 1;
        self.store.remove(key);
        self.news.push((key.into(), None, self.revision));
    }

    pub fn wipe(&mut self) {
        let keys: Vec<_> = self.store.keys().cloned().collect();
        keys.iter().for_each(|key| self.delete(key));
    }

    pub fn keys(&self) -> usize {
        self.store.len()
    }

    pub fn value(&self, key: &str) -> Option<String> {
        self.store.get(key).map(|kept| String::from_utf8(kept.0.clone()).unwrap())
    }

    /// Advances the clock in steps of [`STEP_MS`]; calls `look` after each.
    pub fn run(&mut self, ms: u64, look: impl FnMut(&World)) {
        self.pass(ms, STEP_MS, look);
    }

    /// Advances the clock in steps of a second; calls `look` after each.
    pub fn skip(&mut self, ms: u64, look: impl FnMut(&World)) {
        self.pass(ms, 1_000, look);
    }

    fn pass(&mut self, ms: u64, step_ms: u64, mut look: impl FnMut(&World)) {
        for _ in 0..ms / step_ms {
            self.now_ms += step_ms;
            for index in 0..self.hosts.len() {
                self.step(index, step_ms);
            }
            look(self);
        }
    }

    fn step(&mut self, index: usize, step_ms: u64) {
        let (now_ms, host) = (self.now_ms, &mut self.hosts[index]);
        if host.connected {
            for (key, kept, revision) in &self.news[host.heard..] {
                match kept {
                    Some(kept) => host.put(key, kept, now_ms),
                    None => match &mut host.identity {
                        Some((judge, _)) => {
                            judge.delete(&mut host.overlay, key.as_bytes(), *revision, now_ms);
                        }
                        None => host.overlay.delete(key.as_bytes(), *revision, now_ms),
                    },
                }
            }
            host.heard = self.news.len();
        }
        if let Some((authenticator, _)) = &mut host.identity {
            authenticator.refresh(&mut host.overlay, now_ms);
        }
        // Hosts are polled at different times.
        if (now_ms + index as u64 * STEP_MS) % POLL_MS < step_ms {
            host.overlay.locals(&host.locals);
        }
        host.overlay.tick(now_ms);
        if host.overlay.take_changed() {
            host.computed = host.overlay.computed();
        }
        if now_ms % FULL_MS < step_ms {
            host.assert_full();
        }
        let lease = host.lease;
        let writes = if host.connected { host.writes(now_ms) } else { vec![] };
        for write in writes {
            let is = self.store.get(&write.key).map_or(0, |kept| kept.2);
            match write.value {
                _ if is != write.expect => {}
                Some(value) => self.write(&write.key, value, lease),
                None => self.delete(&write.key),
            }
        }
    }

    pub fn computed(&self, host: usize) -> Computed {
        self.hosts[host - 1].computed.clone()
    }

    /// The next hop for a station, as host `host` sees it.
    pub fn toward(&self, host: usize, id: u32, n: usize) -> Option<String> {
        let computed = self.computed(host);
        let hop = *computed.stations.get(&(network(id), mac(n)))?;
        Some(computed.hops[usize::from(hop)].to_string())
    }

    pub fn alarms(&self, host: usize) -> Vec<String> {
        let shown = self.hosts[host - 1].overlay.show(&[], 0, self.now_ms);
        shown.alarms.into_iter().map(|alarm| alarm.name).collect()
    }

    /// The oracle for a settled mesh of connected hosts: every host knows the location of every guest, and every two hosts
    /// that share a network have a link that carries it.
    pub fn assert_truth(&self) {
        let networks =
            |host: &Host| -> BTreeSet<NetworkId> { host.locals.iter().map(|local| local.network).collect() };
        for (index, host) in self.hosts.iter().enumerate() {
            let mine = networks(host);
            let (mut links, mut stations, mut neighbours) =
                (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
            for (other, there) in self.hosts.iter().enumerate() {
                let shared: Vec<_> = networks(there).intersection(&mine).copied().collect();
                if other != index && !shared.is_empty() {
                    links.insert(name(other + 1), (address(other + 1), shared));
                }
                for local in there.locals.iter().filter(|local| local.up && mine.contains(&local.network)) {
                    let place = (local.network, local.mac.unwrap());
                    if other != index {
                        stations.insert(place, name(other + 1));
                    }
                    neighbours.extend(local.addresses.iter().map(|ip| ((local.network, *ip), place.1)));
                }
            }
            let computed = &host.computed;
            let is: BTreeMap<_, _> =
                computed.links.iter().map(|l| (l.name.to_string(), (l.remote, l.networks.clone()))).collect();
            assert_eq!(is, links, "links of {}", name(index + 1));
            let hop = |(place, hop): (&_, &u16)| (*place, computed.hops[usize::from(*hop)].to_string());
            let is: BTreeMap<_, _> = computed.stations.iter().map(hop).collect();
            assert_eq!(is, stations, "stations of {}", name(index + 1));
            let is: BTreeMap<_, _> = computed.neighbours.iter().map(|(ip, mac)| (*ip, *mac)).collect();
            assert_eq!(is, neighbours, "neighbours of {}", name(index + 1));
            assert!(computed.firm);
        }
    }
}

impl Host {
    /// Asserts that the incremental result equals a full computation.
    fn assert_full(&mut self) {
        let told = |computed: &Computed| {
            let hop = |(place, hop): (&_, &u16)| (*place, computed.hops[usize::from(*hop)].clone());
            let stations: BTreeMap<_, _> = computed.stations.iter().map(hop).collect();
            (stations, computed.neighbours.clone(), computed.links.clone(), computed.firm, computed.hosts)
        };
        let before = told(&self.computed);
        let changed = self.overlay.take_changed();
        self.overlay.restructure();
        self.overlay.take_changed();
        self.computed = self.overlay.computed();
        assert!(changed || before == told(&self.computed), "{before:?} but {:?}", told(&self.computed));
    }

    fn read(&mut self, store: &BTreeMap<String, Kept>, now_ms: u64) {
        self.overlay.begin_reading();
        for (key, kept) in store {
            self.put(key, kept, now_ms);
        }
        match &mut self.identity {
            Some((judge, _)) => judge.end_reading(&mut self.overlay, now_ms),
            None => self.overlay.end_reading(now_ms),
        }
    }

    fn put(&mut self, key: &str, (value, lease, revision): &Kept, now_ms: u64) {
        match &mut self.identity {
            Some((judge, _)) => {
                judge.put(&mut self.overlay, key.as_bytes(), value, *lease, *revision, now_ms);
            }
            None => self.overlay.put(key.as_bytes(), value, *lease, *revision, now_ms),
        }
    }

    fn writes(&mut self, now_ms: u64) -> Vec<Write> {
        let mut writes = self.overlay.writes(now_ms);
        if let Some((authenticator, _)) = &mut self.identity {
            writes.retain_mut(|write| authenticator.sign(write).is_ok());
        }
        writes
    }
}

/// Settings of a host in a given topology.
pub fn in_topology(host: usize, topology: Topology) -> Settings {
    Settings { topology, ..settings(host) }
}
