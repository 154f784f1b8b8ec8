//! Decodes native datagrams into frames: whole frames, bundles, and fragments for reassembly.
//!
//! A datagram with whole frames adds them to the batch; a fragment goes to its link's [`Reassembly`]. Only frames still
//! incomplete at the end of the burst are copied out of it. This file answers probes; it passes probe replies, keepalives and
//! inquiries on without blocking.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::frame::NetworkId;
use crate::link::inquiry::is_inquiry;
use crate::link::intake::Intake;
use crate::link::native::reassembly::{Reassembly, Whole};
use crate::link::path::probe_health;
use crate::link::path::state::Hint;
use crate::link::progress::{Progress, discard_reason};
use crate::link::sealed::aead::TAG_LEN;
use crate::link::sealed::session::Seal;
use crate::link::socket::name::Name;
use crate::link::socket::receive_buffers::MESSAGES;
use crate::link::socket::udp::Socket;
use crate::link::{Link, Peers, ReassemblyBudget};
use crate::scratch::Scratch;
use crate::stats::{DiscardReason, DropReason};
use crate::wire::native::{Bundle, Header, Kind, metadata};
use crate::wire::offload::{Offload, WIRE_LEN};

/// Maximum number of probes answered per burst, one per message; further probes are ignored.
const REPLIES_MAX: usize = MESSAGES;

/// One decrypted datagram.
pub(in crate::link) struct Datagram<'a> {
    /// Memory of the burst.
    pub(in crate::link) memory: &'a Scratch,
    /// The datagram's range in that memory.
    pub(in crate::link) range: Range<usize>,
    /// Source address of the datagram.
    pub(in crate::link) source: &'a Name,
    /// The receiving socket; replies are sent on it.
    pub(in crate::link) socket: &'a Socket,
}

/// Incomplete frames of all links whose datagrams arrive on one socket. All datagrams of a frame take one path, so no other
/// socket receives any of them.
pub(in crate::link) struct Assembly {
    /// Reassemblies by link id, each created for the link's first fragment.
    reassemblies: HashMap<u64, Reassembly>,
    /// Links with fragments in the burst.
    unsettled: Vec<u64>,
    /// Complete frames in the batch that own memory.
    held: Vec<Whole>,
    budget: Arc<ReassemblyBudget>,
}

impl Assembly {
    pub(in crate::link) fn new(budget: Arc<ReassemblyBudget>) -> Assembly {
        Assembly { reassemblies: HashMap::new(), unsettled: Vec::new(), held: Vec::new(), budget }
    }

    /// Ends the burst: copies incomplete frames out of its memory.
    pub(in crate::link) fn settle(&mut self, memory: &Scratch) {
        while let Some(id) = self.unsettled.pop() {
            if let Some(reassembly) = self.reassemblies.get_mut(&id) {
                reassembly.settle(memory.bytes(0..memory.len()));
            }
        }
    }

    /// True while fragments of a frame are missing.
    pub(in crate::link) fn is_incomplete(&self) -> bool {
        self.reassemblies.values().any(|reassembly| reassembly.incomplete() > 0)
    }

    /// Frees the memory of the batch's frames after the batch was cleared.
    pub(in crate::link) fn release(&mut self) {
        self.held.clear();
    }

    /// Ends timed-out frames and those of removed links. Call it between two bursts.
    pub(in crate::link) fn tick(&mut self, peers: &Peers, now_ms: u64) {
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

    /// Processes one datagram. Returns false when the batch filled up before its end: a bundle resumes at `progress`.
    pub(in crate::link) fn datagram(
        &mut self,
        link: &Arc<Link>,
        datagram: &Datagram<'_>,
        progress: &mut Progress,
        intake: &mut Intake<'_>,
    ) -> bool {
        let bytes = datagram.memory.bytes(datagram.range.clone());
        let (header, payload) = match Header::parse(bytes) {
            Ok(parsed) => parsed,
            Err(error) => {
                link.stats.discard(discard_reason(error), 1);
                return true;
            }
        };
        if header.sealed != link.seal().is_some() {
            if header.sealed {
                link.path.note(Hint::AsksForSealing, intake.now_ms);
            }
            link.stats.discard(DiscardReason::SealRequired, 1);
            return true;
        }
        match header.kind {
            Kind::Frame if header.is_whole() => match metadata(payload, header.offload) {
                Some((offload, frame)) => intake.native(link, &header, offload, frame),
                None => link.stats.discard(DiscardReason::BadHeader, 1),
            },
            Kind::Frame => {
                let place = datagram.range.end - payload.len()..datagram.range.end;
                self.fragment(link, &header, (datagram.memory, place), intake);
            }
            Kind::Bundle => return bundle(link, &header, payload, progress, intake),
            Kind::Probe | Kind::ProbeReply
                if is_inquiry(payload)
                    && link.native().is_some_and(|native| {
                        let is_answer = header.kind == Kind::ProbeReply;
                        native.inquiries.put(link.port, is_answer, payload, intake.now_ms)
                    }) => {}
            Kind::Probe
                if link.native().is_some_and(|native| native.wire.announced(payload, intake.now_ms)) => {}
            Kind::Probe
                if link.native().is_some_and(|native| {
                    let probe = (payload, datagram.socket.local().port());
                    native.takes_agreement(link, probe, intake.now_ms)
                }) => {}
            Kind::Probe if link.seal().is_none() && link.path.is_own(payload) => {
                link.path.note(Hint::LeadsHere, intake.now_ms);
            }
            Kind::Probe if progress.replies < REPLIES_MAX => {
                progress.replies += 1;
                if link.seal().is_none()
                    && link.native().is_some_and(|native| native.is_from_namesake(payload))
                {
                    link.path.note(Hint::SameName, intake.now_ms);
                }
                reply(link, &header, payload, datagram);
            }
            Kind::Probe => {}
            Kind::Keepalive => {
                if let Some(seal) = link.seal() {
                    seal.hear(payload, seal.keyring().is_live(header.epoch));
                    link.heard_at(&header, datagram.source, payload);
                }
            }
            // A reply that the prober did not request only shows that the peer is alive.
            Kind::ProbeReply => _ = link.path.answered(payload),
        }
        true
    }

    /// Processes a fragment whose payload lies at `place` in the burst.
    fn fragment(
        &mut self,
        link: &Arc<Link>,
        header: &Header,
        (memory, place): (&Scratch, Range<usize>),
        intake: &mut Intake<'_>,
    ) {
        if self.unsettled.last() != Some(&link.id) {
            self.unsettled.push(link.id);
        }
        let Some(native) = link.native() else { return };
        let reassembly = self.reassemblies.entry(link.id).or_insert_with(|| {
            Reassembly::new(link.stats.clone(), native.budget.clone(), self.budget.clone(), intake.now_ms)
        });
        let Some(whole) = reassembly.accept(header, place, intake.now_ms) else { return };
        add_whole(link, &whole, memory, intake);
        if whole.owns_memory() {
            self.held.push(whole);
        } else if let Some(reassembly) = self.reassemblies.get_mut(&link.id) {
            reassembly.recycle(whole);
        }
    }
}

/// Adds a bundle's frames, starting at `progress`. Returns false when the batch filled up before the last frame.
fn bundle(
    link: &Link,
    header: &Header,
    payload: &[u8],
    progress: &mut Progress,
    intake: &mut Intake<'_>,
) -> bool {
    let Some(mut bundle) = Bundle::checked(&payload[progress.bundle..], header.offload) else {
        link.stats.discard(DiscardReason::BadHeader, 1);
        return true;
    };
    while !intake.batch.is_full() {
        let Some((offload, frame)) = bundle.next() else {
            progress.bundle = 0;
            return true;
        };
        intake.native(link, header, offload, frame);
    }
    progress.bundle = payload.len() - bundle.rest().len();
    let done = bundle.rest().is_empty();
    if done {
        progress.bundle = 0;
    }
    done
}

/// Adds a reassembled frame.
fn add_whole(link: &Link, whole: &Whole, memory: &Scratch, intake: &mut Intake<'_>) {
    let memory = memory.bytes(0..memory.len());
    let Some(network) = NetworkId::new(whole.network()) else {
        let metadata = if whole.offload() { WIRE_LEN } else { 0 };
        return intake.refuse(link, DropReason::WrongNetwork, whole.bytes() - metadata);
    };
    let mut offload = Offload::default();
    if let Some((found, _)) = whole.pieces(memory).next().and_then(|piece| metadata(piece, whole.offload())) {
        offload = found;
    }
    let pieces = whole.pieces(memory).enumerate().map(|(index, piece)| {
        match metadata(piece, index == 0 && whole.offload()) {
            Some((_, rest)) if index == 0 => rest,
            _ => piece,
        }
    });
    intake.pieces(link, network, (offload, whole.hops() + 1), pieces);
}

/// Answers a probe in clear text to a sealed link with an empty sealed header. It lets a peer whose link is not sealed report why
/// it gets no replies. The header carries no other information, is no longer than the probe, and has no effect on a sealed link.
#[cold]
pub(in crate::link) fn ask_for_sealing(link: &Link, socket: &Socket, source: &Name, progress: &mut Progress) {
    if progress.replies >= REPLIES_MAX {
        return;
    }
    progress.replies += 1;
    let header = Header {
        kind: Kind::ProbeReply,
        last: true,
        offload: false,
        sealed: true,
        hops: 0,
        epoch: 0,
        index: 0,
        network: 0,
        queue: 0,
        number: 1,
    };
    link.stats.out_datagrams.add(u64::from(socket.send(&header.to_bytes(), source).is_ok()));
}

/// Answers a probe with a datagram of the probe's size or with its first bytes. Only known peers get a reply, and it is never
/// longer than the probe, so there is no amplification.
#[cold]
fn reply(link: &Link, header: &Header, payload: &[u8], datagram: &Datagram<'_>) {
    // A path MTU probe tests one direction only.
    let payload = match payload.starts_with(&probe_health::MAGIC) {
        true => &payload[..payload.len().min(probe_health::ANSWER_LEN)],
        false => payload,
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
    // A reply that cannot be sent counts as lost, because the prober repeats its probes.
    link.stats.out_datagrams.add(u64::from(datagram.socket.send(&reply, datagram.source).is_ok()));
}
