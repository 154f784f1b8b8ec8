//! The receiving half of the bridge: datagrams become frames.
//!
//! One burst is what one `recvmmsg` brings: up to [`MESSAGES`] messages, each one datagram or several of one size that the
//! kernel kept together (`UDP_GRO`). They are worked on in order and in place. A datagram that holds whole frames adds them to
//! the batch; a fragment goes through the link's [`Reassembly`]. What came by a sealed link is opened in place before any of
//! it is looked at, so that nobody but the peer reaches reassembly or anything else behind it.
//! The batch is run when it is full and when the burst ends.
//! Frames point into the burst's buffers, which stay as they are until then.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use crate::frame::{Batch, NetworkId, Segment};
use crate::link::direct::Landing;
use crate::link::inquiry::is_inquiry;
use crate::link::native::reassembly::{Reassembly, Whole};
use crate::link::path::probing as prober;
use crate::link::path::route::RouteProbe;
use crate::link::sealed::aead::TAG_LEN;
use crate::link::sealed::identity::Claims;
use crate::link::sealed::session::Seal;
use crate::link::socket::name::Name;
use crate::link::socket::udp::Socket;
use crate::link::vxlan::groups::Groups;
use crate::link::{Encapsulation, HOPS_UNKNOWN, Link, Peers, ReassemblyBudget};
use crate::stats::{DiscardReason, DropReason, PortStats};
use crate::wire::ethernet::Mac;
use crate::wire::native::{Bundle, Header, HeaderError, Kind, metadata};
use crate::wire::offload::{Offload, WIRE_LEN};
use crate::wire::vxlan::{self, VxlanError};
use crate::wire::{ethernet, partial};

/// Messages in a burst.
pub(in crate::link) const MESSAGES: usize = 32;
/// Bytes of the buffer behind each: any UDP payload.
pub(in crate::link) const BUFFER_LEN: usize = 65_536;
/// Probes answered in a burst, one a message; more are ignored.
const REPLIES_MAX: usize = MESSAGES;

/// Whose a datagram is: the link, and the number of its VTEP (0 where it has none).
type Whose<'a> = (&'a Arc<Link>, u16);

/// What one call of [`Receiver::receive`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Datagrams taken; 0 when none were waiting.
    pub datagrams: usize,
    /// No more were waiting: the next to come will wake the dispatcher. Otherwise there may be more.
    pub emptied: bool,
}

/// Receives frames by links. One per dispatcher; shares its sockets with a [`super::Sender`].
pub struct Receiver {
    sockets: Vec<Arc<Socket>>,
    /// Counts what no link is known for.
    stats: Arc<PortStats>,
    budget: Arc<ReassemblyBudget>,
    burst: Burst,
    /// By link id; made when a link's first fragment comes.
    reassemblies: HashMap<u64, Reassembly>,
    /// Links with fragments in the burst.
    unsettled: Vec<u64>,
    /// Complete frames in the batch with memory of their own.
    held: Vec<Whole>,
    /// For the socket of VXLAN links, which know their peers by address alone.
    vxlan: bool,
    /// Messages taken at a time.
    at_once: usize,
    /// Multicast groups, where this receiver is the one that joins them.
    groups: Option<(Groups, RouteProbe)>,
    /// For each datagram that came by a sealed link in this burst, in order: whether it could be opened.
    opened: Vec<bool>,
    /// For direct ports.
    pub(in crate::link) landing: Landing,
}

impl Receiver {
    pub(in crate::link) fn new(
        sockets: Vec<Arc<Socket>>,
        stats: Arc<PortStats>,
        budget: Arc<ReassemblyBudget>,
    ) -> Receiver {
        Receiver {
            sockets,
            stats,
            budget,
            burst: Burst::new(),
            reassemblies: HashMap::new(),
            unsettled: Vec::new(),
            held: Vec::new(),
            vxlan: false,
            at_once: MESSAGES,
            groups: None,
            opened: Vec::new(),
            landing: Landing::new(),
        }
    }

    /// Has it take at most `burst` messages at a time.
    pub fn taking(mut self, burst: usize) -> Receiver {
        self.at_once = burst.clamp(1, MESSAGES);
        self
    }

    /// Makes it the receiver of VXLAN links; `groups` says whether it is the one that joins multicast groups.
    pub(in crate::link) fn for_vxlan(mut self, groups: bool) -> Receiver {
        self.vxlan = true;
        self.groups = groups.then(|| (Groups::default(), RouteProbe::new(self.local_addr())));
        self
    }

    /// Follows a change of the links.
    pub fn adopt(&mut self, peers: &Peers) {
        if let Some((groups, routes)) = &mut self.groups {
            let links = peers.links().iter();
            let wanted = links.filter_map(|link| Some((link.vteps()?.group()?, link.options().remote)));
            groups.follow(&self.sockets[0], wanted, routes);
        }
    }

    /// The address listened on, with the first port, which the kernel may have chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.sockets[0].local()
    }

    /// The sockets, to wait for; at least one.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(|socket| socket.as_fd())
    }

    /// Takes one burst of datagrams from the `socket`th of [`Receiver::fds`], makes frames of them, and has `run` take them to
    /// completion, several times when there are more than a batch holds. `batch` is empty on entry and on return.
    ///
    /// `now_ms` is any clock that does not run backwards. A frame's `hops` count the relays it has passed and this host,
    /// should it relay it; [`HOPS_UNKNOWN`] when the link does not say.
    pub fn receive(
        &mut self,
        socket: usize,
        peers: &Peers,
        batch: &mut Batch,
        now_ms: u64,
        run: &mut dyn FnMut(&Batch),
    ) -> Received {
        let socket = self.sockets[socket].clone();
        self.receive_from(&socket, peers, batch, now_ms, run)
    }

    /// The same for any socket.
    pub(in crate::link) fn receive_from(
        &mut self,
        socket: &Socket,
        peers: &Peers,
        batch: &mut Batch,
        now_ms: u64,
        run: &mut dyn FnMut(&Batch),
    ) -> Received {
        let messages = self.burst.receive(socket, self.at_once);
        // The kernel looks until the burst is full or nothing is left.
        let emptied = messages < self.at_once;
        let datagrams =
            if messages == 0 { 0 } else { self.work(socket, messages, peers, batch, now_ms, run) };
        Received { datagrams, emptied }
    }

    /// Makes frames of the burst's first `messages` messages, which came by `socket`. Returns how many datagrams they were.
    pub(in crate::link) fn work(
        &mut self,
        socket: &Socket,
        messages: usize,
        peers: &Peers,
        batch: &mut Batch,
        now_ms: u64,
        run: &mut dyn FnMut(&Batch),
    ) -> usize {
        let vxlan = self.vxlan;
        let find = |source| if vxlan { peers.vtep(source) } else { peers.link(source).map(|link| (link, 0)) };
        let mut links: [Option<Whose<'_>>; MESSAGES] = [None; MESSAGES];
        let mut latest: Option<(Name, Option<Whose<'_>>)> = None;
        self.opened.clear();
        for (index, found) in links.iter_mut().enumerate().take(messages) {
            let message = self.burst.message(index);
            let whose = match &latest {
                Some((name, whose)) if name.same(&message.source) => *whose,
                _ => message.source.address().and_then(find),
            };
            latest = Some((message.source, whose));
            // A peer may have moved. What else comes from there waits until it has proved that.
            let whose = whose.or_else(|| {
                let moved = !vxlan && message.datagrams() == 1 && !message.truncated;
                let link = moved.then(|| peers.tagged(self.burst.bytes(&message)))??;
                Some((link, 0))
            });
            *found = whose;
            if peers.any_sealed
                && let Some((link, _)) = whose
                && let Some(seal) = link.seal()
            {
                self.burst.open(&message, link, seal, &mut self.opened);
            }
        }
        let mut intake = Intake {
            burst: &self.burst.memory,
            opened: self.opened.iter(),
            claims: None,
            socket,
            reassemblies: &mut self.reassemblies,
            unsettled: &mut self.unsettled,
            held: &mut self.held,
            budget: &self.budget,
            batch,
            run,
            now_ms,
            frames: 0,
            bytes: 0,
            replies: 0,
        };
        let mut datagrams = 0;
        for (index, whose) in links.into_iter().enumerate().take(messages) {
            let message = self.burst.message(index);
            datagrams += message.datagrams();
            match whose {
                Some((link, vtep)) => intake.message(link, vtep, &message),
                None => self.stats.discard(DiscardReason::UnknownSource, message.datagrams() as u64),
            }
        }
        intake.run();
        while let Some(id) = self.unsettled.pop() {
            if let Some(reassembly) = self.reassemblies.get_mut(&id) {
                reassembly.settle(&self.burst.memory);
            }
        }
        datagrams
    }

    /// The buffer of a message of the burst.
    pub(in crate::link) fn buffer(&mut self, message: usize) -> &mut [u8] {
        &mut self.burst.memory[message * BUFFER_LEN..][..BUFFER_LEN]
    }

    /// Says what a message of the burst is.
    pub(in crate::link) fn set_message(&mut self, message: usize, source: Name, len: usize, segment: usize) {
        self.burst.set(message, source, len, segment);
    }

    /// Ends incomplete frames whose time is up, and those of links that are gone. Call it some ten times a second.
    pub fn tick(&mut self, peers: &Peers, now_ms: u64) {
        self.reassemblies.retain(|id, reassembly| {
            let stays = peers.contains(*id);
            if stays {
                reassembly.tick(now_ms);
            } else {
                reassembly.flush();
            }
            stays
        });
    }
}

/// What one burst is worked on with.
struct Intake<'a> {
    burst: &'a [u8],
    opened: std::slice::Iter<'a, bool>,
    /// For what the host that sent the message may speak, where its certificate has limits.
    claims: Option<Arc<Claims>>,
    socket: &'a Socket,
    reassemblies: &'a mut HashMap<u64, Reassembly>,
    unsettled: &'a mut Vec<u64>,
    held: &'a mut Vec<Whole>,
    budget: &'a Arc<ReassemblyBudget>,
    batch: &'a mut Batch,
    run: &'a mut dyn FnMut(&Batch),
    now_ms: u64,
    /// Frames added to the batch and not counted yet, all by one link.
    frames: u64,
    bytes: u64,
    replies: usize,
}

impl Intake<'_> {
    /// Works on the datagrams of one message, which came from the link's VTEP `vtep` if it has any.
    fn message(&mut self, link: &Arc<Link>, vtep: u16, message: &Message) {
        link.stats.in_datagrams.add(message.datagrams() as u64);
        if message.truncated {
            return link.stats.discard(DiscardReason::Truncated, 1);
        }
        if let Some(seal) = link.seal() {
            self.claims = seal.keyring().claims().cloned();
            self.sealed(link, message);
            self.claims = None;
            return self.count(link);
        }
        link.heard(self.now_ms);
        let mut at = message.start;
        let end = message.start + message.len;
        loop {
            let datagram = &self.burst[at..end.min(at + message.segment)];
            match link.options().kind.encapsulation() {
                Encapsulation::Native => self.native(link, at, datagram, &message.source),
                Encapsulation::Vxlan => self.vxlan(link, vtep, datagram),
                // A stream has no datagrams, and no entry among the peers.
                Encapsulation::Vnet | Encapsulation::Stream => {
                    self.frame(link, link.default_network(), Offload::default(), HOPS_UNKNOWN, datagram);
                }
            }
            at += message.segment;
            if at >= end {
                break;
            }
        }
        self.count(link);
    }

    /// Works on those datagrams of a message that could be opened. The others are counted.
    fn sealed(&mut self, link: &Arc<Link>, message: &Message) {
        for (at, datagram) in message.split(self.burst) {
            if self.opened.next() == Some(&true) {
                link.heard(self.now_ms);
                self.native(link, at, &datagram[..datagram.len() - TAG_LEN], &message.source);
            }
        }
    }

    /// True when the other host may speak for `network`.
    #[inline]
    fn allows_network(&self, link: &Link, network: NetworkId) -> bool {
        link.carries(network) && self.claims.as_ref().is_none_or(|claims| claims.allows_network(network))
    }

    /// True when the other host may send the frame that `pieces` are, or that has no source at all.
    #[inline]
    fn allows_source<'b>(&self, link: &Link, pieces: impl Iterator<Item = &'b [u8]>) -> bool {
        if link.macs.is_none() && self.claims.is_none() {
            return true;
        }
        let mut addresses = pieces.flatten().copied().skip(6).take(6);
        let mac = Mac(std::array::from_fn(|_| addresses.next().unwrap_or(0)));
        link.allows_source(mac) && self.claims.as_ref().is_none_or(|claims| claims.allows_source(mac))
    }

    /// Counts the frames added.
    fn count(&mut self, link: &Link) {
        link.stats.in_frames.add(std::mem::take(&mut self.frames));
        link.stats.in_bytes.add(std::mem::take(&mut self.bytes));
    }

    /// Works on one native datagram, which begins at `at` in the burst.
    fn native(&mut self, link: &Arc<Link>, at: usize, datagram: &[u8], source: &Name) {
        let (header, payload) = match Header::parse(datagram) {
            Ok(parsed) => parsed,
            Err(error) => return link.stats.discard(discard_reason(error), 1),
        };
        if header.sealed != link.seal().is_some() {
            return link.stats.discard(DiscardReason::SealRequired, 1);
        }
        match header.kind {
            Kind::Frame if header.is_whole() => match metadata(payload, header.offload) {
                Some((offload, frame)) => self.frame_of(link, &header, offload, frame),
                None => link.stats.discard(DiscardReason::BadHeader, 1),
            },
            Kind::Frame => {
                let start = at + datagram.len() - payload.len();
                self.fragment(link, &header, start..start + payload.len());
            }
            Kind::Bundle => match Bundle::checked(payload, header.offload) {
                Some(bundle) => {
                    for (offload, frame) in bundle {
                        self.frame_of(link, &header, offload, frame);
                    }
                }
                None => link.stats.discard(DiscardReason::BadHeader, 1),
            },
            Kind::Probe | Kind::ProbeReply
                if is_inquiry(payload)
                    && link.native().is_some_and(|native| {
                        let is_answer = header.kind == Kind::ProbeReply;
                        native.inquiries.put(link.port, is_answer, payload, self.now_ms)
                    }) => {}
            Kind::Probe => self.reply(link, &header, payload, source),
            Kind::Keepalive => {
                if let Some(seal) = link.seal() {
                    seal.hear(payload, seal.keyring().is_live(header.epoch));
                    link.heard_at(&header, source, payload);
                }
            }
            // Beyond what the prober makes of it, that it came is all there is to it.
            Kind::ProbeReply => _ = link.path.answered(payload),
        }
    }

    /// Works on one VXLAN datagram.
    fn vxlan(&mut self, link: &Arc<Link>, vtep: u16, datagram: &[u8]) {
        let (vni, frame) = match vxlan::parse(datagram) {
            Ok(parsed) => parsed,
            Err(VxlanError::Short) => return link.stats.discard(DiscardReason::Truncated, 1),
            Err(VxlanError::NoNetwork) => return link.stats.discard(DiscardReason::BadHeader, 1),
        };
        let Some(network) = NetworkId::new(vni).filter(|network| link.carries(*network)) else {
            return link.stats.refuse(DropReason::WrongNetwork, frame.len() as u64);
        };
        if let (Some(vteps), Some((_, src))) = (link.vteps(), ethernet::addresses(frame)) {
            vteps.heard(src, vtep);
        }
        let offload = partial::inferred(frame, link.udp_payload() - vxlan::HEADER_LEN);
        self.frame(link, network, offload, HOPS_UNKNOWN, frame);
    }

    /// Adds a frame in one piece that came under a native header.
    #[inline]
    fn frame_of(&mut self, link: &Link, header: &Header, offload: Offload, frame: &[u8]) {
        let network = NetworkId::new(header.network).filter(|network| self.allows_network(link, *network));
        let Some(network) = network else {
            return link.stats.refuse(DropReason::WrongNetwork, frame.len() as u64);
        };
        self.frame(link, network, offload, header.hops + 1, frame);
    }

    /// Adds a frame in one piece.
    #[inline]
    fn frame(&mut self, link: &Link, network: NetworkId, offload: Offload, hops: u8, frame: &[u8]) {
        if !self.allows_source(link, std::iter::once(frame)) {
            return link.stats.refuse(DropReason::BadSource, frame.len() as u64);
        }
        if self.batch.is_full() {
            self.run_counted(link);
        }
        let mut builder = self.batch.begin();
        // SAFETY: the frame lies in the burst's memory, which is borrowed for the life of `self` and so neither written to nor
        // freed before `run` has cleared the batch.
        unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
        match builder.finish(link.port, network, offload, hops) {
            Ok(()) => {
                self.frames += 1;
                self.bytes += frame.len() as u64;
            }
            Err(error) => link.stats.refuse(error.into(), frame.len() as u64),
        }
    }

    /// Works on a fragment whose payload lies at `place` in the burst.
    fn fragment(&mut self, link: &Arc<Link>, header: &Header, place: std::ops::Range<usize>) {
        if self.unsettled.last() != Some(&link.id) {
            self.unsettled.push(link.id);
        }
        let Some(native) = link.native() else { return };
        let reassembly = self.reassemblies.entry(link.id).or_insert_with(|| {
            Reassembly::new(link.stats.clone(), native.budget.clone(), self.budget.clone(), self.now_ms)
        });
        if let Some(whole) = reassembly.accept(header, place, self.now_ms) {
            self.whole(link, whole);
        }
    }

    /// Adds a frame of several pieces.
    fn whole(&mut self, link: &Link, whole: Whole) {
        if self.batch.is_full() {
            self.run_counted(link);
        }
        let metadata_len = if whole.offload() { WIRE_LEN } else { 0 };
        let len = whole.bytes() - metadata_len;
        let network = NetworkId::new(whole.network()).filter(|network| self.allows_network(link, *network));
        let pieces = whole.pieces(self.burst).enumerate();
        let allowed = self.allows_source(
            link,
            pieces.map(
                |(index, piece)| if index == 0 { piece.get(metadata_len..).unwrap_or(&[]) } else { piece },
            ),
        );
        let mut offload = Offload::default();
        let mut builder = self.batch.begin();
        for (index, piece) in whole.pieces(self.burst).enumerate() {
            let piece = match metadata(piece, index == 0 && whole.offload()) {
                Some((found, rest)) if index == 0 => {
                    offload = found;
                    rest
                }
                _ => piece,
            };
            // SAFETY: a piece lies in the burst's memory (see `frame`) or in the memory of `whole`, which is held below until
            // the batch is cleared.
            unsafe { builder.push_stable(Segment::new(piece.as_ptr(), piece.len())) };
        }
        let finished = match network {
            Some(_) if !allowed => {
                drop(builder);
                Err(DropReason::BadSource)
            }
            Some(network) => {
                builder.finish(link.port, network, offload, whole.hops() + 1).map_err(DropReason::from)
            }
            None => {
                drop(builder);
                Err(DropReason::WrongNetwork)
            }
        };
        match finished {
            Ok(()) => {
                self.frames += 1;
                self.bytes += len as u64;
            }
            Err(reason) => link.stats.refuse(reason, len as u64),
        }
        if whole.owns_memory() {
            self.held.push(whole);
        } else if let Some(reassembly) = self.reassemblies.get_mut(&link.id) {
            reassembly.recycle(whole);
        }
    }

    /// Answers a probe with a datagram of its size, or with its beginning; never a larger one, and to a known peer only, so that nobody is
    /// reached with more than was spent.
    #[cold]
    fn reply(&mut self, link: &Link, header: &Header, payload: &[u8], to: &Name) {
        if self.replies == REPLIES_MAX {
            return;
        }
        self.replies += 1;
        // Whether that size arrives is asked of one way only.
        let payload = if payload.starts_with(&prober::MAGIC) {
            &payload[..payload.len().min(prober::ANSWER_LEN)]
        } else {
            payload
        };
        let header = Header { kind: Kind::ProbeReply, number: link.take_numbers(1), ..*header };
        let keyring = link.seal().map(Seal::keyring);
        let reply = match &keyring {
            None => [&header.to_bytes(), payload].concat(),
            Some(keyring) => {
                let Some(key) = keyring.sealing(header.number) else { return };
                let header = Header { sealed: true, epoch: key.epoch(), ..header };
                let mut reply = [&header.to_bytes(), payload, &[0; TAG_LEN]].concat();
                key.seal(&mut reply);
                reply
            }
        };
        // A reply that cannot be sent is like one that got lost: the prober asks again.
        link.stats.out_datagrams.add(u64::from(self.socket.send(&reply, to).is_ok()));
    }

    fn run_counted(&mut self, link: &Link) {
        self.count(link);
        self.run();
    }

    /// Has the batch taken to completion, and clears it.
    fn run(&mut self) {
        if !self.batch.is_empty() {
            (self.run)(self.batch);
        }
        self.batch.clear();
        self.held.clear();
    }
}

fn discard_reason(error: HeaderError) -> DiscardReason {
    match error {
        HeaderError::Short => DiscardReason::Truncated,
        HeaderError::Version(_) => DiscardReason::BadVersion,
        HeaderError::Contradiction => DiscardReason::BadHeader,
    }
}

/// One message of a burst.
struct Message {
    source: Name,
    /// Where its bytes are in the burst's memory.
    start: usize,
    len: usize,
    /// Bytes of each of its datagrams but the last; at least 1.
    segment: usize,
    truncated: bool,
}

impl Message {
    fn datagrams(&self) -> usize {
        self.len.div_ceil(self.segment).max(1)
    }

    /// The datagrams of the message, and where each begins in `burst`, the memory of all messages.
    fn split<'a>(&self, burst: &'a [u8]) -> impl Iterator<Item = (usize, &'a [u8])> {
        let end = self.start + self.len;
        // An empty message is one datagram.
        let at = (0..self.datagrams()).map(move |n| self.start + n * self.segment);
        at.map(move |at| (at, &burst[at..end.min(at + self.segment)]))
    }
}

/// Room for a control message of any kind that this socket gets: `UDP_GRO`'s `int`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Control {
    header: libc::cmsghdr,
    segment: libc::c_int,
    padding: libc::c_int,
}

/// Buffers for one `recvmmsg`, and what it said of them.
struct Burst {
    memory: Box<[u8]>,
    sources: Box<[Name]>,
    controls: Box<[Control]>,
    slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
}

// SAFETY: the pointers in `slices` and `headers` point into the boxes beside them and are written anew before each use,
// through `&mut self`.
unsafe impl Send for Burst {}

impl Burst {
    fn new() -> Burst {
        // SAFETY: all three are plain data of integers and pointers, for which all zeros is a value.
        let (control, slice, header) = unsafe {
            (
                std::mem::zeroed::<Control>(),
                std::mem::zeroed::<libc::iovec>(),
                std::mem::zeroed::<libc::mmsghdr>(),
            )
        };
        Burst {
            memory: vec![0; MESSAGES * BUFFER_LEN].into_boxed_slice(),
            sources: vec![Name::unknown(); MESSAGES].into_boxed_slice(),
            controls: vec![control; MESSAGES].into_boxed_slice(),
            slices: vec![slice; MESSAGES].into_boxed_slice(),
            headers: vec![header; MESSAGES].into_boxed_slice(),
        }
    }

    /// Receives what is waiting, at most `limit` messages; returns their number.
    fn receive(&mut self, socket: &Socket, limit: usize) -> usize {
        let buffers = self.memory.chunks_exact_mut(BUFFER_LEN);
        for (index, buffer) in buffers.enumerate() {
            self.slices[index] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_name = self.sources[index].as_mut_ptr().cast();
            header.msg_namelen = Name::unknown().len();
            header.msg_iov = &raw mut self.slices[index];
            header.msg_iovlen = 1;
            header.msg_control = (&raw mut self.controls[index]).cast();
            header.msg_controllen = size_of::<Control>();
            header.msg_flags = 0;
        }
        let mut errors = 0;
        loop {
            let fd = socket.as_fd().as_raw_fd();
            let headers = self.headers.as_mut_ptr();
            // SAFETY: each of the at most MESSAGES headers points to a name, a slice of a buffer, and a control message of `self`,
            // all writable for the lengths told.
            let got = unsafe {
                libc::recvmmsg(
                    fd,
                    headers,
                    limit.min(MESSAGES) as libc::c_uint,
                    libc::MSG_DONTWAIT,
                    std::ptr::null_mut(),
                )
            };
            if got >= 0 {
                return got as usize;
            }
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => {}
                // An error of an earlier datagram is told once, before what is waiting, and means nothing here.
                kind if kind != io::ErrorKind::WouldBlock && errors == 0 => errors += 1,
                _ => return 0,
            }
        }
    }

    /// Opens the datagrams of a message in place, counts those that cannot be opened, and tells of each which it is.
    fn open(&mut self, message: &Message, link: &Link, seal: &Seal, opened: &mut Vec<bool>) {
        if message.truncated {
            return;
        }
        let keyring = seal.keyring();
        let memory = &mut self.memory[message.start..message.start + message.len];
        // `chunks_mut` has none for an empty message, which still is a datagram.
        let mut empty = [];
        let datagrams = memory.chunks_mut(message.segment);
        let datagrams = datagrams.chain((message.len == 0).then_some(&mut empty[..]));
        for datagram in datagrams {
            let result = match Header::parse(datagram) {
                Ok((header, _)) if !header.sealed => Err(DiscardReason::SealRequired),
                Ok((header, _)) => match keyring.opening(header.epoch) {
                    Some(key) => key.open(datagram),
                    None => Err(DiscardReason::WrongEpoch),
                },
                // The host between answers where the link's datagrams come from.
                Err(_) if link.via().is_some_and(|via| via.answered(datagram)) => {
                    opened.push(false);
                    continue;
                }
                Err(error) => Err(discard_reason(error)),
            };
            opened.push(result.is_ok());
            if let Err(reason) = result {
                link.stats.discard(reason, 1);
            }
        }
    }

    fn set(&mut self, index: usize, source: Name, len: usize, segment: usize) {
        self.sources[index] = source;
        let header = &mut self.headers[index];
        header.msg_len = len as u32;
        header.msg_hdr.msg_flags = 0;
        header.msg_hdr.msg_controllen = size_of::<Control>();
        let (cmsg_level, cmsg_type) = (libc::SOL_UDP, libc::UDP_GRO);
        let header = libc::cmsghdr { cmsg_len: size_of::<Control>(), cmsg_level, cmsg_type };
        self.controls[index] = Control { header, segment: segment as libc::c_int, padding: 0 };
    }

    fn bytes(&self, message: &Message) -> &[u8] {
        &self.memory[message.start..message.start + message.len]
    }

    fn message(&self, index: usize) -> Message {
        let header = &self.headers[index];
        let len = (header.msg_len as usize).min(BUFFER_LEN);
        let control = &self.controls[index];
        let offered = header.msg_hdr.msg_controllen >= size_of::<libc::cmsghdr>() + size_of::<libc::c_int>()
            && control.header.cmsg_level == libc::SOL_UDP
            && control.header.cmsg_type == libc::UDP_GRO;
        let segment = if offered { usize::try_from(control.segment).unwrap_or(0) } else { 0 };
        Message {
            source: self.sources[index],
            start: index * BUFFER_LEN,
            len,
            segment: if segment == 0 { len.max(1) } else { segment },
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        }
    }
}

#[cfg(test)]
#[path = "receive_tests.rs"]
mod tests;
