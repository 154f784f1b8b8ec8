//! Copies of a LAN's frames, if the kernel forwards known flows at its device by itself.
//!
//! A packet socket at a device receives frames before the device's programs see them, and so also frames that the kernel forwards:
//! they would take both ways. So the packet socket listens at a TAP instead, where the program `from_lan` sends a copy of each
//! other frame. Nothing is written to the TAP, and its own program keeps its frames from the host's network stack.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

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
    queues: Vec<File>,
}

/// One name for each device, so that two vnetd processes cannot both forward its frames.
fn name(index: libc::c_int) -> String {
    format!("vnetl{index:x}")
}

impl Copies {
    /// Creates the TAP for the device of number `index`, in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel cannot forward frames of the device, or refused a step.
    pub(super) fn open(device: &str, index: libc::c_int) -> Result<Copies, LocalError> {
        let options = TapOptions {
            device: name(index),
            netns: None,
            mac: None,
            mac_before: None,
            mtu: tap::TAP_MTU_MAX,
            queues: 1,
            silent: true,
            keep: None,
        };
        let opened =
            tap::open_queues(&options).map_err(|error| LocalError::NoKernelPath(error.to_string()))?;
        let name = options.device;
        let tap_index = tap::device_index(&name).unwrap_or(0);
        let socket = packet::listen(&name, tap_index as libc::c_int)?;
        if device::merges_frames(&socket, device).is_ok_and(|merges| merges) {
            let hint = format!("its device merges TCP frames (LRO): 'ethtool -K {device} lro off'");
            return Err(LocalError::NoKernelPath(hint));
        }
        Ok(Copies { tap: (name, tap_index), socket, queues: opened.files })
    }

    /// Those of a running vnetd for the device of number `index`: the TAP, and its packet socket.
    ///
    /// # Errors
    /// The TAP is gone.
    pub(super) fn inherit(index: libc::c_int, [tap, socket]: [OwnedFd; 2]) -> Result<Copies, LocalError> {
        let name = name(index);
        let gone = || LocalError::NoKernelPath(format!("TAP '{name}' is gone"));
        let tap_index = tap::device_index(&name).ok_or_else(gone)?;
        Ok(Copies { tap: (name, tap_index), socket, queues: vec![tap.into()] })
    }

    /// What [`Copies::inherit`] takes.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.queues.iter().map(File::as_fd).chain([self.socket.as_fd()])
    }
}
