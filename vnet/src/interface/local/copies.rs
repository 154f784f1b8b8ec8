//! Copies of a LAN's frames, if the kernel forwards known flows at its device by itself.
//!
//! A packet socket at a device receives frames before the device's programs see them, and so also frames that the kernel forwards:
//! they would take both ways. So the packet socket listens at a TAP instead, where the program `from_lan` sends a copy of each
//! other frame. Nothing is written to the TAP, and its own program keeps its frames from the host's network stack.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::packet::{self, LocalError};
use crate::interface::device;
use crate::interface::tap::{self, TapOptions};

/// The TAP for the copies of a device's frames.
pub(super) struct Copies {
    /// Name and index of the TAP.
    pub(super) tap: (String, u32),
    /// Receives the copies.
    pub(super) socket: OwnedFd,
    /// The TAP is removed with its last descriptor.
    _queues: Vec<File>,
}

impl Copies {
    /// Creates the TAP for the device of number `index`, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel cannot forward frames of the device, or refused a step.
    pub(super) fn open(device: &str, index: libc::c_int) -> Result<Copies, LocalError> {
        // One name for each device, so that two vnetd processes cannot both forward its frames.
        let options = TapOptions {
            device: format!("vnetl{index:x}"),
            netns: None,
            mac: None,
            mac_before: None,
            mtu: tap::TAP_MTU_MAX,
            queues: 1,
            silent: true,
        };
        let (queues, ..) =
            tap::open_queues(&options).map_err(|error| LocalError::NoKernelPath(error.to_string()))?;
        let name = options.device;
        let tap_index = tap::device_index(&name).unwrap_or(0);
        let socket = packet::listen(&name, tap_index as libc::c_int)?;
        if device::merges_frames(&socket, device).is_ok_and(|merges| merges) {
            let hint = format!("its device merges TCP frames (LRO): 'ethtool -K {device} lro off'");
            return Err(LocalError::NoKernelPath(hint));
        }
        Ok(Copies { tap: (name, tap_index), socket, _queues: queues })
    }
}
