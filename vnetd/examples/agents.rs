//! Load test of the distributed overlay: many agents against one etcd: agents ETCD HOSTS STATIONS AGENTS SECONDS
//!
//! HOSTS hosts have STATIONS stations, evenly distributed. AGENTS of the hosts run a real agent in this process, each with a
//! host's full view and its own connections; the other hosts exist only as records. Prints one JSON object:
//!
//! - `view_s`: time from the start of the agents until the last one knows every station
//! - `agent_cores`, `rss_bytes`: processor use and memory of one agent after that, while one station moves every second
//! - `move_p99_s`: time from the write of a move until 99 % of the agents route to the new host

use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use etcd_client::{Client, PutOptions, Txn, TxnOp};
use tokio::task::LocalSet;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;
use vnet_control::api;
use vnet_control::overlay::record::{HostRecord, Key, Record, StationRecord};
use vnet_control::overlay::{Computed, Local, Overlay, Settings};
use vnetd::store::{Agent, Host, Options};

const NETWORK: NetworkId = NetworkId::DEFAULT;
/// Operations in one transaction (etcd's default limit is 128).
const OPERATIONS: usize = 100;
const LEASE_S: i64 = 600;
const DEADLINE: Duration = Duration::from_secs(300);

/// The agents' progress: how many have a complete view, and at which host each of them sees the moving station.
#[derive(Default)]
struct Seen {
    complete: AtomicUsize,
    moves: Mutex<HashMap<(Mac, String), Vec<Instant>>>,
}

/// A simulated host.
struct Simulated {
    locals: Vec<Local>,
    others: usize,
    complete: bool,
    moving: Vec<Mac>,
    places: HashMap<Mac, String>,
    seen: Arc<Seen>,
}

impl Host for Simulated {
    fn locals(&mut self) -> Vec<Local> {
        self.locals.clone()
    }

    fn heard(&mut self) -> Vec<String> {
        vec![]
    }

    fn join(&mut self, computed: Computed) -> Vec<String> {
        if !self.complete && computed.stations.len() >= self.others {
            self.complete = true;
            self.seen.complete.fetch_add(1, Relaxed);
        }
        for mac in &self.moving {
            let Some(hop) = computed.stations.get(&(NETWORK, *mac)) else { continue };
            let place = computed.hops[usize::from(*hop)].to_string();
            if self.places.insert(*mac, place.clone()).is_some_and(|before| before != place) {
                self.seen.moves.lock().unwrap().entry((*mac, place)).or_default().push(Instant::now());
            }
        }
        vec![]
    }

    fn show(&mut self, _shown: api::Overlay) {}
}

fn name(host: usize) -> String {
    format!("h{host}")
}

fn address(host: usize) -> std::net::SocketAddr {
    ([10, (host >> 16) as u8, (host >> 8) as u8, host as u8], 9000).into()
}

fn mac(station: usize) -> Mac {
    let [.., a, b, c, d] = station.to_be_bytes();
    Mac([2, 0, a, b, c, d])
}

/// Stations of one host.
fn stations(host: usize, hosts: usize, stations: usize) -> impl Iterator<Item = usize> {
    (0..stations).skip(host - 1).step_by(hosts)
}

fn station(host: usize, sequence: u32) -> Vec<u8> {
    StationRecord { host: name(host).into(), sequence, addresses: vec![], withdrawn: false }.write()
}

/// Writes the records of hosts without an agent.
async fn fill(
    client: &mut Client,
    hosts: std::ops::RangeInclusive<usize>,
    all: (usize, usize),
) -> Result<(), Box<dyn Error>> {
    let lease = client.lease_grant(LEASE_S, None).await?.id();
    let options = || Some(PutOptions::new().with_lease(lease));
    let mut operations = vec![];
    for host in hosts {
        let record =
            HostRecord { address: address(host), behind_nat: false, instance: host as u64, withdrawn: false };
        operations.push(TxnOp::put(
            Key::Host(NETWORK, name(host).into()).to_string(),
            record.write(),
            options(),
        ));
        for n in stations(host, all.0, all.1) {
            let key = Key::Station(NETWORK, mac(n)).to_string();
            operations.push(TxnOp::put(key, station(host, 1), options()));
        }
    }
    for operations in operations.chunks(OPERATIONS) {
        client.txn(Txn::new().and_then(operations)).await?;
    }
    Ok(())
}

/// Starts an agent on the current thread's local set.
fn start(endpoint: &str, host: usize, all: (usize, usize), moving: Vec<Mac>, seen: Arc<Seen>) {
    let own: Vec<usize> = stations(host, all.0, all.1).collect();
    let local = |n: &usize| Local {
        network: NETWORK,
        mac: Some(mac(*n)),
        addresses: vec![],
        up: true,
        departed: false,
        in_frames: 0,
    };
    let locals: Vec<_> = own.iter().map(local).collect();
    let settings =
        Settings { address: Some(address(host)), networks: [NETWORK].into(), ..Settings::default() };
    let (others, places) = (all.1 - own.len(), HashMap::new());
    let simulated = Simulated { locals, others, complete: false, moving, places, seen };
    let options = Options {
        endpoints: vec![endpoint.into()],
        tls: None,
        bridge: address(host),
        poll: Duration::from_millis(50),
        reread: Duration::from_secs(300),
    };
    tokio::task::spawn_local(async move {
        let overlay = Overlay::new(name(host).into(), host as u64, settings);
        // The agent runs until the process ends, so its stop channel is never used.
        let (_stop, stopping) = tokio::sync::watch::channel(false);
        Agent::new(overlay, simulated, options).run(stopping).await;
    });
}

/// CPU seconds of this process, and its resident memory in bytes (proc(5)).
fn usage() -> (f64, u64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<f64> = stat
        .rsplit(") ")
        .next()
        .unwrap_or_default()
        .split(' ')
        .filter_map(|field| field.parse().ok())
        .collect();
    let page = rustix::param::page_size() as u64;
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    // Fields are numbered from the state, which is no number: user and system time are fields 14 and 15, memory is 24.
    match fields[..] {
        [_, _, _, _, _, _, _, _, _, _, user, system, _, _, _, _, _, _, _, _, rss, ..] => {
            ((user + system) / ticks, rss as u64 * page)
        }
        _ => (0.0, 0),
    }
}

/// Moves a station to the second host without an agent; returns for each agent that saw the move within a second how many seconds
/// it took.
fn one_move(
    runtime: &tokio::runtime::Runtime,
    client: &mut Client,
    n: usize,
    agents: usize,
    seen: &Seen,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let moved = Instant::now();
    let key = Key::Station(NETWORK, mac(n)).to_string();
    runtime.block_on(client.put(key, station(agents + 2, 2), None))?;
    std::thread::sleep(Duration::from_secs(1));
    let moves = seen.moves.lock().unwrap();
    let times = moves.get(&(mac(n), name(agents + 2))).map_or(&[][..], Vec::as_slice);
    Ok(times.iter().map(|at| at.duration_since(moved).as_secs_f64()).collect())
}

/// The command line: ETCD, then numbers.
fn arguments() -> Result<(String, [usize; 4]), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let usage = || "usage: agents ETCD HOSTS STATIONS AGENTS SECONDS";
    let endpoint = arguments.next().ok_or_else(usage)?;
    let numbers = arguments.map(|number| number.parse()).collect::<Result<Vec<usize>, _>>()?;
    let numbers = <[usize; 4]>::try_from(numbers).map_err(|_| usage())?;
    let [hosts, count, agents, _] = numbers;
    if agents == 0 || agents + 2 > hosts || count < hosts {
        return Err(
            "one or more hosts must have an agent, two must have none, and each must have a station".into()
        );
    }
    Ok((endpoint, numbers))
}

fn main() -> Result<(), Box<dyn Error>> {
    let (endpoint, [hosts, count, agents, seconds]) = arguments()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut client = runtime.block_on(async {
        let mut client = Client::connect([&endpoint], None).await?;
        fill(&mut client, agents + 1..=hosts, (hosts, count)).await?;
        Ok::<_, Box<dyn Error>>(client)
    })?;
    // Each second one station of the first host without an agent moves to the second.
    let moving: Vec<usize> = stations(agents + 1, hosts, count).take(seconds).collect();
    let seen = Arc::new(Seen::default());
    let began = Instant::now();
    let threads = std::thread::available_parallelism()?.get();
    for thread in 0..threads {
        let (endpoint, seen) = (endpoint.clone(), seen.clone());
        let moving: Vec<Mac> = moving.iter().map(|n| mac(*n)).collect();
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            let local = LocalSet::new();
            local.block_on(&runtime, async move {
                for host in (1..=agents).filter(|host| host % threads == thread) {
                    start(&endpoint, host, (hosts, count), moving.clone(), seen.clone());
                }
                std::future::pending::<()>().await
            });
        });
    }
    while seen.complete.load(Relaxed) < agents {
        if began.elapsed() > DEADLINE {
            return Err(format!(
                "after {DEADLINE:?} only {} agents know everything",
                seen.complete.load(Relaxed)
            )
            .into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let view_s = began.elapsed().as_secs_f64();
    std::thread::sleep(Duration::from_secs(1));
    let ((before_s, _), measured) = (usage(), Instant::now());
    let mut late = vec![];
    for n in &moving {
        let times = one_move(&runtime, &mut client, *n, agents, &seen)?;
        // An agent that has not seen the move after a second counts with the full deadline.
        late.extend(std::iter::repeat_n(DEADLINE.as_secs_f64(), agents - times.len().min(agents)));
        late.extend(times);
    }
    let (after_s, rss) = usage();
    let agent_cores = (after_s - before_s) / measured.elapsed().as_secs_f64() / agents as f64;
    late.sort_by(f64::total_cmp);
    let move_p99_s = late.get((late.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
    let rss_bytes = rss / agents as u64;
    println!(
        "{}",
        serde_json::json!({
            "view_s": view_s, "agent_cores": agent_cores, "rss_bytes": rss_bytes, "move_p99_s": move_p99_s
        })
    );
    // The process's end stops the agents' threads.
    std::process::exit(0);
}
