//! The cost of sealing and opening datagrams on one core. `lab/lab bench links` runs it.
//!
//! Datagrams of 1440 bytes (about the payload at an MTU of 1500) are sealed in place, in bursts of a super-frame's size, then
//! opened. The memory is in the processor's cache, as in vnetd.
//!
//! Usage: `seal [BYTES]` prints one JSON object with payload bits per second.

use std::time::{Duration, Instant};

use vnet::link::sealed::aead::{MATERIAL_LEN, OpeningKey, SealingKey, TAG_LEN};
use vnet::wire::native::{HEADER_LEN, Header, Kind};

/// Number of datagrams in one super-frame of 64 KB.
const BURST: usize = 45;
const TIME: Duration = Duration::from_secs(1);

fn main() {
    let payload = std::env::args().nth(1).map_or(1440, |word| word.parse().expect("a number of bytes"));
    // Any key costs the same.
    let material: [u8; MATERIAL_LEN] = std::array::from_fn(|at| at as u8);
    let (sealing, opening) = (SealingKey::new(&material, 0, 1), OpeningKey::new(&material));
    let size = HEADER_LEN + payload + TAG_LEN;
    let mut burst = vec![0u8; BURST * size];
    let mut number = 1u64;
    let (mut sealed, mut seal_time, mut open_time) = (0u64, Duration::ZERO, Duration::ZERO);
    while seal_time + open_time < 2 * TIME {
        let start = Instant::now();
        for datagram in burst.chunks_exact_mut(size) {
            datagram[..HEADER_LEN].copy_from_slice(&header(number).to_bytes());
            sealing.seal(datagram);
            number += 1;
        }
        seal_time += start.elapsed();
        let start = Instant::now();
        for datagram in burst.chunks_exact_mut(size) {
            opening.open(datagram).expect("a sealed datagram opens");
        }
        open_time += start.elapsed();
        sealed += BURST as u64;
    }
    let bits_per_s = |time: Duration| (sealed * payload as u64 * 8) as f64 / time.as_secs_f64();
    println!("{{\"seal_bps\": {:.0}, \"open_bps\": {:.0}}}", bits_per_s(seal_time), bits_per_s(open_time));
}

fn header(number: u64) -> Header {
    Header {
        kind: Kind::Frame,
        last: false,
        offload: false,
        sealed: true,
        hops: 0,
        epoch: 0,
        index: 0,
        network: 1,
        queue: 0,
        number,
    }
}
