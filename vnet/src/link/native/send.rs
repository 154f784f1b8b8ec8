//! Sends frames on native links.
//!
//! In the frames' order:
//! - consecutive small frames with the same network and hop count, all finished or all with offload metadata, are *bundled* into
//!   one datagram while they fit; nothing waits for a bundle to fill;
//! - any other frame becomes one datagram or as many fragments as it needs, made of headers and slices of the frame's memory.
//!
//! Large frames in guest memory may be sent without copying, one at a time (zero_copy.rs). On a sealed link, datagrams are copied
//! together and encrypted in place before they are passed to the kernel. Frames without a key are dropped.
//!
//! Between hosts with several ports, frames are first spread over *paths* (a local socket and a remote port) by the hash of their
//! flow: flows stay in order, and so do a frame's datagrams. Frames for a guest of the other host that has its own port go to
//! that port (direct_ports.rs).
//!
//! The datagrams of a call are passed to the kernel together. When one exceeds the path MTU, the frames not sent yet are encoded
//! again, once, for a size that nearly every path carries, and the path room asks the kernel for the new MTU. A frame already
//! sent in part is then sent again under a new name; the other host counts the first attempt as incomplete.

use std::sync::Arc;

use super::direct_ports::Guest;
use super::encode::{Encoding, Route};
use super::link_part::Native;
use super::zero_copy::{CutThrough, Outcome, ZeroCopy};
use crate::frame::BATCH_MAX;
use crate::link::limits::DIRECT_MAX;
use crate::link::sealed::session::Seal;
use crate::link::sending::{Sending, TooBig};
use crate::link::socket::name::PORTS_MAX;
use crate::link::socket::udp::Socket;
use crate::stats::DropReason;
use crate::wire::flow;

/// A destination port on the other host.
#[derive(Clone, Copy)]
enum Port<'a> {
    /// One of the bridge's ports, counted from the first.
    Bridge(usize),
    /// A guest's own port.
    Guest(&'a Guest),
}

/// Sends frames on native links, for one dispatcher.
pub(in crate::link) struct NativeSender {
    /// The first socket is bound to the host's first port.
    sockets: Vec<Arc<Socket>>,
    /// Index of the first socket for native frames; links with a rendezvous use socket 0.
    from: usize,
    /// Frames of a call, by path.
    by_path: Vec<Vec<u16>>,
    /// Frames of a call by guest with its own port; frames for all other guests come first.
    by_guest: Vec<Vec<u16>>,
    cut: CutThrough,
}

impl NativeSender {
    /// A sender on `sockets`, starting at index `from`.
    pub(in crate::link) fn new(sockets: Vec<Arc<Socket>>, from: usize) -> NativeSender {
        let paths = sockets.len().max(usize::from(PORTS_MAX));
        NativeSender {
            cut: CutThrough::new(&sockets),
            sockets,
            from,
            // Capacity for a full batch: the data path never allocates.
            by_path: (0..paths).map(|_| Vec::with_capacity(BATCH_MAX)).collect(),
            by_guest: (0..=DIRECT_MAX).map(|_| Vec::with_capacity(BATCH_MAX)).collect(),
        }
    }

    /// Sets whether guest memory is sent without copying.
    pub(in crate::link) fn set_zero_copy(&mut self, setting: ZeroCopy) {
        self.cut.configure(setting);
    }

    /// Releases frame memory that the kernel has finished sending. Returns true when there was any.
    #[inline]
    pub(in crate::link) fn reap(&mut self) -> bool {
        self.cut.reap()
    }

    /// Sends the frames `which` of the batch, split by guest, path and flow.
    pub(in crate::link) fn send(&mut self, native: &Native, out: &mut Sending<'_>, which: &[u16]) {
        out.gather.segmentation = out.link.path.segmentation();
        let guests = native.direct.guests();
        if guests.is_empty() {
            return self.spread(native, out, which);
        }
        let mut by_guest = std::mem::take(&mut self.by_guest);
        for &index in which {
            let frame = out.frame(index);
            let guest = guests.iter().take(DIRECT_MAX).position(|guest| guest.is(frame.network, frame.dst));
            by_guest[guest.map_or(0, |guest| guest + 1)].push(index);
        }
        for (guest, which) in by_guest.iter_mut().enumerate().filter(|(_, which)| !which.is_empty()) {
            match guest.checked_sub(1) {
                None => self.spread(native, out, which),
                // From the host's first port, which a guest's port accepts alone.
                Some(guest) => self.send_by(native, out, (0, Port::Guest(&guests[guest])), which),
            }
            which.clear();
        }
        self.by_guest = by_guest;
    }

    /// Spreads the frames over paths by flow and sends them.
    ///
    /// The number of paths is the larger of both sides' socket counts, so exactly one path uses each socket of that side.
    fn spread(&mut self, native: &Native, out: &mut Sending<'_>, which: &[u16]) {
        if native.via.is_some() {
            // NAT mappings and the relay exist for the first port only.
            return self.send_by(native, out, (0, Port::Bridge(0)), which);
        }
        let (exits, ports) = (self.sockets.len() - self.from, native.place.ports());
        let paths = exits.max(ports);
        if paths == 1 {
            return self.send_by(native, out, (self.from, Port::Bridge(0)), which);
        }
        let mut by_path = std::mem::take(&mut self.by_path);
        for &index in which {
            let hash = flow::hash(out.batch.head(out.frame(index)));
            by_path[hash as usize % paths].push(index);
        }
        for (path, which) in by_path[..paths].iter_mut().enumerate().filter(|(_, which)| !which.is_empty()) {
            let port = Port::Bridge(path.checked_rem(ports).unwrap_or(0));
            self.send_by(native, out, (self.from + path % exits, port), which);
            which.clear();
        }
        self.by_path = by_path;
    }

    /// Sends the frames from one local socket to one port of the other host.
    fn send_by(
        &mut self,
        native: &Native,
        out: &mut Sending<'_>,
        (exit, port): (usize, Port<'_>),
        which: &[u16],
    ) {
        let socket = &*self.sockets[exit];
        let name = match port {
            Port::Bridge(port) => native.name(port, socket),
            Port::Guest(guest) => socket.form_of(&guest.port).copied(),
        };
        let Some(name) = name else {
            let unknown = native.place.remote().is_none();
            let reason = if unknown { DropReason::NoAddress } else { DropReason::SendFailed };
            return out.dropped_all(reason, which);
        };
        socket.set_oversize(native.oversize());
        let keyring = native.seal.as_deref().map(Seal::keyring);
        let key = keyring.as_ref().and_then(|keyring| keyring.sealing(out.link.next_number()));
        if keyring.is_some() && key.is_none() {
            return out.dropped_all(DropReason::NoKey, which);
        }
        let route = Route { exit, socket, name: &name, trial: &native.zero_copy };
        let path = &out.link.path;
        let encoding = Encoding { key, size: native.payload_of(path.mtu()), may_stop: true };
        if let Err(TooBig { frame }) = encode(&mut self.cut, out, &route, encoding, which) {
            let rest = which.iter().position(|index| *index == frame).unwrap_or(which.len());
            // Never stops early: a datagram that is still too large counts as dropped.
            let smaller = Encoding { size: native.payload_of(path.mtu_below()), may_stop: false, ..encoding };
            _ = encode(&mut self.cut, out, &route, smaller, &which[rest..]);
        }
    }
}

/// Encodes and sends the frames `which` of the batch on `route`.
fn encode(
    cut: &mut CutThrough,
    out: &mut Sending<'_>,
    route: &Route<'_>,
    encoding: Encoding<'_>,
    which: &[u16],
) -> Result<(), TooBig> {
    let (socket, name, may_stop) = (route.socket, route.name, encoding.may_stop);
    let mut at = 0;
    while at < which.len() {
        if !encoding.has_room(out.gather) {
            out.flush(socket, name, may_stop)?;
        }
        let count = encoding.bundled(out.batch, &which[at..]);
        if encoding.key.is_none() && cut.wants(route, out, which[at], encoding.size) {
            // Sends the datagrams gathered before first.
            out.flush(socket, name, may_stop)?;
            if cut.send(route, out, which[at], encoding.size) == Outcome::Done {
                at += 1;
                continue;
            }
        }
        if count > 1 {
            encoding.put_bundle(out, &which[at..at + count]);
        } else {
            encoding.put_frame(out, which[at]);
        }
        at += count;
    }
    out.flush(socket, name, may_stop)
}

impl Drop for NativeSender {
    fn drop(&mut self) {
        self.cut.end();
    }
}

#[cfg(test)]
mod tests {
    use crate::frame::{Batch, DropSink, FRAME_MAX, NetworkId, PortId, Segment, Selection};
    use crate::link::socket::send_batch::Flushed;
    use crate::link::{Bridge, Link, LinkKind, LinkOptions, ReassemblyBudget};
    use crate::wire::offload::Offload;
    use std::net::UdpSocket;
    use std::sync::Arc;
    use std::time::Duration;

    fn send(segmentation: bool, lens: &[usize]) -> (Vec<Vec<u8>>, u64) {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let listen = "127.0.0.1:0".parse().unwrap();
        let mut bridge =
            Bridge::bind(listen, false, Arc::default(), Arc::new(ReassemblyBudget::new(0))).unwrap();
        let options = LinkOptions {
            name: "peer".into(),
            remote: peer.local_addr().unwrap(),
            ports: 1,
            networks: None,
            mtu: Some(1500),
            kind: LinkKind::default(),
        };
        let link = Link::new(options, PortId(0), Arc::default());
        link.path.set_route_mtu(1500);
        link.path.learn(&Flushed { no_segmentation: !segmentation, ..Flushed::default() });
        let first = link.next_number();
        let frames: Vec<Vec<u8>> =
            lens.iter().map(|len| (0..*len).map(|i| (i * 7 + len) as u8).collect()).collect();
        let mut batch = Batch::new();
        for frame in &frames {
            let mut builder = batch.begin();
            // SAFETY: `frames` outlives the batch and is not written to.
            unsafe { builder.push_stable(Segment::new(frame.as_ptr(), frame.len())) };
            builder.finish(PortId(1), NetworkId::DEFAULT, Offload::default(), 0).unwrap();
        }
        let which: Vec<u16> = (0..lens.len() as u16).collect();
        bridge.tx.send(&link, Selection { batch: &batch, which: &which }, &mut DropSink::new());
        assert_eq!(link.stats.out_frames.get(), lens.len() as u64);
        let mut buffer = vec![0; 65_536];
        let mut datagram = || peer.recv(&mut buffer).ok().map(|len| buffer[..len].to_vec());
        let mut got: Vec<_> = std::iter::from_fn(&mut datagram).collect();
        // Numbers start at the current time; make them relative.
        for datagram in &mut got {
            let number = u64::from_be_bytes(datagram[8..16].try_into().unwrap());
            datagram[8..16].copy_from_slice(&(number - first).to_be_bytes());
        }
        (got, link.stats.out_datagrams.get())
    }

    /// Without segmentation offload each datagram is sent alone: the wire shows the same datagrams in the same order.
    #[test]
    fn segmentation_changes_nothing_on_the_wire() {
        let lens = [60, 1400, 1400, 1400, 9000, 64, 64, 64, 1456, 1457, 2912, 30_000, FRAME_MAX];
        let (with, sent) = send(true, &lens);
        assert_eq!(with.len() as u64, sent);
        assert_eq!((with, sent), send(false, &lens));
    }
}
