//! A host under test: a bridge with one link, which the test drives like a dispatcher.

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vnet::frame::{BATCH_MAX, Batch, DropSink, Frame, NetworkId, PortId, Segment, Selection};
use vnet::link::fake::Random;
use vnet::link::{Bridge, Encapsulation, Link, LinkOptions, PathWatch, Peers, ReassemblyBudget};
use vnet::source::{Source, drain};
use vnet::stats::{DiscardReason, PortStats};
use vnet::wire::offload::{F_NEEDS_CSUM, GSO_TCPV4, Offload};

pub use crate::common::link_to as options;

pub const TSO: Offload = Offload {
    flags: F_NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 54,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};
pub const CSUM: Offload =
    Offload { flags: F_NEEDS_CSUM, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 34, csum_offset: 6 };

/// A received frame.
#[derive(Clone, PartialEq, Eq)]
pub struct Got {
    pub bytes: Vec<u8>,
    pub offload: Offload,
    pub network: NetworkId,
    pub hops: u8,
}

impl std::fmt::Debug for Got {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} bytes, {:?}, network {}, hops {}",
            self.bytes.len(),
            self.offload,
            self.network,
            self.hops
        )
    }
}

pub struct Host {
    pub bridge: Bridge,
    /// Queries the kernel's routes, like the prober of a core.
    pub paths: PathWatch,
    pub link: Arc<Link>,
    pub peers: Arc<Peers>,
    pub unknown: Arc<PortStats>,
    pub now_ms: u64,
}

pub fn bridge(listen: &str) -> (Bridge, Arc<PortStats>) {
    let stats: Arc<PortStats> = Arc::default();
    let budget = Arc::new(ReassemblyBudget::new(ReassemblyBudget::HOST));
    (Bridge::bind(listen.parse().unwrap(), false, stats.clone(), budget).unwrap(), stats)
}

impl Host {
    pub fn new((bridge, unknown): (Bridge, Arc<PortStats>), options: LinkOptions) -> Host {
        let link = Link::new(options, PortId(7), Arc::default());
        let peers = Arc::new(Peers::build(std::slice::from_ref(&link)));
        let paths = PathWatch::of(std::slice::from_ref(&bridge));
        Host { bridge, paths, link, peers, unknown, now_ms: 1 }
    }

    /// Two linked hosts on the loopback address `ip`.
    pub fn pair(ip: &str, encapsulation: Encapsulation, mtu: Option<u16>) -> [Host; 2] {
        let (a, b) = (bridge(ip), bridge(ip));
        let (a_addr, b_addr) = (a.0.local_addr(), b.0.local_addr());
        [Host::new(a, options(b_addr, encapsulation, mtu)), Host::new(b, options(a_addr, encapsulation, mtu))]
    }

    /// Sends frames in batches like a dispatcher; each frame is split into segments of odd lengths.
    pub fn send(&mut self, frames: &[Got]) {
        // A core does the same before it publishes a link.
        self.paths.meet_all(std::slice::from_ref(&self.link));
        for chunk in frames.chunks(BATCH_MAX) {
            let mut batch = Batch::new();
            for (n, frame) in chunk.iter().enumerate() {
                let mut builder = batch.begin();
                let (head, tail) = frame.bytes.split_at((n * 37).min(frame.bytes.len()));
                let (middle, tail) = tail.split_at(tail.len() / 3);
                for part in [head, middle, tail] {
                    // SAFETY: the frames outlive the batch, which ends with this call, and are not written to.
                    unsafe { builder.push(Segment::new(part.as_ptr(), part.len())) };
                }
                builder.finish(PortId(1), frame.network, frame.offload, frame.hops).unwrap();
            }
            let which: Vec<u16> = (0..batch.len() as u16).collect();
            let frames = Selection { batch: &batch, which: &which };
            self.bridge.tx.send(&self.link, frames, &mut DropSink::new());
        }
    }

    /// Queries the routes that are due, like the prober.
    pub fn ask_routes(&mut self, now_ms: u64) {
        self.paths.look_at_all(self.peers.links(), now_ms);
    }

    /// Advances the receivers' clock.
    pub fn tick(&mut self, now_ms: u64) {
        self.bridge.peers.store(self.peers.clone());
        self.bridge.rx.iter_mut().for_each(|receiver| receiver.tick(now_ms));
    }

    /// Receives what is waiting on each socket. Returns the frames and the number of datagrams.
    pub fn receive_once(&mut self) -> (Vec<Got>, usize) {
        let mut got = vec![];
        let mut run = |batch: &Batch| {
            assert!(!batch.is_empty() && batch.len() <= BATCH_MAX);
            // These allocations reuse and overwrite the memory of a frame that was freed too early.
            let _spoilt: Vec<Vec<u8>> = batch.frames().iter().map(|frame| vec![0xee; frame.len()]).collect();
            got.extend(batch.frames().iter().map(|frame| copy(batch, frame)));
        };
        self.bridge.peers.store(self.peers.clone());
        let mut datagrams = 0;
        for receiver in &mut self.bridge.rx {
            datagrams += drain(receiver, self.now_ms, &mut run);
        }
        (got, datagrams)
    }

    /// Receives until `count` frames have arrived; fails after 5 s.
    pub fn receive(&mut self, count: usize) -> Vec<Got> {
        let (mut got, start) = (vec![], Instant::now());
        while got.len() < count {
            let (more, datagrams) = self.receive_once();
            got.extend(more);
            if datagrams == 0 {
                let waited = start.elapsed();
                assert!(waited < Duration::from_secs(5), "{} of {count} frames came", got.len());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        got
    }

    pub fn discards(&self) -> Vec<(DiscardReason, u64)> {
        let all = DiscardReason::ALL.iter().map(|reason| (*reason, self.link.stats().discards(*reason)));
        all.filter(|(_, n)| *n != 0).collect()
    }
}

pub fn copy(batch: &Batch, frame: &Frame) -> Got {
    assert_eq!(frame.from, PortId(7));
    let mut bytes = vec![0; frame.len()];
    batch.copy_to(frame, &mut bytes);
    assert_eq!(
        (&frame.dst.0, &frame.src.0),
        (bytes[..6].try_into().unwrap(), bytes[6..12].try_into().unwrap())
    );
    Got { bytes, offload: frame.offload, network: frame.network, hops: frame.hops }
}

pub fn frame(len: usize, seed: u64) -> Got {
    let mut random = Random::new(seed);
    let bytes = (0..len).map(|_| random.below(256) as u8).collect();
    Got { bytes, offload: Offload::default(), network: NetworkId::DEFAULT, hops: 0 }
}

/// The frames in the form in which they arrive at the other host.
pub fn arrived(frames: &[Got]) -> Vec<Got> {
    frames.iter().map(|frame| Got { hops: frame.hops + 1, ..frame.clone() }).collect()
}

pub fn bytes(frames: &[Got]) -> u64 {
    frames.iter().map(|frame| frame.bytes.len() as u64).sum()
}

/// A host whose peer is a plain socket, which receives every datagram.
pub fn raw_peer(encapsulation: Encapsulation, mtu: u16) -> (Host, UdpSocket) {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let host =
        Host::new(bridge("127.0.0.1:0"), options(peer.local_addr().unwrap(), encapsulation, Some(mtu)));
    peer.connect(host.bridge.local_addr()).unwrap();
    (host, peer)
}

pub fn datagrams(peer: &UdpSocket) -> Vec<Vec<u8>> {
    let mut buffer = vec![0; 65_536];
    std::iter::from_fn(|| peer.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec())).collect()
}
