//! This host's own address (the source address of the route to the store), and its changes, by rtnetlink(7).
//!
//! The kernel notifies subscribers of changed addresses and routes. Notifications come in groups (an address brings routes, DHCP
//! removes before it adds), so a burst is drained before the address is looked up again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use futures_util::future::join_all;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use super::{PAUSES_MS, REQUEST};

/// Multicast groups of address and route changes, IPv4 and IPv6.
const GROUPS: i32 =
    libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR | libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV6_ROUTE;
/// How long notifications are collected before addresses are looked up, which bounds the rate under a busy routing daemon.
const SETTLE: Duration = Duration::from_millis(50);
/// Interval of lookups where the kernel sends no notifications.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A change of address this long after the last one starts the backoff anew.
const CALM: Duration = Duration::from_secs(10);

/// The addresses at which other hosts can reach this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Whereabouts {
    /// Source addresses of the routes to the store's members; empty without a route, or if the store runs on this host.
    pub sources: Vec<IpAddr>,
    /// True if the bridge's address is one of this host's.
    pub bridge_is_here: bool,
}

impl Whereabouts {
    /// Looks up the addresses. `None` if that is impossible because no endpoint's name can be resolved.
    pub async fn look(endpoints: &[String], bridge: SocketAddr) -> Option<Whereabouts> {
        let lookups = endpoints.iter().map(|endpoint| {
            let store = endpoint.split_once("://").map_or(endpoint.as_str(), |(_, rest)| rest);
            tokio::time::timeout(REQUEST, tokio::net::lookup_host(store.to_string()))
        });
        let found = join_all(lookups).await;
        let stores: Vec<SocketAddr> = found.into_iter().flatten().flatten().flatten().collect();
        let mut sources = vec![];
        for ip in stores.iter().filter_map(|store| source(*store)).filter(|ip| !ip.is_loopback()) {
            if !sources.contains(&ip) {
                sources.push(ip);
            }
        }
        (!stores.is_empty()).then(|| Whereabouts { sources, bridge_is_here: is_here(bridge.ip()) })
    }

    /// The source address to publish: the last one as long as it leads to a member, because names resolve in any order.
    pub fn source(&self, last: Option<IpAddr>) -> Option<IpAddr> {
        last.filter(|ip| self.sources.contains(ip)).or(self.sources.first().copied())
    }

    /// Whether others reach this host elsewhere than `before`, when `source` was published.
    fn differs(&self, before: &Whereabouts, source: Option<IpAddr>) -> bool {
        self.source(source) != source || self.bridge_is_here != before.bridge_is_here
    }
}

/// Backoff between sessions that end because this host's address changes: none after the first change.
#[derive(Default)]
pub(super) struct MovePause {
    last: Option<Instant>,
    pause: Duration,
}

impl MovePause {
    /// The address has changed: the pause before the next session.
    pub fn next(&mut self) -> Duration {
        let (first, longest) = (Duration::from_millis(PAUSES_MS.0), Duration::from_millis(PAUSES_MS.1));
        let calm = self.last.replace(Instant::now()).is_none_or(|last| last.elapsed() >= CALM);
        self.pause = if calm { Duration::ZERO } else { (self.pause * 2).clamp(first, longest) };
        self.pause
    }
}

/// Subscription to changes of this host's addresses and routes.
pub(super) struct AddressNews(Option<AsyncFd<OwnedFd>>);

impl AddressNews {
    /// Subscribes in the calling thread's network namespace. Must be called within a Tokio runtime.
    pub fn subscribe() -> AddressNews {
        let subscribed = || -> io::Result<AsyncFd<OwnedFd>> {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // The default protocol 0 is NETLINK_ROUTE.
            let family = AddressFamily::NETLINK;
            let fd = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
            rustix::net::bind(&fd, &SocketAddrNetlink::new(0, GROUPS as u32))?;
            // SAFETY: an owned descriptor stays open and the same for as long as the returned object lives.
            Ok(unsafe { AsyncFd::register(fd) }?)
        };
        let news = subscribed().inspect_err(|error| {
            tracing::warn!(%error, "overlay: no news of this host's addresses; looking once a second");
        });
        AddressNews(news.ok())
    }

    /// Waits until others reach this host elsewhere than `before`, when `source` was published.
    pub async fn moved(
        &mut self,
        endpoints: &[String],
        bridge: SocketAddr,
        (before, source): (Whereabouts, Option<IpAddr>),
    ) {
        loop {
            self.wait().await;
            let now = Whereabouts::look(endpoints, bridge).await;
            if now.is_some_and(|now| now.differs(&before, source)) {
                return;
            }
        }
    }

    /// Waits for a notification.
    async fn wait(&mut self) {
        let Some(fd) = &self.0 else { return tokio::time::sleep(LOOK_EVERY).await };
        let Ok(mut ready) = fd.readable().await else { return tokio::time::sleep(LOOK_EVERY).await };
        tokio::time::sleep(SETTLE).await;
        // The contents of notifications do not matter, nor does an overflow (ENOBUFS): addresses are looked up again in any case.
        let mut message = [0u8; 8192];
        while let Ok(_) | Err(rustix::io::Errno::NOBUFS | rustix::io::Errno::INTR) =
            rustix::net::recv(fd.as_fd(), &mut message[..], RecvFlags::empty())
        {}
        ready.clear_ready();
    }
}

/// Source address of a route to `to`. Connecting a UDP socket sends nothing.
fn source(to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match to {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|address| address.ip().to_canonical())
}

/// False if no device of this host has the address.
fn is_here(address: IpAddr) -> bool {
    let bound = std::net::UdpSocket::bind((address, 0));
    !bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_address_is_that_of_the_route() {
        assert_eq!(source(([127, 0, 0, 1], 2379).into()), Some([127, 0, 0, 1].into()));
    }

    #[tokio::test]
    async fn addresses_of_other_hosts_are_not_here() {
        let endpoints = ["http://127.0.0.1:2379".to_string()];
        let look = async |bridge: &str| Whereabouts::look(&endpoints, bridge.parse().unwrap()).await;
        // The store is on this host: no address leads to it from others.
        let sources = || vec![];
        assert_eq!(look("[::]:9000").await, Some(Whereabouts { sources: sources(), bridge_is_here: true }));
        assert_eq!(
            look("192.0.2.1:9000").await,
            Some(Whereabouts { sources: sources(), bridge_is_here: false })
        );
    }

    #[test]
    fn the_order_of_addresses_is_no_move() {
        let here = |last: &[u8]| {
            let sources = last.iter().map(|n| [10, 0, 0, *n].into()).collect();
            Whereabouts { sources, bridge_is_here: true }
        };
        let one: Option<IpAddr> = Some([10, 0, 0, 1].into());
        let before = here(&[1, 2]);
        assert_eq!(before.source(None), one);
        assert!(!here(&[2, 1]).differs(&before, one) && !here(&[1]).differs(&before, one));
        assert!(here(&[2]).differs(&before, one) && here(&[]).differs(&before, one));
        assert_eq!(here(&[2, 1]).source(one), one);
        assert!(Whereabouts { bridge_is_here: false, ..before.clone() }.differs(&before, one));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_in_a_row_are_followed_ever_more_slowly() {
        let mut pause = MovePause::default();
        let pauses_ms: Vec<_> = (0..7).map(|_| pause.next().as_millis()).collect();
        assert_eq!(pauses_ms, [0, 50, 100, 200, 400, 800, 1000]);
        tokio::time::advance(CALM).await;
        assert_eq!(pause.next(), Duration::ZERO);
    }
}
