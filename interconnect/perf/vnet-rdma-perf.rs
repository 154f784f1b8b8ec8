//! Measures the interconnect between two processes.
//!
//! `vnet-rdma-perf server BIND` prints its name and serves one client after the other; with `once`, only one. After each client it
//! prints its own processor time while that one measured the rate. BIND is ADDRESS:PORT, or ether://DEVICE:PORT for raw Ethernet.
//! `vnet-rdma-perf client [from BIND] NAME [SIZE [SECONDS]]` measures the one-way latency of 8-byte writes and the rate of writes of SIZE bytes, for
//! SECONDS each; `LATENCY,RATE` in place of SECONDS gives each its own time. It shows how the packets travelled: `udp`, `ethernet`, or
//! `same-host` through shared memory. With VNET_RDMA_MEETING empty they take the network. Across a sealed link they are sealed, unless
//! VNET_RDMA_SEAL is off. A server at an Ethernet device needs `from`.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use vnet_rdma::ether::address::mac_of;
use vnet_rdma::{
    Access, Bind, Completion, Endpoint, Kind, Node, Options, Peer, Region, Status, name_of, resolve,
};

/// Why the program failed, in one line.
type Failure = Box<dyn Error>;

const BOTH: Access = Access { read: true, write: true };
/// Memory that each side offers.
const MEMORY: usize = 4 << 20;
/// Writes under way.
const DEPTH: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(15);
/// How often a silent client is asked for a sign of life.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// Immediate data that ends the latency part, or the session.
const LAST: u64 = u64::MAX;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["server", bind] => serve(bind, false),
        ["server", bind, "once"] => serve(bind, true),
        ["client", "from", bind, ref rest @ ..] if !rest.is_empty() => client(Some(bind), rest),
        ["client", ref rest @ ..] if !rest.is_empty() => client(None, rest),
        _ => return usage(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnet-rdma-perf: {error}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!(
        "usage: vnet-rdma-perf server BIND [once] | client [from BIND] NAME [SIZE [SECONDS]]; BIND is ADDRESS:PORT or \
         ether://DEVICE:PORT, NAME is HOST:PORT/0 or ether://MAC:PORT/0"
    );
    ExitCode::from(2)
}

fn client(bind: Option<&str>, arguments: &[&str]) -> Result<(), Failure> {
    match arguments {
        [name] => measure(bind, name, "2097152", "2"),
        [name, size] => measure(bind, name, size, "2"),
        [name, size, seconds] => measure(bind, name, size, seconds),
        _ => Err(wrong(&arguments.join(" "))),
    }
}

/// Opens a node, which registers only memory of the library.
fn open(bind: &str) -> Result<Node, Failure> {
    Ok(Node::open(&Options { bind: bind_to(bind)?, own_memory: false, ..Options::default() })?)
}

fn bind_to(text: &str) -> Result<Bind, Failure> {
    Ok(text.parse()?)
}

fn wrong(text: &str) -> Failure {
    format!("'{text}' is a wrong argument: SIZE is 1 to {MEMORY} bytes, SECONDS a number, or LATENCY,RATE")
        .into()
}

/// The next completion of this kind, which must be a success.
fn wait(endpoint: &Endpoint, kind: Kind, patience: Option<Duration>) -> Result<Completion, Failure> {
    loop {
        match endpoint.wait(patience) {
            Some(completion) if completion.status != Status::Success => return Err(failed(&completion)),
            Some(completion) if completion.kind == kind => return Ok(completion),
            Some(_) => {}
            None => return Err("the peer is silent".into()),
        }
    }
}

/// Why an operation failed.
fn failed(completion: &Completion) -> Failure {
    if completion.peer.address.port() == 0 {
        // That of no peer.
        return "the host's vnetd, which ran the engine, has ended it: it was stopped, or does not allow it any more".into();
    }
    format!("{}: {}", name_of(completion.peer), completion.status).into()
}

/// Prints a line. Who needs only the first ones may have closed the pipe.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn serve(bind: &str, once: bool) -> Result<(), Failure> {
    let node = open(bind)?;
    let endpoint = node.endpoint(Some(0))?;
    say(&name_of(Peer { address: node.address(), endpoint: 0 }));
    loop {
        let done = serve_one(&endpoint);
        if once {
            return done;
        }
        if let Err(error) = done {
            eprintln!("vnet-rdma-perf: {error}");
        }
    }
}

fn serve_one(endpoint: &Endpoint) -> Result<(), Failure> {
    let region = Region::new(endpoint, MEMORY, BOTH)?;
    endpoint.receive(region.span(0, 8)?, 0)?;
    let peer = wait(endpoint, Kind::Receive, None)?.peer;
    let mut key = [0; 8];
    region.copy_to(0, &mut key)?;
    let key = u64::from_be_bytes(key);
    region.fill(8, &region.key().to_be_bytes())?;
    endpoint.send(peer, region.span(8, 8)?, None, 0)?;
    // Latency: each write is answered by one.
    while wait(endpoint, Kind::Arrival, Some(PATIENCE))?.data != Some(LAST) {
        endpoint.write(peer, region.span(0, 8)?, (key, 0), Some(0), 0)?;
    }
    // Rate: the client's writes need no answer but the acknowledgement.
    let cpu = cpu_seconds();
    let mut probed = false;
    loop {
        match endpoint.wait(Some(PROBE_EVERY)) {
            Some(completion) if completion.status != Status::Success => return Err(failed(&completion)),
            Some(completion) if completion.kind == Kind::Write => probed = false,
            Some(completion) if completion.data == Some(LAST) => break,
            // A write of nothing fails if the client is gone.
            None if !std::mem::replace(&mut probed, true) => {
                endpoint.write(peer, region.span(0, 0)?, (key, 0), None, 0)?;
            }
            _ => {}
        }
    }
    say(&format!("cpu_s {:.3}", cpu_seconds() - cpu));
    Ok(endpoint.deregister(region.key())?)
}

fn measure(bind: Option<&str>, name: &str, size: &str, seconds: &str) -> Result<(), Failure> {
    let size: usize =
        size.parse().ok().filter(|size| (1..=MEMORY).contains(size)).ok_or_else(|| wrong(size))?;
    let (latency_s, rate_s) = seconds.split_once(',').unwrap_or((seconds, seconds));
    let latency_s: f64 = latency_s.parse().map_err(|_| wrong(latency_s))?;
    let rate_s: f64 = rate_s.parse().map_err(|_| wrong(rate_s))?;
    let peer = resolve(name)?;
    let any = match bind {
        Some(bind) => bind,
        None if mac_of(peer.address).is_some() => {
            return Err(
                format!("{name} is an Ethernet station: write client from ether://DEVICE:0 {name}").into()
            );
        }
        None if peer.address.is_ipv4() => "0.0.0.0:0",
        None => "[::]:0",
    };
    let node = open(any)?;
    let endpoint = node.endpoint(Some(0))?;
    let region = Region::new(&endpoint, MEMORY, BOTH)?;
    region.fill(0, &region.key().to_be_bytes())?;
    endpoint.receive(region.span(8, 8)?, 0)?;
    endpoint.send(peer, region.span(0, 8)?, None, 0)?;
    wait(&endpoint, Kind::Receive, Some(PATIENCE))?;
    let mut key = [0; 8];
    region.copy_to(8, &mut key)?;
    let key = u64::from_be_bytes(key);
    settle(&endpoint);

    let mut times = latency(&endpoint, &region, peer, key, latency_s)?;
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_nanos() as f64 / 2000.0;
    say(&format!("latency_us {:.2} p99_us {:.2} messages {}", at(50), at(99), times.len()));
    let cpu = cpu_seconds();
    let start = Instant::now();
    let bytes = rate(&endpoint, &region, (peer, key), size, rate_s)?;
    let time = start.elapsed().as_secs_f64();
    let cpu = (cpu_seconds() - cpu) / (bytes as f64 / 1e9);
    say(&format!(
        "gbit_s {:.5} size {size} cpu_s_per_gb {cpu:.3} resent {} attachment {} streams {} bounces {}",
        bytes as f64 * 8e-9 / time,
        node.counters().map_or("-".into(), |counters| counters.resent.to_string()),
        endpoint.attachment(peer),
        node.stream_counters().streams,
        node.bounce_counters().bounces
    ));
    endpoint.write(peer, region.span(0, 1)?, (key, 0), Some(LAST), 0)?;
    wait(&endpoint, Kind::Write, Some(PATIENCE))?;
    Ok(())
}

/// Gives a daemon the time to open shared memory. Without one it costs a moment.
fn settle(endpoint: &Endpoint) {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(100) {
        endpoint.poll();
    }
}

/// Round trips of 8-byte writes.
fn latency(
    endpoint: &Endpoint,
    region: &Region,
    peer: Peer,
    key: u64,
    seconds: f64,
) -> Result<Vec<Duration>, Failure> {
    let mut times = vec![];
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < seconds || times.is_empty() {
        let start = Instant::now();
        endpoint.write(peer, region.span(0, 8)?, (key, 0), Some(0), 0)?;
        wait(endpoint, Kind::Arrival, Some(PATIENCE))?;
        times.push(start.elapsed());
    }
    endpoint.write(peer, region.span(0, 8)?, (key, 0), Some(LAST), LAST)?;
    while wait(endpoint, Kind::Write, Some(PATIENCE))?.context != LAST {}
    Ok(times)
}

/// Writes with `DEPTH` under way; returns the bytes that arrived.
fn rate(
    endpoint: &Endpoint,
    region: &Region,
    (peer, key): (Peer, u64),
    size: usize,
    seconds: f64,
) -> Result<u64, Failure> {
    let (mut posted, mut done) = (0, 0);
    let begin = Instant::now();
    loop {
        let is_over = begin.elapsed().as_secs_f64() >= seconds && posted > 0;
        while posted - done < DEPTH && !is_over {
            endpoint.write(peer, region.span(0, size)?, (key, 0), None, 0)?;
            posted += 1;
        }
        if posted == done {
            return Ok(done * size as u64);
        }
        wait(endpoint, Kind::Write, Some(PATIENCE))?;
        done += 1;
    }
}

/// Processor time of this process.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<f64> = stat
        .rsplit(')')
        .next()
        .map(|rest| rest.split_whitespace().filter_map(|field| field.parse().ok()).collect())
        .unwrap_or_default();
    // Behind the state, which is no number: utime and stime are the 11th and 12th, in hundredths of a second.
    fields.get(10..12).map_or(0.0, |times| times.iter().sum::<f64>() / 100.0)
}
