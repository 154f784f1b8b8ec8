//! How much fits into a packet on a link's path.

mod pmtu;
pub mod prober;

use std::sync::atomic::Ordering::Relaxed;

use crate::link::sealed::aead;
use crate::link::{Link, PATH_MTU_MIN, UDP_PAYLOAD_MAX};
use crate::wire::native;

const IPV4_HEADER_LEN: u16 = 20;
const IPV6_HEADER_LEN: u16 = 40;
const UDP_HEADER_LEN: u16 = 8;
/// Path MTU assumed while the kernel knows no route.
pub(in crate::link) const PATH_MTU_FALLBACK: u16 = 1280;

impl Link {
    /// Largest IP packet in bytes that is sent on it: what the kernel's route, the configured limit and probes allow.
    #[inline]
    pub fn path_mtu(&self) -> u16 {
        let known = self.unprobed_mtu().unwrap_or_else(|| self.limited(PATH_MTU_FALLBACK.into()));
        match self.probed_mtu.load(Relaxed) {
            0 => known,
            probed => known.min(probed as u16),
        }
    }

    /// The same without probes; `None` while the kernel has not been asked.
    #[inline]
    pub(in crate::link) fn unprobed_mtu(&self) -> Option<u16> {
        Some(self.path_mtu.load(Relaxed)).filter(|mtu| *mtu != 0).map(|mtu| self.limited(mtu))
    }

    /// A path MTU within what the configuration allows.
    #[inline]
    fn limited(&self, mtu: u32) -> u16 {
        let configured = u32::from(self.options.mtu.unwrap_or(u16::MAX));
        mtu.min(configured).clamp(u32::from(PATH_MTU_MIN), u32::from(u16::MAX)) as u16
    }

    /// Largest UDP payload of an unfragmented packet in bytes.
    pub(in crate::link) fn udp_payload(&self) -> usize {
        self.udp_payload_of(self.path_mtu())
    }

    /// UDP payload of a packet of `size` bytes.
    #[inline]
    fn udp_payload_of(&self, size: u16) -> usize {
        let is_v4 = self.remote().is_some_and(|remote| remote.is_ipv4());
        let ip = if is_v4 { IPV4_HEADER_LEN } else { IPV6_HEADER_LEN };
        usize::from(size - ip - UDP_HEADER_LEN).min(UDP_PAYLOAD_MAX)
    }

    /// Payload of a native datagram in a packet of `size` bytes.
    #[inline]
    pub(in crate::link) fn payload_of(&self, size: u16) -> usize {
        self.udp_payload_of(size) - native::HEADER_LEN - if self.seal.is_some() { aead::TAG_LEN } else { 0 }
    }

    /// S: payload bytes of a full native datagram.
    pub(in crate::link) fn fragment_payload(&self) -> usize {
        self.payload_of(self.path_mtu())
    }
}
