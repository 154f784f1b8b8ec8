//! Sealed datagrams of applications: all that programs forward across a sealed link.

use super::tests::{A, B, Bench, LOOPBACK, known, terms};
use super::*;
use crate::wire::sealed_datagram::SealedDatagram;
use crate::wire::sealed_datagram::tests::{between, frame};

const HOOKS: [&str; 2] = ["from_guest", "from_container"];

impl Bench {
    fn admit(&self, datagram: SealedDatagram) -> bool {
        let flow = Known { datagram: Some(datagram), ..known(B) };
        self.kernel.flows().install(&flow, &self.from, &self.to, &terms())
    }
}

#[test]
fn only_admitted_datagrams_are_taken() {
    let Some(bench) = Bench::new() else { return };
    let sealed = frame(B, A, between());
    let takes = |frame: &[u8]| HOOKS.map(|program| bench.takes_frame(program, frame));
    assert_eq!(takes(&sealed), [false; 2], "unknown");
    assert!(bench.admit(between()));
    assert_eq!(takes(&sealed), [true; 2]);
    assert_eq!(takes(&frame(B, A, between().reversed())), [false; 2], "the other direction");
    // Programs see a sealed datagram exactly where vnetd does: in frames that differ from it in one byte, of headers or payload.
    // Of another station in the datagram's name, vnetd sees the same datagram, but programs take nothing.
    for at in 0..12 {
        let mut other = sealed.clone();
        other[at] ^= 0x10;
        assert_eq!(SealedDatagram::of_frame(&other), Some(between()));
        assert_eq!(takes(&other), [false; 2], "byte {at}");
    }
    let mut taken = 0;
    for at in 12..60 {
        for change in [0x01, 0x02, 0x10, 0x20, 0x40, 0x80, 0xff] {
            let mut other = sealed.clone();
            other[at] ^= change;
            let is_it = SealedDatagram::of_frame(&other) == Some(between());
            assert_eq!(takes(&other), [is_it; 2], "byte {at} ^ {change:#x}");
            taken += u32::from(is_it);
        }
    }
    assert!(taken > 100, "bytes that do not matter: {taken}");
    for len in 34..=43 {
        let is_whole = len == 43;
        assert_eq!(takes(&sealed[..len]), [is_whole; 2], "{len} bytes");
    }
}

#[test]
fn addresses_of_a_frame_are_no_datagram() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.admit(between()));
    // A frame whose addresses are the bytes of the datagram's key.
    let datagram = &frame(B, A, between())[26..38];
    let mut other = [datagram, &[0x08, 0]].concat();
    other.resize(60, 0);
    assert!(!bench.takes_frame("from_guest", &other));
    // Both kinds of a flow are apart in the book, too.
    assert!(bench.install(&terms()));
    let kinds = bench.kernel.flows().largest(9).into_iter().map(|carried| carried.flow.datagram);
    let mut kinds: Vec<_> = kinds.collect();
    kinds.sort_unstable();
    assert_eq!(kinds, [None, Some(between())]);
    assert!(bench.takes_frame("from_guest", &frame(B, A, between().reversed())), "a frame of the stations");
}

#[test]
fn a_datagram_ends_with_the_verdict_on_its_stations() {
    let Some(bench) = Bench::new() else { return };
    assert!(bench.admit(between()));
    let takes = || bench.takes_frame("from_guest", &frame(B, A, between()));
    assert!(takes());
    bench.kernel[1].fetch_add(1, Ordering::Relaxed);
    assert!(!takes(), "a station has moved");
    bench.kernel[1].fetch_sub(1, Ordering::Relaxed);
    bench.kernel.set_generation(8);
    assert!(!takes(), "another setup");
    assert_eq!(bench.kernel.flows().adopted_sources(LOOPBACK), [], "its key has no source");
}
