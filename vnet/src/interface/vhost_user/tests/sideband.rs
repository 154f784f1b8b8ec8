//! The sideband of a guest under a front end, and pages that the guest lends.

use super::*;
use crate::frame::Origin;
use crate::interface::sideband::{ETHERTYPE, GROUP, Sideband, WithSideband};
use crate::interface::virtqueue::window::{PAGE, PageRun, Window, WindowError};

fn pair() -> (Host, Guest) {
    let host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    (host, guest)
}

/// Lends two pages of the guest's buffers.
fn lend(host: &Host) -> Result<Window, WindowError> {
    let run = |page| PageRun { addr: ARENA + page * PAGE, len: PAGE };
    host.interface.loans().unwrap().lend(&[run(3), run(1)])
}

#[test]
fn control_frames_pass_between_guest_and_program() {
    let (mut host, mut guest) = pair();
    let origin = Origin { port: PortId(1), network: NetworkId::DEFAULT };
    let sideband = Sideband::new(host.interface.clone(), origin, 1500, host.stats.clone()).unwrap();
    host.sources = vec![Arc::new(WithSideband(sideband.clone())).source(0)];
    let mut control = frame(100, 5);
    control[..6].copy_from_slice(&GROUP.0);
    control[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    guest.transmit(&frame(64, 1));
    guest.transmit(&control);
    guest.transmit(&frame(64, 2));
    assert_eq!(host.receive(), [frame(64, 1), frame(64, 2)]);
    assert_eq!(sideband.take().unwrap().bytes, control);
    // All three chains are back.
    (0..3).for_each(|_| assert!(guest.rings[1].collect(&guest.memory).is_some()));
    guest.offer(1);
    let calls = || guest.calls[0].read().unwrap_or(0);
    calls();
    sideband.tell(&control).unwrap();
    assert_eq!(calls(), 1, "the guest is notified");
    assert_eq!(guest.read(), Some(control.clone()));
    sideband.tell(&control).unwrap();
    assert_eq!(host.stats.drops(DropReason::NoBuffer), 1);
    assert_eq!(host.stats.in_frames.get() + host.stats.copies.get(), 5);
    assert_eq!(host.stats.out_frames.get(), 2);
}

#[test]
fn pages_are_lent_until_the_rings_stop_or_the_memory_goes() {
    let (host, mut guest) = pair();
    let window = lend(&host).unwrap();
    guest.memory.write(ARENA + 3 * PAGE, b"of the guest");
    // SAFETY: the window's first page is mapped; nobody writes to it now.
    let seen = unsafe { std::slice::from_raw_parts(window.start(), 12) };
    assert_eq!(seen, b"of the guest");
    guest.frontend.get_vring_base(0).unwrap();
    assert!(window.is_revoked());
    guest.start_ring(0);
    let window = lend(&host).unwrap();
    guest.frontend.set_mem_table(&[guest.region()]).unwrap();
    assert!(window.is_revoked(), "the table has other regions now");
    let window = lend(&host).unwrap();
    guest.frontend.reset_device().unwrap();
    assert!(window.is_revoked());
    let window = lend(&host).unwrap();
    drop((guest.raw, guest.frontend));
    wait_for("the front end's end", || window.is_revoked());
    wait_for("no memory", || lend(&host).is_err_and(|error| error == WindowError::NotReady));
}
