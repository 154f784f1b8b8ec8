//! Windows: losses, timeouts, and streams beside the network.

use super::*;

fn filled(packets: u64) -> Window<u64> {
    let mut window = Window::new(1 << 20);
    for what in 0..packets {
        assert_eq!(window.send(what, what, 100, true), FIRST + what);
    }
    window
}

fn done(window: &mut Window<u64>, now: u64, ack: u64, map: Option<[u64; 4]>) -> Vec<u64> {
    let mut done = vec![];
    window.acknowledge(now, (FIRST + ack) as u32, map.as_ref(), false, &mut done);
    done
}

#[test]
fn three_later_arrivals_make_a_loss() {
    let mut window = filled(10);
    assert_eq!(done(&mut window, 100, 2, Some([0b0110, 0, 0, 0])), [0, 1]);
    assert_eq!(window.resend(100), None, "two later ones have arrived");
    assert_eq!(done(&mut window, 101, 2, Some([0b1110, 0, 0, 0])), [0; 0]);
    assert_eq!(window.resend(101), Some((FIRST + 2, 2)));
    assert_eq!(window.resend(101), None);
    done(&mut window, 102, 2, Some([0b1111_1110, 0, 0, 0]));
    assert_eq!(window.resend(102), None, "its retransmission was sent after these");
    assert_eq!(done(&mut window, 103, 10, None), [2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(window.is_empty() && window.flying_bytes == 0);
}

#[test]
fn old_and_impossible_acknowledgements_change_nothing() {
    let mut window = filled(4);
    assert_eq!(done(&mut window, 10, 3, None), [0, 1, 2]);
    for ack in [0, 2, 5, 1 << 20] {
        assert_eq!(done(&mut window, 11, ack, Some([u64::MAX; 4])), [0; 0]);
    }
    assert_eq!(window.flying_bytes, 100);
}

#[test]
fn timeouts_probe_then_resend_all_then_give_up() {
    let mut window = filled(3);
    assert_eq!(window.tick(TIMEOUT_FIRST_NS - 1, 1 << 40), Timeout::Nothing);
    assert_eq!(window.tick(TIMEOUT_FIRST_NS + 3, 1 << 40), Timeout::Resend);
    assert_eq!(window.resend(30_000_000).unwrap().1, 0);
    assert_eq!(window.resend(30_000_000), None);
    assert_eq!(window.tick(1 << 30, 1 << 40), Timeout::Resend);
    let again: Vec<u64> = std::iter::from_fn(|| window.resend(1 << 30)).map(|(_, what)| what).collect();
    assert_eq!(again, [0, 1, 2], "all are sent again");
    assert_eq!(window.tick(1 << 41, 1 << 40), Timeout::Dead);
}

/// A window that has measured round trips of 100 us, the last of them at the returned time. `has_lost`: packets were lost.
fn measured(has_lost: bool) -> (Window<u64>, u64) {
    const TRIP: u64 = 100_000;
    let mut window = Window::new(1 << 20);
    let mut now = 0;
    for what in 0..20 {
        window.send(now, what, 100, true);
        now += TRIP;
        done(&mut window, now, what + 1, None);
    }
    // Two losses: one can be chance.
    for what in [20, 21] {
        assert_eq!(window.tail_at(), None);
        window.send(now, what, 100, true);
        now = window.deadline().unwrap();
        assert_eq!(window.tick(now, 1 << 40), Timeout::Resend);
        window.resend(now).unwrap();
        // The acknowledgement takes a round trip if the first packet was lost, less if that was only late.
        now += if has_lost { TRIP } else { TRIP / 4 };
        done(&mut window, now, what + 1, None);
    }
    assert!(window.is_empty());
    assert_eq!(window.is_lossy(now), has_lost);
    (window, now)
}

#[test]
fn a_tail_is_sent_again_sooner_where_packets_are_lost() {
    for has_lost in [true, false] {
        let (mut window, now) = measured(has_lost);
        for what in 22..27 {
            window.send(now, what, 100, true);
        }
        let due = if has_lost { TAIL_MIN_NS } else { TIMEOUT_MIN_NS };
        assert_eq!(window.deadline(), Some(now + due));
        assert_eq!(window.tick(now + due - 1, 1 << 40), Timeout::Nothing);
        assert_eq!(window.tick(now + due, 1 << 40), Timeout::Resend);
        let again: Vec<u64> = std::iter::from_fn(|| window.resend(now + due)).map(|(_, what)| what).collect();
        assert_eq!(again, if has_lost { vec![24, 25, 26] } else { vec![22] });
        // Once: then the usual timeout counts.
        if has_lost {
            assert_eq!(window.deadline(), Some(now + due + TIMEOUT_MIN_NS));
            assert!(window.is_timed_out(), "parts of packets are not blamed");
            // The first one of the tail arrives: the packets before it are not lost for that.
            done(&mut window, now + due, 22, Some([0b0100, 0, 0, 0]));
            assert_eq!(window.resend(now + due), None);
            assert_eq!(done(&mut window, now + due, 24, None), [22, 23]);
            window.send(now + due, 27, 100, true);
            assert!(window.tail_at().is_some(), "progress allows the next one");
        }
    }
}

#[test]
fn a_path_counts_as_lossy_for_a_second() {
    let (mut window, now) = measured(true);
    window.send(now + LOSSY_FOR_NS - TAIL_MIN_NS, 22, 100, true);
    assert_eq!(window.deadline(), Some(now + LOSSY_FOR_NS - TAIL_MIN_NS + TIMEOUT_MIN_NS));
    assert!(!window.is_lossy(now + LOSSY_FOR_NS));
    // Another path may lose nothing.
    window.set_lossless(None);
    assert!(!window.is_lossy(now));
}

#[test]
fn what_a_stream_carries_is_lost_only_with_it() {
    let mut window = filled(8);
    // 2 and 5 travel through the stream, 1 is lost in the network.
    for place in [2, 5] {
        window.packets[place].by_stream = true;
        window.flying_bytes -= 100;
        window.streaming += 1;
        window.has_stream = true;
    }
    assert_eq!(done(&mut window, 100, 1, Some([0b110_1100, 0, 0, 0])), [0]);
    let again: Vec<u64> = std::iter::from_fn(|| window.resend(100)).map(|(_, what)| what).collect();
    assert_eq!(again, [1], "those in the stream are late, not lost");
    assert_eq!(window.tick(1 << 30, 1 << 40), Timeout::Resend);
    assert_eq!(window.tick(1 << 31, 1 << 40), Timeout::Resend);
    while let Some((_, what)) = window.resend(1 << 31) {
        assert!(![2, 5].contains(&what));
    }
    assert_eq!(window.end_stream(99, 10), [2, 5]);
    let again: Vec<u64> = std::iter::from_fn(|| window.resend(1 << 31)).map(|(_, what)| what).collect();
    assert_eq!((again, window.streaming), (vec![99, 99], 0));
    assert_eq!(done(&mut window, 1 << 32, 8, None).len(), 7);
    assert!(window.is_empty() && window.flying_bytes == 0);
}

#[test]
fn a_stream_that_flows_hides_no_loss() {
    let mut window: Window<u64> = Window::new(1 << 20);
    window.begin_stream();
    window.send(0, 77, 100, false);
    let mut now = 0;
    for what in 1..200 {
        now += 1_000_000;
        window.send(now, what, 65_000, false);
        window.put_into_stream();
        done(&mut window, now, 0, Some([u64::MAX >> (63 - what.min(63)) & !1, 0, 0, 0]));
        if window.tick(now, 1 << 40) == Timeout::Resend {
            assert_eq!(window.resend(now), Some((FIRST, 77)));
            assert!(now >= TIMEOUT_FIRST_NS);
            return;
        }
    }
    panic!("never sent again");
}

#[test]
fn a_slow_stream_does_not_age_the_networks_packets() {
    let mut window: Window<u64> = Window::new(1 << 20);
    window.begin_stream();
    window.send(1, 1, 65_000, false);
    window.put_into_stream();
    for now in 1..10 {
        assert_eq!(window.tick(now << 30, 1 << 40), Timeout::Nothing);
    }
    let now = 10 << 30;
    window.send(now, 2, 100, false);
    assert_eq!(window.tick(now + TIMEOUT_FIRST_NS - 1, 1 << 40), Timeout::Nothing);
    assert_eq!(window.tick(now + TIMEOUT_FIRST_NS, 1 << 40), Timeout::Resend);
}

#[test]
fn a_stream_has_a_window_of_its_own() {
    let mut window: Window<u64> = Window::new(64 << 10);
    let mut sent = 0;
    window.begin_stream();
    while window.has_room_in_stream() {
        window.send(1, sent, 65_000, false);
        window.put_into_stream();
        sent += 1;
    }
    assert_eq!((sent as usize, window.flying_bytes), (STREAMING_MAX, 0));
    while window.has_room(10) {
        window.send(1, sent, 10, false);
        sent += 1;
    }
    assert_eq!(sent as usize, WINDOW_BESIDE_STREAM, "an acknowledgement tells of so many");
    assert!(window.is_half_full());
    assert_eq!(done(&mut window, 2, sent, None).len() as u64, sent);
    assert_eq!((window.flying_bytes, window.streaming), (0, 0));
    // Of a dead peer nothing arrives, not even through a stream.
    window.send(3, 0, 65_000, false);
    window.put_into_stream();
    assert_eq!(window.tick(1 << 30, 1 << 40), Timeout::Nothing);
    assert_eq!(window.tick(1 << 41, 1 << 40), Timeout::Dead);
}

#[test]
fn the_window_bounds_what_flies() {
    let mut window: Window<u64> = Window::new(1 << 20);
    let mut sent = 0;
    while window.has_room(1400) {
        window.send(1, sent, 1400, false);
        sent += 1;
    }
    assert_eq!(sent, CONGESTION_WINDOW_FIRST / 1400);
    assert_eq!(done(&mut window, 2, sent, None).len() as u64, sent);
    assert!(window.congestion.window > CONGESTION_WINDOW_FIRST, "it grows");
}

#[test]
fn a_lost_packet_can_become_a_smaller_one() {
    let mut window = filled(10);
    done(&mut window, 100, 2, Some([0b1110, 0, 0, 0]));
    assert_eq!(window.resend(101), Some((FIRST + 2, 2)));
    assert_eq!(window.flying_bytes, 500);
    window.replace(FIRST + 2, 99, 16);
    assert_eq!(window.flying_bytes, 416);
    // Neither one that has arrived, nor one that is not in flight.
    window.replace(FIRST + 3, 98, 16);
    window.replace(FIRST, 98, 16);
    window.replace(FIRST + 10, 98, 16);
    assert_eq!(window.flying_bytes, 416);
    let due = window.deadline().unwrap();
    assert_eq!(window.tick(due, u64::MAX), Timeout::Resend);
    assert_eq!(window.resend(due), Some((FIRST + 2, 99)), "it stays so");
    assert_eq!(window.flying_bytes, 416);
    assert_eq!(done(&mut window, due + 1, 10, None), [99, 3, 4, 5, 6, 7, 8, 9]);
    assert!(window.is_empty() && window.flying_bytes == 0);
}
