//! Optimistic interrupts through a whole interface: when the guest's eventfd is signalled, and that nothing is forgotten.

use super::*;
use crate::interface::interrupts::{InterruptSettings, Interrupts};

/// Optimistic from the first byte on, with the bounds of the receive density that make it too cold always, or just right.
fn optimistic(always_cold: bool) -> InterruptSettings {
    let density_low = if always_cold { u64::MAX } else { 0 };
    InterruptSettings {
        interrupts: Interrupts::Optimistic,
        density_low,
        density_high: u64::MAX,
        early_bytes: 0,
    }
}

/// A guest that has been notified once, has looked, and waits for the next frame.
fn waiting(settings: InterruptSettings) -> (Host, Guest) {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.offer(32);
    host.deliver(0, &frame(60, 0));
    assert_eq!(calls(&guest), 1);
    wait_for_next(&mut guest);
    host.interface.coalesce().unwrap().set_interrupts(settings);
    assert!(host.interface.coalesce().unwrap().coalesces());
    (host, guest)
}

/// How often the guest was notified since it was asked last.
fn calls(guest: &Guest) -> u64 {
    guest.calls[0].read().unwrap_or(0)
}

/// The guest takes all there is and asks to be notified of the next frame; returns how many it took.
fn wait_for_next(guest: &mut Guest) -> usize {
    let mut taken = 0;
    while guest.read().is_some() {
        taken += 1;
    }
    guest.rings[0].set_used_event(&guest.memory, guest.rings[0].used_idx);
    taken
}

#[test]
fn the_guest_hears_early_and_not_again_if_it_came_in_time() {
    let (mut host, mut guest) = waiting(optimistic(true));
    for round in 1..=5 {
        host.deliver(0, &frame(60, round));
        host.deliver(0, &frame(60, round));
        assert_eq!(calls(&guest), 1, "one early notification for both");
        assert!(host.interface.coalesce().unwrap().end_of_coalescing(0), "withheld");
        assert_eq!(wait_for_next(&mut guest), 2);
        host.interface.coalesce().unwrap().check(0);
        assert_eq!(calls(&guest), 0);
    }
    let stats = &host.stats.interrupts;
    assert_eq!((stats.early.get(), stats.coalesced_withheld.get()), (5, 5));
    assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (0, 0));
    assert_eq!(host.stats.notifications.get(), 6);
}

#[test]
fn a_guest_that_looked_too_early_is_notified_again() {
    let (mut host, mut guest) = waiting(optimistic(true));
    host.deliver(0, &frame(60, 1));
    assert_eq!(calls(&guest), 1);
    assert!(host.interface.coalesce().unwrap().end_of_coalescing(0));
    // It has been there, found nothing and waits at the same place: that looks as if it had not been there.
    host.interface.coalesce().unwrap().check(0);
    assert_eq!(calls(&guest), 1);
    assert_eq!(wait_for_next(&mut guest), 1);
    let stats = &host.stats.interrupts;
    assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (1, 1));
    // Between the bounds it does not come to that.
    host.interface.coalesce().unwrap().set_interrupts(optimistic(false));
    host.deliver(0, &frame(60, 2));
    assert!(!host.interface.coalesce().unwrap().end_of_coalescing(0));
    assert_eq!(calls(&guest), 2, "early and at the end");
}

#[test]
fn a_guest_with_notifications_off_is_not_disturbed() {
    let (mut host, mut guest) = waiting(optimistic(true));
    let here = guest.rings[0].used_idx;
    guest.rings[0].set_used_event(&guest.memory, here.wrapping_sub(1));
    host.deliver(0, &frame(60, 1));
    assert!(!host.interface.coalesce().unwrap().end_of_coalescing(0), "it looks by itself");
    assert_eq!(calls(&guest), 0);
    assert_eq!(host.stats.interrupts.early_discarded.get(), 1);
    assert_eq!(wait_for_next(&mut guest), 1);
    // Off when the frame came and on before the end: that is what the end is for.
    let here = guest.rings[0].used_idx;
    guest.rings[0].set_used_event(&guest.memory, here.wrapping_sub(1));
    host.deliver(0, &frame(60, 2));
    guest.rings[0].set_used_event(&guest.memory, here);
    assert!(!host.interface.coalesce().unwrap().end_of_coalescing(0));
    assert_eq!(calls(&guest), 1);
    assert_eq!(host.stats.interrupts.coalesced_injected.get(), 1);
}

/// Whatever ends the ring or the settings between delivery and end of coalescing: the guest hears of what it was given.
#[test]
fn nothing_is_owed_when_things_change() {
    type Change = fn(&mut Host, &mut Guest);
    let changes: [(&str, Change); 4] = [
        ("direct again", |host, _| {
            host.interface.coalesce().unwrap().set_interrupts(InterruptSettings::default())
        }),
        ("stopped", |_, guest| assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 2)),
        ("disabled", |_, guest| guest.frontend.set_vring_enable(0, false).unwrap()),
        ("mapped anew", |_, guest| drop(guest.frontend.set_mem_table(&[guest.region()]).unwrap())),
    ];
    for (what, change) in changes {
        let (mut host, mut guest) = waiting(optimistic(true));
        host.deliver(0, &frame(60, 1));
        assert_eq!(calls(&guest), 1, "early");
        change(&mut host, &mut guest);
        assert_eq!(calls(&guest), 1, "{what}");
        assert!(!host.interface.coalesce().unwrap().end_of_coalescing(0), "{what}");
        host.interface.coalesce().unwrap().check(0);
        assert_eq!(calls(&guest), 0, "{what}");
        assert_eq!(wait_for_next(&mut guest), 1);
    }
}
