//! The thread that serves applications in virtual machines, for the interconnect: it takes the control frames of all guests from their
//! interfaces' sidebands, maps the pages that they lend, passes bells between applications and the engine's thread, and answers what the
//! engine asks about their peers.
//!
//! Guests take turns: each has a bounded number of frames in a round. An interface that is removed, or whose network does not allow the engine any
//! more, loses its attachments within a second.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vnet::interface::sideband::{self, Message, PORT_BYTES, Port, Sideband};
use vnet::interface::virtqueue::window::{self, PageRun, Window};
use vnet::wire::offload::{F_DATA_VALID, F_NEEDS_CSUM, GSO_NONE, GSO_UDP_L4, Offload};
use vnet_control::desired::Desired;
use vnet_rdma::Span;
use vnet_rdma::daemon::{Datagrams, GuestFrame, Lent, ShareSettings};
use vnet_rdma::meeting::{Decline, KeyRequest, Keys, Reach};
use vnet_rdma::vm::{self, GuestHost, Nic, PerSecond, Run, Stations, Token};

use crate::rdma_engine::{RdmaEngine, share_of};
use crate::sealing::KeyKeeper;
use crate::shared::Shared;

// Both crates name them, because neither knows the other.
const _: () = assert!(vm::ETHERTYPE == sideband::ETHERTYPE && vm::FRAME_MAX == sideband::CONTROL_MAX);
const _: () = assert!(vm::PAGE == window::PAGE && vm::RUNS_MAX == window::RUNS_MAX);

/// Interval at which the configuration is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Control frames of one guest in a round.
const FRAMES: usize = 64;
/// Maximum number of questions about peers that are looked into in a second, of all guests (as of all containers) and of one. Beyond, engines are
/// told to ask again.
const LOOKUPS_PER_S: u32 = 1000;
const LOOKUPS_OF_GUEST_PER_S: u32 = 200;
/// Offset of the checksum from the UDP header's start.
const UDP_CHECKSUM: u16 = 6;

/// A running thread.
pub struct Running {
    stop: Arc<(AtomicBool, OwnedFd)>,
    thread: JoinHandle<()>,
}

impl Running {
    /// Ends the thread. Applications in virtual machines find their attachments ended.
    pub fn stop(self) {
        self.stop.0.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.stop.1, &1u64.to_ne_bytes());
        if self.thread.join().is_err() {
            tracing::error!("the thread of applications in virtual machines ended in a panic");
        }
    }
}

/// Starts the thread.
pub fn start(shared: &Shared, engine: &RdmaEngine) -> io::Result<Running> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let stop = Arc::new((AtomicBool::new(false), wake));
    let (shared, engine, ended) = (shared.clone(), engine.clone(), Arc::clone(&stop));
    let run = move || run(&shared, &engine, &ended);
    let thread = std::thread::Builder::new().name("rdma-guests".into()).spawn(run)?;
    Ok(Running { stop, thread })
}

/// A virtual machine that may have applications.
struct Guest {
    sideband: Arc<Sideband>,
    host: GuestHost,
    share: Result<ShareSettings, Decline>,
    /// When it is its turn again at the latest.
    next: Option<Instant>,
}

fn run(shared: &Shared, rdma: &RdmaEngine, stop: &(AtomicBool, OwnedFd)) {
    let (mut guests, mut look_at): (Vec<Guest>, _) = (vec![], Instant::now());
    let keeper = KeyKeeper::of_guests(shared);
    let answers = Arc::new(Mutex::new(Answers { keeper, looked_up: PerSecond::default() }));
    while !stop.0.load(Ordering::Relaxed) {
        let now = Instant::now();
        if now >= look_at {
            look_at = now + LOOK_EVERY;
            // Others hold the lock while they open interfaces: bells do not wait for that.
            let wanted = shared.try_lock().and_then(|engine| {
                let engine = engine.as_ref()?;
                let allowed = |name: &str| allowed(engine.current(), name);
                Some(
                    engine.sidebands().into_iter().map(|(name, side)| (allowed(&name), name, side)).collect(),
                )
            });
            if let Some(wanted) = wanted {
                follow(&mut guests, wanted, rdma, &answers);
            }
        }
        for guest in &mut guests {
            guest.turn(now);
        }
        let next = guests.iter().filter_map(|guest| guest.next).fold(look_at, Instant::min);
        wait(&guests, &stop.1, next);
    }
}

/// Makes the guests those of the configuration.
fn follow(
    guests: &mut Vec<Guest>,
    wanted: Vec<(Result<ShareSettings, Decline>, String, Arc<Sideband>)>,
    rdma: &RdmaEngine,
    answers: &Arc<Mutex<Answers>>,
) {
    guests.retain(|guest| wanted.iter().any(|(_, _, sideband)| Arc::ptr_eq(sideband, &guest.sideband)));
    for (share, name, sideband) in wanted {
        match guests.iter_mut().find(|guest| Arc::ptr_eq(&guest.sideband, &sideband)) {
            Some(guest) => guest.share = share,
            None => {
                let nic = Arc::new(GuestNic {
                    sideband: Arc::clone(&sideband),
                    name: name.clone(),
                    answers: Arc::clone(answers),
                    looked_up: Mutex::default(),
                });
                match rdma.guest_host(nic, &name, sideband.origin().port.0) {
                    Some(Ok(host)) => guests.push(Guest { sideband, host, share, next: None }),
                    Some(Err(error)) => {
                        tracing::error!(%error, interface = name, "cannot serve applications in the guest");
                    }
                    None => {}
                }
            }
        }
    }
}

/// What applications of an interface's guest get, or why they are not served.
fn allowed(desired: &Desired, name: &str) -> Result<ShareSettings, Decline> {
    let interface = desired.interfaces.iter().map(|item| &item.spec).find(|spec| spec.name == name);
    let interface = interface.ok_or(Decline::NotAllowed)?;
    let mut networks = desired.networks.iter().map(|item| &item.spec);
    if !networks.any(|network| network.id == interface.network && network.daemon_engine) {
        return Err(Decline::NotAllowed);
    }
    Ok(share_of(interface))
}

/// Waits for control frames, bells, the end, or the time.
fn wait(guests: &[Guest], wake: &OwnedFd, until: Instant) {
    let mut polled = vec![PollFd::new(wake, PollFlags::IN)];
    for guest in guests {
        polled.push(PollFd::from_borrowed_fd(guest.sideband.as_fd(), PollFlags::IN));
        polled.extend(guest.host.descriptors().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    }
    let left = until.saturating_duration_since(Instant::now());
    let time = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
    let _ = poll(&mut polled, Some(&time));
}

impl Guest {
    fn turn(&mut self, now: Instant) {
        for _ in 0..FRAMES {
            let Some(message) = self.sideband.take() else { break };
            self.host.hear(now, &message.bytes, self.share);
        }
        if self.share.is_err() || self.sideband.is_stopped() {
            self.host.close_all();
        }
        self.next = self.host.turn(now);
    }
}

/// A guest's interface.
struct GuestNic {
    sideband: Arc<Sideband>,
    name: String,
    /// Only the thread of guests uses these.
    answers: Arc<Mutex<Answers>>,
    looked_up: Mutex<PerSecond>,
}

/// What answers the questions of all guests' engines.
struct Answers {
    keeper: KeyKeeper,
    looked_up: PerSecond,
}

impl Answers {
    /// The keeper, unless too much was asked in this second: by all, or by the guest whose questions are counted in `own`.
    fn keeper(&mut self, now: Instant, own: &mut PerSecond) -> Option<&mut KeyKeeper> {
        let may = self.looked_up.full_until(now, LOOKUPS_PER_S).is_none()
            && own.takes(now, LOOKUPS_OF_GUEST_PER_S)
            && self.looked_up.takes(now, LOOKUPS_PER_S);
        may.then_some(&mut self.keeper)
    }
}

impl Nic for GuestNic {
    fn tell(&self, frame: &[u8]) {
        if let Err(error) = self.sideband.tell(frame) {
            tracing::error!(%error, interface = self.name, "a control frame is malformed; report this");
        }
    }

    fn lend(&self, runs: &[Run]) -> Option<Arc<dyn Lent>> {
        let page_run = |run: &Run| PageRun { addr: run.addr, len: u64::from(run.pages) * window::PAGE };
        let runs: Vec<PageRun> = runs.iter().map(page_run).collect();
        match self.sideband.loans()?.lend(&runs) {
            Ok(window) => Some(Arc::new(LentWindow(window))),
            Err(error) => {
                tracing::debug!(interface = self.name, "pages of the guest are not used: {error}");
                None
            }
        }
    }

    fn open(&self, address: SocketAddr) -> io::Result<Box<dyn Datagrams>> {
        let port = self.sideband.open(address)?.ok_or(io::ErrorKind::AddrInUse)?;
        Ok(Box::new(GuestDatagrams { sideband: Arc::clone(&self.sideband), port }))
    }

    fn reach(&self, stations: &Stations) -> Reach {
        let mut answers = self.answers.lock();
        let keeper = answers.keeper(Instant::now(), &mut self.looked_up.lock());
        keeper.map_or(Reach::NotYet, |keeper| keeper.reach_from(&self.name, stations))
    }

    fn keys(&self, name: Token, stations: &Stations, request: &KeyRequest) -> Result<Keys, Reach> {
        let mut answers = self.answers.lock();
        let keeper = answers.keeper(Instant::now(), &mut self.looked_up.lock());
        keeper.ok_or(Reach::NotYet)?.keys_from(name, (&self.name, stations), request)
    }

    fn gone(&self, name: Token) {
        self.answers.lock().keeper.end(name);
    }
}

struct LentWindow(Window);

impl Lent for LentWindow {
    fn span(&self) -> Span {
        // SAFETY: the window's bytes are mapped, readable and writable as long as this value, which the engine keeps while it uses the span. The
        // guest may change them at any time, as for all who use them.
        unsafe { Span::new(self.0.start(), self.0.len()) }
    }

    fn pieces(&self) -> usize {
        self.0.pieces()
    }

    fn is_revoked(&self) -> bool {
        self.0.is_revoked()
    }
}

/// Datagrams of one address of a guest.
struct GuestDatagrams {
    sideband: Arc<Sideband>,
    port: Arc<Port>,
}

impl Datagrams for GuestDatagrams {
    fn send(&mut self, frame: GuestFrame) -> bool {
        self.sideband.send(to_message(frame))
    }

    fn receive(&mut self) -> Option<GuestFrame> {
        self.port.take().map(from_message)
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.port.as_fd()
    }

    fn room(&self) -> usize {
        PORT_BYTES
    }

    fn mtu(&self) -> usize {
        self.sideband.mtu()
    }
}

impl Drop for GuestDatagrams {
    fn drop(&mut self) {
        self.port.close();
    }
}

fn to_message(frame: GuestFrame) -> Message {
    let GuestFrame { bytes, partial_from, is_verified, segment } = frame;
    let is_partial = partial_from > 0;
    let flags = if is_partial { F_NEEDS_CSUM } else { 0 } | if is_verified { F_DATA_VALID } else { 0 };
    let offload = Offload {
        flags,
        gso_type: if segment > 0 { GSO_UDP_L4 } else { GSO_NONE },
        hdr_len: if segment > 0 { partial_from + 8 } else { 0 },
        gso_size: segment,
        csum_start: partial_from,
        csum_offset: if is_partial { UDP_CHECKSUM } else { 0 },
    };
    Message { bytes, offload }
}

fn from_message(message: Message) -> GuestFrame {
    let Message { bytes, offload } = message;
    let partial_from = if offload.flags & F_NEEDS_CSUM != 0 { offload.csum_start } else { 0 };
    let is_verified = offload.flags & F_DATA_VALID != 0;
    let segment = if offload.gso_kind() == GSO_UDP_L4 { offload.gso_size } else { 0 };
    GuestFrame { bytes, partial_from, is_verified, segment }
}

#[cfg(test)]
mod tests {
    use vnet::wire::ethernet::Mac;
    use vnet_control::config;

    use super::*;

    #[test]
    fn one_guest_leaves_questions_to_others() {
        let keeper = KeyKeeper::of_guests(&Shared::default());
        let mut answers = Answers { keeper, looked_up: PerSecond::default() };
        let mut guests = [PerSecond::default(); 6];
        let mut asked = |guest: usize, now| {
            (0..LOOKUPS_PER_S).filter(|_| answers.keeper(now, &mut guests[guest]).is_some()).count() as u32
        };
        let now = Instant::now();
        assert_eq!(asked(0, now), LOOKUPS_OF_GUEST_PER_S);
        let others: u32 = (1..6).map(|guest| asked(guest, now)).sum();
        assert_eq!(others, LOOKUPS_PER_S - LOOKUPS_OF_GUEST_PER_S);
        assert_eq!(asked(0, now + Duration::from_secs(1)), LOOKUPS_OF_GUEST_PER_S);
    }

    #[test]
    fn both_crates_mean_the_same_addresses() {
        assert_eq!((Mac(vm::GROUP), Mac(vm::OWN)), (sideband::GROUP, sideband::OWN));
    }

    #[test]
    fn work_for_the_network_card_survives_the_way() {
        for (partial_from, is_verified, segment) in
            [(34, false, 1400), (34, false, 0), (0, true, 0), (0, false, 0)]
        {
            let frame = GuestFrame { bytes: vec![1; 3000], partial_from, is_verified, segment };
            let message = to_message(frame.clone());
            assert_eq!(message.offload.checked(3000), Ok(message.offload));
            assert_eq!(from_message(message), frame);
        }
    }

    #[test]
    fn guests_are_served_where_their_network_allows_it() {
        let text = |allows: bool| {
            format!(
                "[host]\nname = 'h'\n[[network]]\nid = 1\ndaemon_engine = {allows}\n[[interface]]\nname = 'vm1'\nkind = \
                 'vhost-user'\nsocket = '/run/x'\nweight = 30\n"
            )
        };
        let desired = |allows| config::parse("test", &text(allows)).unwrap().desired;
        let open = desired(true);
        assert_eq!(allowed(&open, "vm1"), Ok(ShareSettings { weight: 30, rate: 0 }));
        assert_eq!(allowed(&open, "vm2"), Err(Decline::NotAllowed));
        assert_eq!(allowed(&desired(false), "vm1"), Err(Decline::NotAllowed));
    }
}
