//! A faulty wire for tests that loses, duplicates and reorders datagrams; reproducible by seed.
//!
//! [`Wire`] works on any sequence of datagrams. [`Relay`] sits between two bridges with real sockets and acts as the peer of
//! each.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};

/// Frequency of each fault, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Datagrams that are lost.
    pub loss: u32,
    /// Datagrams that arrive twice (duplication).
    pub duplication: u32,
    /// Datagrams that arrive after up to [`Faults::distance`] later ones (reordering).
    pub reordering: u32,
    /// Maximum displacement of a reordered datagram, in datagrams.
    pub distance: usize,
}

/// A seeded random number generator (splitmix64: Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that `seed` determines.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A number below `bound`, which must not be 0.
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
    /// A wire whose faults `seed` determines.
    pub fn new(seed: u64, faults: Faults) -> Wire {
        Wire { random: Random::new(seed), faults }
    }

    /// The datagrams of `sent` that arrive, in order of arrival.
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
        // The sort is stable, so that a late datagram arrives behind others with the same position.
        arriving.sort_by_key(|(at, _)| *at);
        arriving.into_iter().map(|(_, datagram)| datagram).collect()
    }
}

/// A faulty wire between two bridges on the loopback.
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

    /// The address that the near bridge uses as its remote.
    pub fn near(&self) -> io::Result<SocketAddr> {
        self.near.local_addr()
    }

    /// The address that the far bridge uses as its remote.
    pub fn far(&self) -> io::Result<SocketAddr> {
        self.far.local_addr()
    }

    /// Forwards waiting datagrams in both directions. Returns how many came from the near and from the far side.
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
