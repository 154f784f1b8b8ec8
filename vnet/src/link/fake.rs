//! A wire that loses, repeats and reorders, for tests: the same seed makes the same faults.
//!
//! [`Wire`] works on any sequence of datagrams. [`Relay`] stands between two bridges with real sockets: each takes the relay
//! for the other.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

/// How often each fault happens, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A datagram does not arrive.
    pub loss: u32,
    /// It arrives twice.
    pub duplication: u32,
    /// It arrives later than up to [`Faults::distance`] of those behind it.
    pub reordering: u32,
    /// How far one is moved at most.
    pub distance: usize,
}

/// A source of random numbers with a seed (splitmix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn happens(&mut self, thousandths: u32) -> bool {
        self.below(1000) < u64::from(thousandths)
    }
}

/// A faulty wire.
#[derive(Clone, Debug)]
pub struct Wire {
    random: Random,
    faults: Faults,
}

impl Wire {
    /// A wire with the faults of `seed`.
    pub fn new(seed: u64, faults: Faults) -> Wire {
        Wire { random: Random::new(seed), faults }
    }

    /// What arrives of `sent`, in the order of arrival.
    pub fn carry<T: Clone>(&mut self, sent: impl IntoIterator<Item = T>) -> Vec<T> {
        let mut arriving: Vec<(usize, T)> = Vec::new();
        for (index, datagram) in sent.into_iter().enumerate() {
            let copies = 1 + usize::from(self.random.happens(self.faults.duplication));
            for _ in 0..copies {
                let late = if self.random.happens(self.faults.reordering) {
                    self.random.below(self.faults.distance as u64 + 1) as usize
                } else {
                    0
                };
                if !self.random.happens(self.faults.loss) {
                    arriving.push((index + late, datagram.clone()));
                }
            }
        }
        // Stable, so that a datagram which is late arrives behind those that overtake it by chance only.
        arriving.sort_by_key(|(at, _)| *at);
        arriving.into_iter().map(|(_, datagram)| datagram).collect()
    }
}

/// A faulty wire between two bridges on this machine's loopback.
pub struct Relay {
    near: UdpSocket,
    far: UdpSocket,
    wire: Wire,
    ends: [SocketAddr; 2],
}

impl Relay {
    /// A relay between the bridges that listen on `near` and `far`.
    pub fn new(near: SocketAddr, far: SocketAddr, wire: Wire) -> io::Result<Relay> {
        let socket = || -> io::Result<UdpSocket> {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        Ok(Relay { near: socket()?, far: socket()?, wire, ends: [near, far] })
    }

    /// The address that the near bridge takes for the far one.
    pub fn near(&self) -> io::Result<SocketAddr> {
        self.near.local_addr()
    }

    /// The address that the far bridge takes for the near one.
    pub fn far(&self) -> io::Result<SocketAddr> {
        self.far.local_addr()
    }

    /// Carries what is waiting in both directions. Returns the numbers of datagrams that came from the near and the far side.
    pub fn pump(&mut self) -> io::Result<[usize; 2]> {
        let mut counts = [0; 2];
        let ways = [(&self.near, &self.far, self.ends[1]), (&self.far, &self.near, self.ends[0])];
        for (count, (from, by, to)) in counts.iter_mut().zip(ways) {
            let mut buffer = vec![0; 65_536];
            let mut waiting = Vec::new();
            loop {
                match from.recv(&mut buffer) {
                    Ok(len) => waiting.push(buffer[..len].to_vec()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
            *count = waiting.len();
            for datagram in self.wire.carry(waiting) {
                by.send_to(&datagram, to)?;
            }
        }
        Ok(counts)
    }
}
