//! The thread that serves applications in virtual machines, for the interconnect: it takes the control frames of all guests from their
//! interfaces' sidebands, maps the pages that they lend, passes bells between applications and the engine's thread, and answers what the
//! engine asks about their peers.
//!
//! Guests take turns: each has a bounded number of frames in a round. An interface that is removed, or whose network does not allow the engine any
//! more, loses its attachments within a second.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use vnet::interface::sideband::{self, Message, PORT_BYTES, Port, Sideband};
use vnet::interface::virtqueue::window::{self, Loans, PageRun, Window, WindowError};
use vnet::wire::ethernet::Mac;
use vnet::wire::offload::{F_DATA_VALID, F_NEEDS_CSUM, GSO_NONE, GSO_UDP_L4, Offload};
use vnet_control::desired::{Desired, InterfaceSpec};
use vnet_rdma::Span;
use vnet_rdma::daemon::{ContainerId, Datagrams, GuestFrame, Lent, ShareSettings};
use vnet_rdma::meeting::{Decline, KeyRequest, Keys, Place, Reach};
use vnet_rdma::vm::{self, GuestHost, Nic, PerSecond, Run, Stations, Token};

use crate::rdma_engine::{RdmaEngine, guest_id, share_of};
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
    sources: Option<Sources>,
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
                let wanted = |(name, sideband): (String, Arc<Sideband>)| {
                    let share = allowed(engine.current(), &name);
                    let sources = interface(engine.current(), &name).map(Sources::of);
                    Wanted { name, share, sources, sideband }
                };
                Some(engine.sidebands().into_iter().map(wanted).collect())
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

/// What the configuration says of a guest.
struct Wanted {
    name: String,
    share: Result<ShareSettings, Decline>,
    sources: Option<Sources>,
    sideband: Arc<Sideband>,
}

/// Makes the guests those of the configuration.
fn follow(guests: &mut Vec<Guest>, wanted: Vec<Wanted>, rdma: &RdmaEngine, answers: &Arc<Mutex<Answers>>) {
    guests.retain(|guest| wanted.iter().any(|known| Arc::ptr_eq(&known.sideband, &guest.sideband)));
    for Wanted { name, share, sources, sideband } in wanted {
        match guests.iter_mut().find(|guest| Arc::ptr_eq(&guest.sideband, &sideband)) {
            Some(guest) => {
                guest.share = share;
                if guest.sources != sources {
                    guest.sources = sources;
                    guest.host.close_all();
                }
            }
            None => {
                let nic = Arc::new(GuestNic {
                    sideband: Arc::clone(&sideband),
                    name: name.clone(),
                    answers: Arc::clone(answers),
                    looked_up: Mutex::default(),
                });
                match rdma.guest_host(nic, &name, sideband.origin().port.0) {
                    Some(Ok(host)) => guests.push(Guest { sideband, host, share, sources, next: None }),
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
    let interface = interface(desired, name).ok_or(Decline::NotAllowed)?;
    let mut networks = desired.networks.iter().map(|item| &item.spec);
    if !networks.any(|network| network.id == interface.network && network.daemon_engine) {
        return Err(Decline::NotAllowed);
    }
    Ok(share_of(interface))
}

/// The guests' places and shares, by name and port of their interfaces. With a rate limit the interface lends its network to nobody, as with
/// containers.
pub fn in_room(
    desired: &Desired,
    guests: impl IntoIterator<Item = (String, u16)>,
) -> Vec<(Place, (ContainerId, ShareSettings))> {
    let of = |(name, port): (String, u16)| {
        let interface = interface(desired, &name)?;
        let network = (!interface.driving.share.is_limited()).then_some(interface.network.get());
        let id = guest_id(port);
        Some((Place { id, networks: network.into_iter().collect() }, (id, share_of(interface))))
    };
    guests.into_iter().filter_map(of).collect()
}

fn interface<'a>(desired: &'a Desired, name: &str) -> Option<&'a InterfaceSpec> {
    desired.interfaces.iter().map(|item| &item.spec).find(|spec| spec.name == name)
}

/// What port security compares frames with. It cannot see packets that bypass the network, so a change ends the attachments.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sources {
    mac: Option<Mac>,
    addresses: Vec<IpAddr>,
    port_security: bool,
    address_security: bool,
}

impl Sources {
    fn of(interface: &InterfaceSpec) -> Sources {
        Sources {
            mac: interface.mac,
            addresses: interface.addresses.clone(),
            port_security: interface.port_security,
            address_security: interface.address_security,
        }
    }
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
        let lent = lend(self.sideband.loans()?, runs);
        lent.inspect_err(|error| {
            tracing::debug!(interface = self.name, "pages of the guest are not used: {error}");
        })
        .ok()
    }

    fn open(&self, address: SocketAddr) -> io::Result<Box<dyn Datagrams>> {
        let port = self.sideband.open(address)?.ok_or(io::ErrorKind::AddrInUse)?;
        Ok(Box::new(GuestDatagrams { sideband: Arc::clone(&self.sideband), port }))
    }

    fn inject(&self, frame: GuestFrame) -> bool {
        self.sideband.inject(to_message(frame))
    }

    fn mtu(&self) -> usize {
        self.sideband.mtu()
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

/// Lends pages of a guest.
pub fn lend(loans: &Loans, runs: &[Run]) -> Result<Arc<dyn Lent>, WindowError> {
    let page_run = |run: &Run| PageRun { addr: run.addr, len: u64::from(run.pages) * window::PAGE };
    let runs: Vec<PageRun> = runs.iter().map(page_run).collect();
    Ok(Arc::new(LentWindow(loans.lend(&runs)?)))
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

    fn reaches(&self, address: SocketAddr) -> bool {
        self.sideband.has_port(address)
    }
}

impl Drop for GuestDatagrams {
    fn drop(&mut self) {
        self.port.close();
    }
}

fn to_message(frame: GuestFrame) -> Message {
    let GuestFrame { bytes, partial_from, is_verified, segment, is_local } = frame;
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
    Message { bytes, offload, is_local }
}

fn from_message(message: Message) -> GuestFrame {
    let Message { bytes, offload, is_local } = message;
    let partial_from = if offload.flags & F_NEEDS_CSUM != 0 { offload.csum_start } else { 0 };
    let is_verified = offload.flags & F_DATA_VALID != 0;
    let segment = if offload.gso_kind() == GSO_UDP_L4 { offload.gso_size } else { 0 };
    GuestFrame { bytes, partial_from, is_verified, segment, is_local }
}

#[cfg(test)]
mod tests {
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
            let frame =
                GuestFrame { bytes: vec![1; 3000], partial_from, is_verified, segment, is_local: false };
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

    #[test]
    fn guests_without_rate_limits_meet() {
        let interface = |name: &str, limit: &str| {
            format!("[[interface]]\nname = '{name}'\nkind = 'vhost-user'\nsocket = '/run/{name}'\n{limit}\n")
        };
        let (open, limited) = (interface("vm1", ""), interface("vm2", "frame_limit = 1000"));
        let text =
            format!("[host]\nname = 'h'\n[[network]]\nid = 7\n{open}network = 7\n{limited}network = 7\n");
        let desired = config::parse("test", &text).unwrap().desired;
        let ports = [("vm1".to_owned(), 4), ("vm2".to_owned(), 5), ("gone".to_owned(), 6)];
        let place = |port, networks: &[u32]| Place { id: guest_id(port), networks: networks.to_vec() };
        let found: Vec<_> = in_room(&desired, ports).into_iter().map(|(place, _)| place).collect();
        assert_eq!(found, [place(4, &[7]), place(5, &[])]);
    }
}
