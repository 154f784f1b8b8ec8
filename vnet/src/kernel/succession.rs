//! What one vnetd leaves to the next: after its death by pins alone, in a take-over while both run.
//!
//! In a take-over, both vnetds have the same maps, and their programs are of the same version, so it does not matter whose run at a device.
//! The heir changes no flow before its first setup; from then on, only flows of its own are followed.

use std::collections;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::pins::{PinOptions, Pins};
use super::{Kernel, KernelError};
use crate::loader::{OBJECT, Pin};

impl Kernel {
    /// Loads the programs on the maps of the running vnetd, which hands over the `lock` of its pins, and whether it has `mounted` their file
    /// system. Until the first setup, both vnetds use the same maps.
    ///
    /// # Errors
    /// As the variants of [`KernelError`]; the running vnetd has other programs.
    pub fn inherit(pins: &PinOptions, lock: OwnedFd, mounted: bool) -> Result<Arc<Kernel>, KernelError> {
        let pins = Pins::inherit(pins, OBJECT, lock, mounted);
        let kernel = Kernel::load_at(Ok(pins.map_err(|error| KernelError::Load(error.to_string()))?))?;
        // The pins are the running vnetd's until this one has taken over.
        kernel.leave();
        Ok(kernel)
    }

    /// The lock of the pins, and whether this vnetd has mounted their file system.
    ///
    /// # Errors
    /// The reason why nothing is pinned: the next vnetd cannot take over the kernel path.
    pub fn lock(&self) -> Result<(BorrowedFd<'_>, bool), &str> {
        self.pins.as_ref().map(Pins::lock).map_err(String::as_str)
    }

    /// Takes the pins for its own, which [`Kernel::inherit`] has left to the running vnetd.
    pub fn own(&self) {
        self.left.store(false, Ordering::Relaxed);
    }

    /// True if the maps contain the flows of a vnetd that has died.
    pub fn is_adopted(&self) -> bool {
        self.pins.as_ref().is_ok_and(|pins| pins.adopted)
    }

    /// Checks that the next vnetd can adopt flows when this one dies.
    ///
    /// # Errors
    /// The reason why it cannot, in one line.
    pub fn adoptable(&self) -> Result<(), &str> {
        self.pins.as_ref().map(drop).map_err(String::as_str)
    }

    /// Leaves pinned objects for the next vnetd when the last reference to this is dropped.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }

    /// Detaches programs from devices of a vnetd that has died and that are not attached again, and lists these devices. Devices of
    /// the underlay are not listed: they are not vnetd's own.
    pub fn forget_unclaimed(&self) -> collections::HashSet<u32> {
        let underlay = std::mem::take(&mut *self.unclaimed_underlay.lock());
        if let Ok(pins) = &self.pins {
            underlay.iter().for_each(|device| _ = std::fs::remove_file(pins.link(Pin::Underlay, *device)));
        }
        let unclaimed = std::mem::take(&mut *self.unclaimed.lock());
        let mut ports = self.ports.lock();
        for device in &unclaimed {
            // Either entry is absent if that vnetd died while it attached or detached.
            let _ = ports.remove(device);
            if let Ok(pins) = &self.pins {
                let _ = std::fs::remove_file(pins.link(Pin::Link, *device));
            }
        }
        unclaimed
    }
}

/// Removes the pinned objects of a vnetd that has died, and lists its devices.
pub(crate) fn forget(options: &PinOptions) -> Vec<u32> {
    if !options.exist() {
        return vec![];
    }
    let Ok(pins) = Pins::open(options, OBJECT) else { return vec![] };
    let devices = pins.devices();
    pins.remove();
    devices
}
