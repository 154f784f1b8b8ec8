//! The part of all links that one dispatcher owns: its sockets, a sender and receivers.

use std::net::SocketAddr;
use std::sync::Arc;

use super::link::{Kind, Link};
use super::native::reassembly::ReassemblyBudget;
use super::native::send::NativeSender;
use super::native::send_probes::Courier;
use super::native::zero_copy::ZeroCopy;
use super::path::prober::Prober;
use super::path::watch::{Monitored, PathWatch};
use super::receiver::{PeersView, Receiver, ReceiverParts};
use super::sending::Sending;
use super::socket::ports::{self, BridgeError};
use super::socket::send_batch::Gather;
use super::socket::udp::{Socket, set};
use super::vxlan::send::VxlanSender;
use super::vxlan::source_ports::SourcePorts;
use crate::frame::{DropSink, Selection};
use crate::inherit::{self, Inheritance};
use crate::listen::until_free;
use crate::stats::{DropReason, PortStats};
use crate::wire::native::HOPS_MAX;

/// One dispatcher's UDP sockets for all links, with a sending and a receiving half.
pub struct Bridge {
    /// Receivers, one per socket.
    pub rx: Vec<Receiver>,
    /// The sender.
    pub tx: Sender,
    /// The receiver of VXLAN's own port, after [`Bridge::add_vxlan`].
    pub vxlan_rx: Option<Receiver>,
    /// The links that receivers match source addresses against; the dispatcher stores those of a new setup here.
    pub peers: PeersView,
    /// Creates more receivers.
    pub receivers: ReceiverParts,
}

impl Bridge {
    /// Makes the bridges of one host listen for VXLAN on `listen`. They share the port as in [`Bridge::bind_group`].
    /// With `inheritance`, the sockets are those of a running vnetd.
    pub fn add_vxlan(
        bridges: &mut [Bridge],
        listen: SocketAddr,
        inheritance: Option<&Inheritance>,
    ) -> Result<(), BridgeError> {
        let failed = |error| BridgeError::new("[bridge] vxlan_listen", listen, error);
        if inheritance.is_none() {
            drop(until_free(|| Socket::bind(listen, false)).map_err(failed)?);
        }
        let shared = bridges.len() > 1;
        let open = |index| match inheritance {
            Some(inheritance) => inheritance
                .take_one(&inherit::vxlan(index))
                .ok_or_else(|| std::io::Error::other("the running vnetd does not hand over the socket"))
                .and_then(Socket::inherit),
            None => Socket::bind(listen, shared),
        };
        for (index, bridge) in bridges.iter_mut().enumerate() {
            let socket = Arc::new(open(index).map_err(failed)?);
            // Without this option, a group's datagrams reach every socket on the host, members or not.
            set(&socket, libc::SOL_IP, libc::IP_MULTICAST_ALL, 0).map_err(failed)?;
            bridge.vxlan_rx = Some(bridge.receivers.vxlan(socket, index == 0));
            bridge.tx.vxlan = Some(VxlanSender::new(SourcePorts::new(listen).map_err(failed)?));
        }
        Ok(())
    }

    /// Sends control datagrams on this bridge's first socket.
    pub fn courier(&self) -> Courier {
        Courier::new(self.tx.sockets[0].clone())
    }

    /// Listens on `listen`. With `shared`, several bridges of this process share the address and the kernel spreads the peers
    /// over them. `stats` counts datagrams of unknown source, `budget` limits the host's reassembly memory.
    ///
    /// A shared bridge cannot detect another vnetd of the same user on its port: use [`Bridge::bind_group`].
    pub fn bind(
        listen: SocketAddr,
        shared: bool,
        stats: Arc<PortStats>,
        budget: Arc<ReassemblyBudget>,
    ) -> Result<Bridge, BridgeError> {
        Ok(Bridge::new(vec![ports::bind(listen, shared)?], 0, stats, budget))
    }

    /// Creates bridges for `dispatchers` dispatchers on `ports` consecutive ports, starting at that of `listen`; all of them must
    /// be free. Port 0 lets the kernel choose, if possible a port that is free for TCP, too. With several ports but fewer than
    /// dispatchers, the last dispatchers get no receiver.
    pub fn bind_group(
        listen: SocketAddr,
        ports: u16,
        dispatchers: usize,
        stats: &Arc<PortStats>,
        budget: &Arc<ReassemblyBudget>,
    ) -> Result<Vec<Bridge>, BridgeError> {
        Ok(Bridge::group(ports::bind_group(listen, ports, dispatchers)?, stats, budget))
    }

    /// The bridges of a running vnetd that [`Bridge::bind_group`] has made with the same address, number of ports and dispatchers, from the
    /// sockets that it hands over.
    pub fn inherit_group(
        inheritance: &Inheritance,
        (listen, ports): (SocketAddr, u16),
        dispatchers: usize,
        stats: &Arc<PortStats>,
        budget: &Arc<ReassemblyBudget>,
    ) -> Result<Vec<Bridge>, BridgeError> {
        Ok(Bridge::group(ports::inherit_group(inheritance, listen, ports, dispatchers)?, stats, budget))
    }

    /// Bridges with the sockets of each dispatcher, see [`Bridge::bind_group`].
    fn group(
        sockets: Vec<Vec<Arc<Socket>>>,
        stats: &Arc<PortStats>,
        budget: &Arc<ReassemblyBudget>,
    ) -> Vec<Bridge> {
        let bridge = |(dispatcher, own): (usize, Vec<Arc<Socket>>)| {
            let native_from = usize::from(dispatcher > 0 && own.len() > 1);
            Bridge::new(own, native_from, stats.clone(), budget.clone())
        };
        sockets.into_iter().enumerate().map(bridge).collect()
    }

    /// The sockets of dispatcher `id`, by their names in an [`Inheritance`].
    pub(crate) fn descriptors(&self, id: usize) -> Vec<(String, Arc<Socket>)> {
        let own = self.tx.sockets.iter().enumerate();
        let own = own.map(|(index, socket)| (inherit::bridge(id, index), socket.clone()));
        let vxlan = self.vxlan_rx.iter().map(|receiver| (inherit::vxlan(id), receiver.socket()));
        own.chain(vxlan).collect()
    }

    fn new(
        sockets: Vec<Arc<Socket>>,
        native_from: usize,
        stats: Arc<PortStats>,
        budget: Arc<ReassemblyBudget>,
    ) -> Bridge {
        let receivers = ReceiverParts::new(stats, budget);
        let rx = sockets.iter().map(|socket| receivers.receiver(socket.clone())).collect();
        let (peers, tx) = (receivers.peers.clone(), Sender::new(sockets, native_from));
        Bridge { rx, tx, vxlan_rx: None, peers, receivers }
    }

    /// The listening address with the first port, which the kernel may have chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.tx.sockets[0].local()
    }
}

/// Sends frames on links of all kinds, for one dispatcher; shares its sockets with a [`Receiver`].
pub struct Sender {
    /// The first socket is bound to the host's first port.
    sockets: Vec<Arc<Socket>>,
    gather: Gather,
    native: NativeSender,
    /// Present if the host listens for VXLAN.
    vxlan: Option<VxlanSender>,
}

impl Sender {
    /// A sender on `sockets`. The first socket is bound to the host's first port; native frames use the sockets from
    /// `native_from` on.
    fn new(sockets: Vec<Arc<Socket>>, native_from: usize) -> Sender {
        let native = NativeSender::new(sockets.clone(), native_from);
        Sender { sockets, gather: Gather::new(), native, vxlan: None }
    }

    /// Sets whether guest memory is sent without copying.
    pub fn set_zero_copy(&mut self, setting: ZeroCopy) {
        self.native.set_zero_copy(setting);
    }

    /// Releases frame memory that the kernel has finished sending. Returns true when there was any.
    #[inline]
    pub fn reap(&mut self) -> bool {
        self.native.reap()
    }

    /// Advances the clock; call about ten times per second.
    pub fn tick(&mut self, now_ms: u64) {
        if let Some(vxlan) = &mut self.vxlan {
            vxlan.tick(now_ms);
        }
    }

    /// Encapsulates the frames and sends them on `link`. Counts each frame as sent or dropped.
    pub fn send(&mut self, link: &Link, frames: Selection<'_>, drops: &mut DropSink) {
        let batch = frames.batch;
        let mut out = Sending { link, batch, gather: &mut self.gather, drops };
        let relayed_too_often = |index: &u16| batch.frame(usize::from(*index)).hops > HOPS_MAX;
        let few_hops: Vec<u16>;
        let mut which = frames.which;
        if which.iter().any(relayed_too_often) {
            // Happens only in loops of links, so the allocation does not matter.
            for &index in which.iter().filter(|index| relayed_too_often(index)) {
                out.dropped(DropReason::HopLimit, index);
            }
            few_hops = which.iter().copied().filter(|index| !relayed_too_often(index)).collect();
            which = &few_hops;
        }
        match (&link.kind, &mut self.vxlan) {
            (Kind::Native(native), _) => self.native.send(native, &mut out, which),
            (Kind::Classic(classic), _) => classic.send(&self.sockets[0], &mut out, which),
            (Kind::Vxlan(link), Some(sender)) => sender.send(link, &mut out, which),
            (Kind::Vxlan(_), None) => out.dropped_all(DropReason::SendFailed, which),
            (Kind::Stream(_), _) => link.stream_send(frames.only(which), out.drops),
        }
    }
}

/// Queries the route and device of the paths of all links of a host.
impl PathWatch {
    /// Creates the watch of the host with these `bridges`.
    pub fn of(bridges: &[Bridge]) -> PathWatch {
        let sockets = bridges.iter().flat_map(|bridge| bridge.tx.sockets.iter().cloned()).collect();
        let vxlan = bridges.iter().filter_map(|bridge| bridge.tx.vxlan.as_ref());
        PathWatch::new(sockets, vxlan.flat_map(|sender| sender.sockets().iter().cloned()).collect())
    }

    /// Looks up the routes of new links.
    pub fn meet_all(&mut self, links: &[Arc<Link>]) {
        links.iter().for_each(|link| self.meet(&**link));
    }

    /// Refreshes routes older than a second, or requested by a sender.
    pub fn look_at_all(&mut self, links: &[Arc<Link>], now_ms: u64) {
        links.iter().for_each(|link| _ = self.look_at(&**link, now_ms));
    }
}

impl Prober {
    /// Replaces the set of monitored links. Returns when the routes of new links are known.
    pub fn set_links(&self, links: &[Arc<Link>]) {
        self.watch(links.iter().map(|link| link.clone() as Arc<dyn Monitored>).collect());
    }
}
