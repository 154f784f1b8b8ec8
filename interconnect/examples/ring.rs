//! An RDMA ring exchange: each process writes into the memory of its right neighbour.
//!
//! Start one process for each place: `ring PLACE NAME NAME NAME…`, where the names are those of all places, such as 10.77.1.1:7000/0.

use std::error::Error;
use std::time::Duration;

use vnet_rdma::{Access, Completion, Endpoint, Kind, Node, Options, Region, Status, resolve};

const LEN: usize = 1 << 20;
const ROUNDS: u64 = 10;
const PATIENCE: Duration = Duration::from_secs(30);

/// Completions that came while another kind was waited for: the left neighbour may be faster.
#[derive(Default)]
struct Seen(Vec<Completion>);

impl Seen {
    /// Waits for a completion of this kind.
    fn wait(&mut self, endpoint: &Endpoint, kind: Kind) -> Result<Completion, Box<dyn Error>> {
        loop {
            if let Some(place) = self.0.iter().position(|completion| completion.kind == kind) {
                return Ok(self.0.remove(place));
            }
            let completion = endpoint.wait(Some(PATIENCE)).ok_or("no completion in 30 seconds")?;
            if completion.status != Status::Success {
                return Err(completion.status.into());
            }
            // Nobody asks for the ends of writes and sends here.
            if matches!(completion.kind, Kind::Arrival | Kind::Receive) {
                self.0.push(completion);
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (place, names) = arguments.split_first().ok_or("usage: ring PLACE NAME...")?;
    let place: usize = place.parse()?;
    let peers = names.iter().map(|name| resolve(name)).collect::<Result<Vec<_>, _>>()?;
    let (left, right) = (peers[(place + peers.len() - 1) % peers.len()], peers[(place + 1) % peers.len()]);

    let node = Node::open(&Options { bind: peers[place].address.into(), ..Options::default() })?;
    let endpoint = node.endpoint(Some(peers[place].endpoint))?;
    // The right neighbour needs no right to read.
    let inbox = Region::new(&endpoint, LEN, Access { read: false, write: true })?;
    let outbox = Region::new(&endpoint, LEN + 16, Access::default())?;

    // The left neighbour learns the key of the inbox, this process that of the right one's.
    outbox.fill(LEN, &inbox.key().to_be_bytes())?;
    endpoint.receive(outbox.span(LEN + 8, 8)?, 0)?;
    endpoint.send(left, outbox.span(LEN, 8)?, None, 0)?;
    let mut seen = Seen::default();
    seen.wait(&endpoint, Kind::Receive)?;
    let mut key = [0; 8];
    outbox.copy_to(LEN + 8, &mut key)?;
    let key = u64::from_be_bytes(key);

    for round in 0..ROUNDS {
        outbox.fill(0, &vec![place as u8 + round as u8; LEN])?;
        // The round travels as immediate data: when it arrives, so have all bytes.
        endpoint.write(right, outbox.span(0, LEN)?, (key, 0), Some(round), round)?;
        let arrived = seen.wait(&endpoint, Kind::Arrival)?;
        let mut bytes = vec![0; LEN];
        inbox.copy_to(0, &mut bytes)?;
        let from = (place + peers.len() - 1) % peers.len();
        let is_right = bytes.iter().all(|byte| *byte == from as u8 + round as u8);
        if arrived.data != Some(round) || !is_right {
            return Err("wrong bytes".into());
        }
        // Both neighbours are told that the memory may be used again.
        endpoint.receive(outbox.span(LEN + 8, 1)?, 0)?;
        endpoint.send(left, outbox.span(LEN, 1)?, None, 0)?;
        seen.wait(&endpoint, Kind::Receive)?;
    }
    let (sent, resent) = (endpoint.counters()?.packets, node.counters().map_or(0, |all| all.resent));
    println!("{ROUNDS} rounds of {LEN} bytes: {sent} packets, {resent} repeated");
    Ok(())
}
