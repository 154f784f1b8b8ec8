//! Optimistic interrupts through a whole interface: shows when the guest's eventfd is signalled, and that no notification is
//! lost.

use super::*;
use crate::interface::interrupts::{CHECK_AFTER, InterruptSettings, Interrupts};

/// Early interrupts from the first byte on, with thresholds that make every receive density too cold or in between.
fn optimistic(always_cold: bool) -> InterruptSettings {
    let density_low = if always_cold { u64::MAX } else { 0 };
    InterruptSettings {
        interrupts: Interrupts::Optimistic,
        density_low,
        density_high: u64::MAX,
        early_bytes: 0,
    }
}

/// A guest that was notified once, emptied its ring, and waits for the next frame.
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

/// Number of notifications to the guest since the last call.
fn calls(guest: &Guest) -> u64 {
    guest.calls[0].read().unwrap_or(0)
}

/// The guest consumes all frames and requests a notification of the next one. Returns the number consumed.
fn wait_for_next(guest: &mut Guest) -> usize {
    let mut taken = 0;
    while guest.read().is_some() {
        taken += 1;
    }
    guest.rings[0].set_used_event(&guest.memory, guest.rings[0].used_idx);
    taken
}

#[test]
fn an_early_interrupt_in_time_is_the_only_one() {
    let (mut host, mut guest) = waiting(optimistic(true));
    for round in 1..=5 {
        host.deliver(0, &frame(60, round));
        host.deliver(0, &frame(60, round));
        assert_eq!(calls(&guest), 1, "one early notification for both");
        assert!(host.interface.coalesce().unwrap().end_of_coalescing(0).is_some(), "withheld");
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
fn a_premature_early_interrupt_is_repeated() {
    let (mut host, mut guest) = waiting(optimistic(true));
    host.deliver(0, &frame(60, 1));
    assert_eq!(calls(&guest), 1);
    assert!(host.interface.coalesce().unwrap().end_of_coalescing(0).is_some());
    // A guest that checked the ring, found nothing and waits at the same index cannot be told from one that has not checked.
    host.interface.coalesce().unwrap().check(0);
    assert_eq!(calls(&guest), 1);
    assert_eq!(wait_for_next(&mut guest), 1);
    let stats = &host.stats.interrupts;
    assert_eq!((stats.early_premature.get(), stats.coalesced_injected.get()), (1, 1));
    // Between the thresholds the guest is always notified at the end.
    host.interface.coalesce().unwrap().set_interrupts(optimistic(false));
    host.deliver(0, &frame(60, 2));
    assert_eq!(host.interface.coalesce().unwrap().end_of_coalescing(0), None);
    assert_eq!(calls(&guest), 2, "early and at the end");
}

#[test]
fn arrivals_are_announced_before_the_frames_are_there() {
    let (mut host, mut guest) = waiting(optimistic(true));
    let interface = host.interface.clone();
    let coalesce = interface.coalesce().unwrap();
    assert!(coalesce.announce(0, 60));
    assert_eq!(calls(&guest), 1);
    // The guest finds its ring empty, and waits at the same index.
    assert_eq!(wait_for_next(&mut guest), 0);
    host.deliver(0, &frame(60, 1));
    assert_eq!(calls(&guest), 0, "one at a time");
    assert!(coalesce.end_of_coalescing(0).is_some(), "withheld");
    assert!(!coalesce.has_reacted(0));
    coalesce.check(0);
    assert_eq!((calls(&guest), wait_for_next(&mut guest)), (1, 1));
    assert_eq!(host.stats.interrupts.early_premature.get(), 1);
    // The next one backs off; the one after it finds the guest in time, so that it needs no check.
    assert!(!coalesce.announce(0, 60));
    assert!(coalesce.announce(0, 60));
    assert_eq!(calls(&guest), 1);
    host.deliver(0, &frame(60, 2));
    assert!(
        coalesce.end_of_coalescing(0).is_some_and(|time| time == 2 * CHECK_AFTER),
        "the guest was late before"
    );
    assert_eq!(wait_for_next(&mut guest), 1);
    assert!(coalesce.has_reacted(0));
    // No frame follows an announcement.
    assert!(coalesce.announce(0, 60));
    assert_eq!(coalesce.end_of_coalescing(0), None);
    // A guest that polls is not announced anything.
    assert!(coalesce.announce(0, 60) && coalesce.end_of_coalescing(0).is_none());
    let here = guest.rings[0].used_idx;
    guest.rings[0].set_used_event(&guest.memory, here.wrapping_sub(1));
    assert!(!coalesce.announce(0, 60));
    let stats = &host.stats.interrupts;
    assert_eq!((stats.early.get(), stats.early_at_arrival.get(), stats.early_discarded.get()), (4, 4, 1));
}

#[test]
fn a_polling_guest_is_not_interrupted() {
    let (mut host, mut guest) = waiting(optimistic(true));
    let here = guest.rings[0].used_idx;
    guest.rings[0].set_used_event(&guest.memory, here.wrapping_sub(1));
    host.deliver(0, &frame(60, 1));
    assert_eq!(host.interface.coalesce().unwrap().end_of_coalescing(0), None, "it polls");
    assert_eq!(calls(&guest), 0);
    assert_eq!(host.stats.interrupts.early_discarded.get(), 1);
    assert_eq!(wait_for_next(&mut guest), 1);
    // Notifications were off when the frame arrived and are on before the end of coalescing: the guest is notified at the end.
    let here = guest.rings[0].used_idx;
    guest.rings[0].set_used_event(&guest.memory, here.wrapping_sub(1));
    host.deliver(0, &frame(60, 2));
    guest.rings[0].set_used_event(&guest.memory, here);
    assert_eq!(host.interface.coalesce().unwrap().end_of_coalescing(0), None);
    assert_eq!(calls(&guest), 1);
    assert_eq!(host.stats.interrupts.coalesced_injected.get(), 1);
}

/// Whatever changes between delivery and the end of coalescing, the guest is notified of delivered frames.
#[test]
fn changes_settle_owed_notifications() {
    type Change = fn(&mut Host, &mut Guest);
    let changes: [(&str, Change); 4] = [
        ("direct again", |host, _| {
            host.interface.coalesce().unwrap().set_interrupts(InterruptSettings::default())
        }),
        ("stopped", |_, guest| assert_eq!(guest.frontend.get_vring_base(0).unwrap(), 2)),
        ("disabled", |_, guest| guest.frontend.set_vring_enable(0, false).unwrap()),
        ("remapped", |_, guest| drop(guest.frontend.set_mem_table(&[guest.region()]).unwrap())),
    ];
    for (what, change) in changes {
        let (mut host, mut guest) = waiting(optimistic(true));
        host.deliver(0, &frame(60, 1));
        assert_eq!(calls(&guest), 1, "early");
        change(&mut host, &mut guest);
        assert_eq!(calls(&guest), 1, "{what}");
        assert_eq!(host.interface.coalesce().unwrap().end_of_coalescing(0), None, "{what}");
        host.interface.coalesce().unwrap().check(0);
        assert_eq!(calls(&guest), 0, "{what}");
        assert_eq!(wait_for_next(&mut guest), 1);
    }
}
