//! Queries the kernel about paths (route, path MTU, device speed) and sizes socket buffers.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;

use super::device_speed::path_mbps;
use super::route::RouteProbe;
use super::state::Path;
use crate::link::socket::buffers::buffer_bytes;
use crate::link::socket::udp::{Socket, set};
use crate::link::state::LinkState;
use crate::netlink::configured_mtu;
use crate::stats::PortStats;

/// A link as the path room uses it.
pub(in crate::link) trait Monitored: Send + Sync {
    fn id(&self) -> u64;
    fn name(&self) -> &str;
    fn path(&self) -> &Path;
    fn stats(&self) -> &PortStats;
    /// The other host's address, if known.
    fn remote(&self) -> Option<SocketAddr>;
    /// True if the link uses the bridge's sockets, which may not reach every address family.
    fn leaves_by_bridge(&self) -> bool;
    /// True if the link sends to a multicast group through the remote's device.
    fn has_group(&self) -> bool;
    /// Ages out old entries.
    fn age(&self, now_ms: u64);
    /// True if the other host answers probes; `false` while its address is unknown.
    fn is_probed(&self) -> bool;
    /// True if keepalives, rather than probes, determine the link's state.
    fn is_sealed(&self) -> bool;
    /// State of a link whose datagrams travel in clear text, whose changes the prober logs; `None` for other links.
    fn clear_state(&self) -> Option<LinkState>;
    /// Arrival of the last datagram, in ms on the core's clock.
    fn heard_ms(&self) -> Option<u64>;
    /// Announces and tries direct ports as far as it is time.
    fn negotiate(&self, by: &Arc<Socket>, now_ms: u64);
    /// Sends a probe in an IP packet of `size` bytes, or a small one. A send error counts as packet loss.
    fn send_probe(&self, by: &Arc<Socket>, id: &[u8; 8], size: Option<u16>);
}

/// Keeps the kernel's view of paths current, for all links of a host.
pub struct PathWatch {
    /// The sockets of all dispatchers; the first is bound to the host's first port.
    sockets: Vec<Arc<Socket>>,
    /// Sockets that send to multicast groups.
    multicast: Vec<Arc<Socket>>,
    routes: RouteProbe,
    /// Speed in Mbit/s for which the buffers are sized; 0: no path's speed is known yet.
    mbps: u32,
}

impl PathWatch {
    pub(in crate::link) fn new(sockets: Vec<Arc<Socket>>, multicast: Vec<Arc<Socket>>) -> PathWatch {
        let routes = RouteProbe::new(sockets[0].local());
        PathWatch { sockets, multicast, routes, mbps: 0 }
    }

    /// The socket for probes.
    pub(super) fn socket(&self) -> &Arc<Socket> {
        &self.sockets[0]
    }

    /// Looks up a new link's route. Until then senders assume a small path MTU.
    pub(in crate::link) fn meet(&mut self, link: &dyn Monitored) {
        if link.path().is_unknown() {
            self.refresh(link);
        }
    }

    /// Refreshes a route that is older than a second or requested by a sender. Returns true when it did.
    pub(in crate::link) fn look_at(&mut self, link: &dyn Monitored, now_ms: u64) -> bool {
        link.age(now_ms);
        if !link.path().is_due(now_ms) {
            return false;
        }
        self.refresh(link);
        let mut mbps = link.path().mbps();
        if mbps == 0
            && let Some(remote) = link.remote()
        {
            mbps = path_mbps(self.sockets[0].as_fd(), remote).max(1);
            link.path().set_mbps(mbps);
        }
        self.fit_buffers(mbps);
        true
    }

    /// Resizes the sockets' buffers if `mbps` Mbit/s is the fastest path so far.
    fn fit_buffers(&mut self, mbps: u32) {
        if mbps <= self.mbps {
            return;
        }
        self.mbps = mbps;
        for socket in &self.sockets {
            if let Err(error) = socket.set_buffers(buffer_bytes(mbps)) {
                tracing::warn!(%error, mbps, "cannot resize a socket's buffers; they stay as they are");
            }
        }
    }

    fn refresh(&mut self, link: &dyn Monitored) {
        let Some(remote) = link.remote() else { return };
        if link.has_group() {
            self.aim_multicast(remote);
        }
        let reachable = !link.leaves_by_bridge() || self.sockets[0].reaches(remote.is_ipv4());
        link.path().set_route(if reachable {
            self.mtu_to(remote, link)
        } else {
            Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT))
        });
    }

    /// The path MTU to start from. What ICMP claims counts on links in clear text only.
    fn mtu_to(&mut self, remote: SocketAddr, link: &dyn Monitored) -> io::Result<u32> {
        let claimed = self.routes.path_mtu(remote)?;
        if !link.is_sealed() || claimed == link.path().route_mtu() {
            return Ok(claimed);
        }
        Ok(configured_mtu(self.sockets[0].local().ip(), remote).unwrap_or(claimed))
    }

    /// Sends multicast through the device on the route to `remote`.
    fn aim_multicast(&mut self, remote: SocketAddr) {
        let Some(IpAddr::V4(source)) = self.routes.source(remote) else { return };
        for socket in &self.multicast {
            let value = u32::from(source).to_be() as libc::c_int;
            // On failure, the kernel's route for the group applies.
            let _ = set(socket, libc::SOL_IP, libc::IP_MULTICAST_IF, value);
        }
    }
}
