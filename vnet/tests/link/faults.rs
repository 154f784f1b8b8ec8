//! Loss, duplication and reordering on the wire: no frame is corrupted, and no more frames are lost than their datagrams imply.

use vnet::frame::NetworkId;
use vnet::link::Encapsulation;
use vnet::link::fake::{Faults, Relay, Wire};
use vnet::stats::DropReason;
use vnet::wire::offload::Offload;

use super::host::*;

/// Payload of a datagram on a path of 1500 bytes: less 20 bytes for IP, 8 for UDP, and 16 for the native header.
const FRAGMENT_LEN: usize = 1456;
/// Expected number of losses in each case: enough for a standard deviation of 3 %. Fixed seeds make every run the same.
const LOSSES: f64 = 1_000.0;
/// Number of frames in the case without faults, of which none may be lost.
const WHOLE: usize = 2_000;
/// Number of datagrams in flight: as many as a socket's buffer holds.
const BURST: usize = 36;

/// A frame that carries its number behind the addresses, and bytes that depend on the number.
fn numbered(number: u64, fragments: usize) -> Got {
    let mut bytes = vec![0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1, 0x88, 0xb5];
    bytes.extend(number.to_be_bytes());
    bytes.extend(
        (bytes.len()..FRAGMENT_LEN * fragments - 9).map(|at| (at as u64 ^ number.wrapping_mul(31)) as u8),
    );
    Got { bytes, offload: Offload::default(), network: NetworkId::DEFAULT, hops: 0 }
}

/// Sends `count` frames of `fragments` fragments and returns how many were lost. Those that arrive must be unchanged.
fn lost(count: usize, fragments: usize, seed: u64, faults: Faults) -> usize {
    let (a, b) = (bridge("127.0.0.1:0"), bridge("127.0.0.1:0"));
    let mut relay = Relay::new(a.0.local_addr(), b.0.local_addr(), Wire::new(seed, faults)).unwrap();
    let mut a = Host::new(a, options(relay.near().unwrap(), Encapsulation::Native, Some(1500)));
    let mut b = Host::new(b, options(relay.far().unwrap(), Encapsulation::Native, Some(1500)));
    let mut arrived_once = vec![false; count];
    let (mut sent, mut came) = (0, 0);
    while sent < count {
        let burst: Vec<Got> =
            (sent..count.min(sent + BURST / fragments)).map(|n| numbered(n as u64, fragments)).collect();
        sent += burst.len();
        a.send(&burst);
        relay.pump().unwrap();
        // Lets the reassembly timeout expire; otherwise incomplete frames would fill the memory.
        b.now_ms += 10;
        b.tick(b.now_ms);
        loop {
            let (got, datagrams) = b.receive_once();
            for got in got {
                let number = u64::from_be_bytes(got.bytes[14..22].try_into().unwrap());
                assert!(got.bytes == numbered(number, fragments).bytes, "frame {number} was corrupted");
                came += 1;
                assert!(
                    !std::mem::replace(&mut arrived_once[number as usize], true) || fragments == 1,
                    "reassembled twice"
                );
            }
            if datagrams == 0 {
                break;
            }
        }
    }
    b.now_ms += 200;
    b.tick(b.now_ms);
    assert_eq!(a.link.stats().out_frames.get(), count as u64);
    let stats = b.link.stats();
    assert_eq!(
        stats.in_frames.get(),
        came + stats.drops(DropReason::Reassembly),
        "each frame is delivered or counted"
    );
    arrived_once.iter().filter(|arrived| !**arrived).count()
}

/// At a datagram loss of p, a frame of n datagrams is lost with probability 1-(1-p)^n, whatever is duplicated and reordered.
#[test]
fn frame_loss_follows_datagram_loss() {
    for (case, permille) in (1..).zip([0, 10, 50, 100]) {
        for fragments in [1, 2, 6] {
            for repeated in [0, permille] {
                let faults =
                    Faults { loss: permille, duplication: repeated, reordering: permille, distance: 12 };
                // Each copy of a duplicated datagram may be lost separately.
                let (loss, repeated) = (f64::from(permille) / 1000.0, f64::from(repeated) / 1000.0);
                let gone = loss * (1.0 - repeated + repeated * loss);
                let chance = 1.0 - (1.0 - gone).powi(fragments as i32);
                let count = if permille == 0 { WHOLE } else { (LOSSES / chance) as usize };
                let (lost, expected) = (lost(count, fragments, case, faults) as f64, chance * count as f64);
                assert!(
                    (lost - expected).abs() <= 0.1 * expected,
                    "{lost} of {count} frames of {fragments} datagrams were lost, not {expected:.0}: {faults:?}"
                );
            }
        }
    }
}
