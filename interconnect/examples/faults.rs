//! A transfer whose every byte is checked, and a wire that loses and delays its datagrams (`lab/lab bench interconnect`).
//!
//! `faults relay ADDRESS:PORT SERVER:PORT LOST LATE` forwards datagrams between a client and the server; of a thousand, LOST are lost, and
//! LATE are overtaken by up to `OVERTAKEN` others. `faults serve BIND` takes writes and checks each; `faults check NAME SECONDS [BIND]`
//! makes them, and prints one JSON object. BIND is ADDRESS:PORT, or ether://DEVICE:PORT for raw Ethernet.

use std::error::Error;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vnet_rdma::{
    Access, Completion, Endpoint, Key, Kind, Node, Options, Peer, Span, Status, name_of, resolve,
};

type Done = Result<(), Box<dyn Error>>;

/// Bytes of a write, and the number of writes under way, each with memory of its own.
const LEN: usize = 256 << 10;
const SLOTS: usize = 16;
const WORDS: usize = LEN / 8;
/// Immediate data that ends the transfer.
const LAST: u64 = u64::MAX;
const PATIENCE: Duration = Duration::from_secs(30);
const OVERTAKEN: u32 = 8;
/// Longest delay if nothing comes to overtake.
const QUIET: Duration = Duration::from_millis(1);
const SOCKET_BUFFER: libc::c_int = 8 << 20;

fn main() -> Done {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["relay", here, server, lost, late] => relay(here, server.parse()?, [lost.parse()?, late.parse()?]),
        ["serve", here] => serve(here),
        ["check", name, seconds] => check("0.0.0.0:0", name, seconds.parse()?),
        ["check", name, seconds, here] => check(here, name, seconds.parse()?),
        _ => Err("usage: faults relay HERE SERVER LOST LATE | serve HERE | check NAME SECONDS [HERE]".into()),
    }
}

/// Registered memory, one more word than the slots: it holds the key, and is the source of acknowledgements.
struct Memory(&'static [AtomicU64]);

impl Memory {
    fn new() -> Self {
        Self(Box::leak((0..SLOTS * WORDS + 1).map(|_| AtomicU64::new(0)).collect()))
    }

    fn span(&self, word: usize, words: usize) -> Span {
        let part = &self.0[word..word + words];
        // SAFETY: the memory is never freed, and safe code reads and writes it only as atomics.
        unsafe { Span::new(part.as_ptr().cast_mut().cast(), words * 8) }
    }

    fn slot(&self, number: u64) -> (usize, &[AtomicU64]) {
        let first = number as usize % SLOTS * WORDS;
        (first, &self.0[first..first + WORDS])
    }

    fn note(&self) -> &AtomicU64 {
        &self.0[SLOTS * WORDS]
    }

    fn note_span(&self) -> Span {
        self.span(SLOTS * WORDS, 1)
    }

    fn register(&self, endpoint: &Endpoint) -> Result<Key, Box<dyn Error>> {
        let all = self.span(0, self.0.len());
        Ok(endpoint.register(all, Access { read: false, write: true })?)
    }
}

/// Content of a word of a write: every word of every write differs.
fn content(number: u64, word: usize) -> u64 {
    (number << 32 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The next completion of this kind; all must be successes.
fn wait(endpoint: &Endpoint, kind: Kind, patience: Option<Duration>) -> Result<Completion, Box<dyn Error>> {
    loop {
        let completion = endpoint.wait(patience).ok_or("the peer is silent")?;
        if completion.status != Status::Success {
            return Err(completion.status.into());
        }
        if completion.kind == kind {
            return Ok(completion);
        }
    }
}

fn open(here: &str) -> Result<(Node, Endpoint), Box<dyn Error>> {
    let node = Node::open(&Options { bind: here.parse()?, ..Options::default() })?;
    let endpoint = node.endpoint(Some(0))?;
    Ok((node, endpoint))
}

fn serve(here: &str) -> Done {
    let (node, endpoint) = open(here)?;
    let memory = Memory::new();
    let own = memory.register(&endpoint)?;
    println!("{}", name_of(Peer { address: node.address(), endpoint: 0 }));
    endpoint.receive(memory.note_span(), 0)?;
    let peer = wait(&endpoint, Kind::Receive, None)?.peer;
    let key = memory.note().swap(own, Ordering::Relaxed);
    endpoint.send(peer, memory.note_span(), None, 0)?;
    let mut wrong = 0;
    loop {
        let number = wait(&endpoint, Kind::Arrival, Some(PATIENCE))?.data.unwrap_or(LAST);
        if number == LAST {
            return Ok(());
        }
        let (_, words) = memory.slot(number);
        let is_wrong =
            |(at, word): &(usize, &AtomicU64)| word.load(Ordering::Relaxed) != content(number, *at);
        wrong += words.iter().enumerate().filter(is_wrong).count() as u64 * 8;
        // The acknowledgement's bytes do not matter: it goes where the client's key was.
        let note = (key, (SLOTS * LEN) as u64);
        endpoint.write(peer, memory.note_span(), note, Some(wrong), 0)?;
    }
}

fn check(here: &str, name: &str, seconds: f64) -> Done {
    let peer = resolve(name)?;
    let (node, endpoint) = open(here)?;
    let memory = Memory::new();
    memory.note().store(memory.register(&endpoint)?, Ordering::Relaxed);
    endpoint.send(peer, memory.note_span(), None, 0)?;
    wait(&endpoint, Kind::Send, Some(PATIENCE))?;
    endpoint.receive(memory.note_span(), 0)?;
    wait(&endpoint, Kind::Receive, Some(PATIENCE))?;
    let key = memory.note().load(Ordering::Relaxed);

    let begin = Instant::now();
    let (mut posted, mut done, mut wrong) = (0, 0, 0);
    while begin.elapsed().as_secs_f64() < seconds || posted > done {
        while posted < done + SLOTS as u64 && begin.elapsed().as_secs_f64() < seconds {
            write(&endpoint, &memory, (peer, key), posted)?;
            posted += 1;
        }
        // Acknowledgements come in the order of the writes.
        wrong = wait(&endpoint, Kind::Arrival, Some(PATIENCE))?.data.unwrap_or(0);
        done += 1;
    }
    let bps = done as f64 * LEN as f64 * 8.0 / begin.elapsed().as_secs_f64();
    let resent = node.counters().map_or(0, |counters| counters.resent);
    println!("{{\"bps\": {bps}, \"wrong_bytes\": {wrong}, \"resent\": {resent}}}");
    endpoint.write(peer, memory.note_span(), (key, (SLOTS * LEN) as u64), Some(LAST), LAST)?;
    // Whatever became of it: the peer exits once it has this write, and the relay may lose what acknowledges it. A peer without it fails.
    while endpoint.wait(Some(PATIENCE)).is_some_and(|completion| completion.context != LAST) {}
    Ok(())
}

/// Writes the next content of a slot.
fn write(endpoint: &Endpoint, memory: &Memory, (peer, key): (Peer, Key), number: u64) -> Done {
    let (first, words) = memory.slot(number);
    words.iter().enumerate().for_each(|(at, word)| word.store(content(number, at), Ordering::Relaxed));
    endpoint.write(peer, memory.span(first, WORDS), (key, first as u64 * 8), Some(number), number)?;
    Ok(())
}

/// Forwards between the client, which is the last that sent, and the server.
fn relay(here: &str, server: SocketAddr, faults: [u32; 2]) -> Done {
    let (front, back) = (socket(here)?, socket("0.0.0.0:0")?);
    back.connect(server)?;
    let client = Arc::new(Mutex::new(None));
    println!("ready");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            carry(&front, faults, 7, |datagram, from| {
                *client.lock().expect("no panic") = Some(from);
                // A server that is not there yet is a loss.
                let _ = back.send(datagram);
            })
        });
        scope.spawn(|| {
            carry(&back, faults, 8, |datagram, _| {
                let to = *client.lock().expect("no panic");
                let _ = to.map(|to| front.send_to(datagram, to));
            })
        });
    });
    Ok(())
}

fn socket(here: &str) -> Result<UdpSocket, Box<dyn Error>> {
    let socket = UdpSocket::bind(here)?;
    socket.set_read_timeout(Some(QUIET))?;
    let bytes = SOCKET_BUFFER;
    let value = (&raw const bytes).cast();
    // SAFETY: the option is an integer of four bytes, which lives during the call.
    unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, value, 4) };
    Ok(socket)
}

/// Passes datagrams on, with faults; never returns.
fn carry(from: &UdpSocket, [lost, late]: [u32; 2], seed: u64, mut send: impl FnMut(&[u8], SocketAddr)) {
    let mut room = vec![0; 1 << 16];
    let mut state = seed;
    // One datagram at a time is late: its bytes, and how many still overtake it.
    let mut held: Option<(Vec<u8>, SocketAddr, u32)> = None;
    loop {
        // An error is that the server is not there, or that nothing came in time.
        let received = from.recv_from(&mut room);
        if let Ok((len, origin)) = received {
            // Knuth's MMIX generator; its high bits are good.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let chance = ((state >> 33) % 1000) as u32;
            if (lost..lost + late).contains(&chance) && held.is_none() {
                held = Some((room[..len].to_vec(), origin, OVERTAKEN));
                continue;
            }
            if chance >= lost {
                send(&room[..len], origin);
            }
        }
        if let Some((datagram, origin, left)) = &mut held {
            *left = left.saturating_sub(1);
            if *left == 0 || received.is_err() {
                send(datagram, *origin);
                held = None;
            }
        }
    }
}
