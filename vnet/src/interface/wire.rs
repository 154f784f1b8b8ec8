//! The wire: the host's VXLAN device for known flows between vnet hosts, and the TAP by which its other frames come up.
//!
//! The device is external: programs set the destination host and network of each frame that leaves (`bpf_skb_set_tunnel_key`), and
//! read source host and network of each that arrives. Frames without a verdict come up by the TAP, behind a head with both
//! (`kernel/programs/from_wire.h`). A frame that vnetd writes to the TAP leaves for the host that its tail contains
//! (`kernel/programs/to_wire.h`): a trial of the wire, or a frame that must reach a host whose vnetd may have died.
//!
//! The TAP is opened first. The kernel lets only one process open it, so a second vnetd of the same network namespace has no wire, and
//! an existing device is that of a vnetd that has died. It still forwards that vnetd's flows, so the next one adopts it.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoKind, InfoVxlan, LinkAttribute, LinkInfo, LinkMessage};

use super::device;
use super::link_request::{raise, remove};
use super::tap::{self, TAP_MTU_MAX, TapError, TapOptions};
use super::tun::Queues;
use crate::helper;
use crate::inherit::{Inheritance, WIRE};
use crate::netlink::{self, Netlink};
use crate::wire::ethernet::HEADER_LEN;
use crate::wire::offload::VIRTIO_NET_HDR_LEN;
use crate::wire::vxlan::WireTail;

const DEVICE: &str = "vnet-wire";
const TAP: &str = "vnet-wire-tap";
/// The device's MTU in bytes: the largest IP packet less VXLAN's headers, rounded.
pub const MTU: usize = 65_000;
/// Longest unsegmented IP packet in bytes that takes the wire: the kernel lets programs prepend a head only to packets below
/// `SKB_MAX_ALLOC` (16 KiB less some hundred bytes).
pub const PACKET_MAX: usize = 15_000;
/// Bytes of headers around a guest's IP packet: IPv4 (20), UDP (8), VXLAN (8) and the guest's Ethernet header.
pub const OVERHEAD: usize = 20 + 8 + 8 + HEADER_LEN;
/// Queue length of the TAP in frames: 64 of the largest datagrams, as fragments for an MTU of 1500 (see `tap`).
const QUEUE_LEN: u32 = 64 * 46;
/// Bytes of a trial.
const TRIAL_LEN: usize = 60;
/// Ethertype of a trial: IEEE 802 local experimental 1.
const TRIAL_TYPE: [u8; 2] = [0x88, 0xb5];

/// The wire of a host.
pub struct Wire {
    file: File,
    /// The VXLAN device: name and index.
    pub device: (String, u32),
    /// The TAP: name and index.
    pub tap: (String, u32),
    /// Where the TAP comes from, if the running vnetd has handed it over.
    inheritance: Option<Arc<Inheritance>>,
}

impl Wire {
    /// Opens the TAP and creates or adopts the VXLAN device, for datagrams to and at UDP port `port`. A new device is down.
    ///
    /// # Errors
    /// Another vnetd of this network namespace has the wire, the port is in use, or the kernel has no VXLAN.
    pub fn open(port: u16) -> Result<Wire, TapError> {
        let options = TapOptions {
            device: TAP.into(),
            netns: None,
            mac: None,
            mac_before: None,
            mtu: TAP_MTU_MAX,
            queues: 1,
            silent: true,
            keep: None,
        };
        let Queues { files, sight, .. } = tap::open_queues(&options)?;
        let fail = |step, error| TapError::Step { step, device: DEVICE.into(), error, hint: "" };
        lengthen_queue(sight.index as u32)
            .map_err(|error| fail("set the queue length of the TAP of", error))?;
        let file = files.into_iter().next().ok_or_else(|| fail("open", io::ErrorKind::NotFound.into()))?;
        let index =
            adopt(port).map_or_else(|| make(port), Ok).map_err(|error| match error.raw_os_error() {
                Some(libc::EADDRINUSE) => {
                    let hint = "; another program has its UDP port, 9789";
                    TapError::Step { step: "create", device: DEVICE.into(), error, hint }
                }
                _ => fail("create", error),
            })?;
        let (device, tap) = ((DEVICE.into(), index), (TAP.into(), sight.index as u32));
        let wire = Wire { file, device, tap, inheritance: None };
        helper::disable_ipv6(DEVICE).map_err(|error| fail("disable IPv6 on", error))?;
        device::isolate(DEVICE).map_err(|error| fail("isolate", error))?;
        // Only what vnetd sends enters by the TAP, and a program takes it.
        device::forward(TAP).map_err(|error| fail("allow look-ups of routes for the TAP of", error))?;
        Ok(wire)
    }

    /// The wire of the running vnetd, which hands over the TAP.
    ///
    /// # Errors
    /// A device is gone, or is not as [`Wire::open`] makes it.
    pub fn inherit(port: u16, inheritance: &Arc<Inheritance>) -> Result<Wire, TapError> {
        let gone = |device: &str| TapError::Step {
            step: "find",
            device: device.into(),
            error: io::ErrorKind::NotFound.into(),
            hint: "; the running vnetd has it",
        };
        let file = inheritance.take_one(WIRE).ok_or_else(|| gone(TAP))?.into();
        let tap = tap::device_index(TAP).ok_or_else(|| gone(TAP))?;
        let index = adopt(port).ok_or_else(|| gone(DEVICE))?;
        let (device, tap) = ((DEVICE.into(), index), (TAP.into(), tap));
        Ok(Wire { file, device, tap, inheritance: Some(inheritance.clone()) })
    }

    /// Sets the device up. Attach its programs first: the host's network stack would process its frames.
    ///
    /// # Errors
    /// The device is gone.
    pub fn raise(&self) -> io::Result<()> {
        raise(DEVICE, MTU, None)
    }

    /// Reads a frame that came up: virtio-net header, head, frame.
    ///
    /// # Errors
    /// As `read`; `EAGAIN` if no frame is waiting.
    pub fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(room)
    }

    /// Sends a trial to `remote`. One that cannot be sent counts as lost.
    pub fn try_out(&self, remote: Ipv4Addr) {
        let _ = self.send(&trial(), remote, 0);
    }

    /// Sends a frame of `network`, with complete checksums, to `remote`.
    ///
    /// # Errors
    /// As `write`.
    pub fn send(&self, frame: &[u8], remote: Ipv4Addr, network: u32) -> io::Result<()> {
        self.send_as(frame, WireTail { remote: remote.to_bits(), network, underlay: 0, next_hop: 0 })
    }

    /// Sends the IP packet of a frame by a device of the underlay, without a tunnel. One that cannot be sent counts as lost.
    pub fn send_bare(&self, frame: &[u8], underlay: u32, next_hop: Option<Ipv4Addr>) {
        let next_hop = next_hop.map_or(0, Ipv4Addr::to_bits);
        let _ = self.send_as(frame, WireTail { remote: 0, network: 0, underlay, next_hop });
    }

    fn send_as(&self, frame: &[u8], tail: WireTail) -> io::Result<()> {
        let tail = tail.bytes();
        let parts = [IoSlice::new(&[0; VIRTIO_NET_HDR_LEN]), IoSlice::new(frame), IoSlice::new(&tail)];
        // The TAP takes a frame whole or not at all.
        (&self.file).write_vectored(&parts).map(drop)
    }

    /// The TAP's descriptor, readable while frames are waiting.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// Removes the device of a vnetd that has died. The TAP shows that a vnetd uses the device.
pub(crate) fn remove_dead() {
    if tap::device_index(TAP).is_none() && tap::device_index(DEVICE).is_some() {
        let _ = remove(DEVICE);
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if self.inheritance.as_ref().is_none_or(|inheritance| inheritance.is_settled()) {
            let _ = remove(DEVICE);
        }
    }
}

/// A trial. The source is a valid station address, the destination is zero.
fn trial() -> [u8; TRIAL_LEN] {
    let mut frame = [0; TRIAL_LEN];
    frame[6] = 2;
    frame[12..14].copy_from_slice(&TRIAL_TYPE);
    frame
}

/// True if a frame of network 0 is a trial: no station has a zero address.
pub fn is_trial(frame: &[u8]) -> bool {
    frame.starts_with(&[0; 6]) && frame.get(12..14) == Some(&TRIAL_TYPE)
}

/// Index of the VXLAN device of a vnetd that has died, if it has the properties that [`make`] sets.
fn adopt(port: u16) -> Option<u32> {
    let link = netlink::link(tap::device_index(DEVICE)?).ok()?;
    let infos = link.attributes.iter().filter_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(infos) => Some(infos),
        _ => None,
    });
    let vxlan = infos.flatten().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(vxlan)) => Some(vxlan),
        _ => None,
    })?;
    let is_ours = [InfoVxlan::CollectMetadata(true), InfoVxlan::Port(port), InfoVxlan::UDPZeroCsumRX(true)]
        .iter()
        .all(|wanted| vxlan.contains(wanted));
    is_ours.then_some(link.header.index)
}

/// Creates the VXLAN device, in place of an existing one. Returns its index.
fn make(port: u16) -> io::Result<u32> {
    if tap::device_index(DEVICE).is_some() {
        remove(DEVICE)?;
    }
    let vxlan = vec![
        InfoVxlan::CollectMetadata(true),
        InfoVxlan::Learning(false),
        InfoVxlan::Port(port),
        InfoVxlan::UDPZeroCsumRX(true),
    ];
    let info = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(InfoData::Vxlan(vxlan))];
    let mut request = LinkMessage::default();
    request.attributes = vec![
        LinkAttribute::IfName(DEVICE.into()),
        LinkAttribute::Mtu(MTU as u32),
        LinkAttribute::LinkInfo(info),
    ];
    Netlink::new()?.change(RouteNetlinkMessage::NewLink(request), NLM_F_CREATE | NLM_F_EXCL)?;
    tap::device_index(DEVICE).ok_or_else(io::Error::last_os_error)
}

/// Sets the TAP's queue length.
fn lengthen_queue(tap: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = tap;
    link.attributes.push(LinkAttribute::TxQueueLen(QUEUE_LEN));
    Netlink::new()?.change(RouteNetlinkMessage::SetLink(link), 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_no_stations_frame() {
        let mut frame = trial();
        assert_eq!(frame[12..14], [0x88, 0xb5]);
        assert!(is_trial(&frame));
        frame[0] = 2;
        assert!(!is_trial(&frame), "a station's");
        assert!(!is_trial(&[0; TRIAL_LEN]) && !is_trial(&[0; 12]));
    }
}
