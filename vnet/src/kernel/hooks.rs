//! Programs at devices: tcx links, pinned or not, and filters. `netkit.rs` attaches those of netkit pairs.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use aya::programs::links::{FdLink, LinkOrder, PinnedLink};
use aya::programs::tc::{NlOptions, SchedClassifierLink, TcAttachOptions, TcHandle, qdisc_add_clsact};
use aya::programs::{SchedClassifier, TcAttachType};

use super::{KernelError, in_one_line};

/// Priority and handle of filters. They are constant, so that a filter replaces that of a vnetd that has died.
const FILTER: (u16, TcHandle) = (1, TcHandle::new(0, 1));

/// A program at a device. Dropping detaches it.
pub(super) enum Hook {
    /// By the link's file.
    Pinned(PathBuf),
    Held {
        _link: SchedClassifierLink,
    },
    /// Of a netkit pair.
    HeldByPair {
        _link: OwnedFd,
    },
}

impl Drop for Hook {
    fn drop(&mut self) {
        if let Hook::Pinned(pin) = self {
            // Absent if the whole folder was removed.
            let _ = std::fs::remove_file(pin);
        }
    }
}

/// Replaces the program of a pinned link, between two frames.
fn replace(program: &mut SchedClassifier, pin: &Path) -> Result<(), KernelError> {
    let fail = |error: &dyn std::error::Error| KernelError::Load(in_one_line(error));
    let link = PinnedLink::from_pin(pin).map_err(|error| fail(&error))?;
    let link = SchedClassifierLink::try_from(FdLink::from(link)).map_err(|error| fail(&error))?;
    let id = program.attach_to_link(link)?;
    // The pin keeps the link alive without this descriptor.
    drop(program.take_link(id)?);
    Ok(())
}

/// Attaches a program by a tcx link, which outlives vnetd with a pin. The link comes before filters, and among other links by
/// `order`.
pub(super) fn attach_link(
    program: &mut SchedClassifier,
    device: &str,
    pin: Option<PathBuf>,
    order: LinkOrder,
) -> Result<Hook, KernelError> {
    if let Some(pin) = &pin
        && replace(program, pin).is_ok()
    {
        return Ok(Hook::Pinned(pin.clone()));
    }
    let options = TcAttachOptions::TcxOrder(order);
    let id = program.attach_with_options(device, TcAttachType::Ingress, options)?;
    let link = program.take_link(id)?;
    let Some(pin) = pin else { return Ok(Hook::Held { _link: link }) };
    // The file may exist for a device that is gone.
    let _ = std::fs::remove_file(&pin);
    let fail = |error: &dyn std::error::Error| KernelError::Load(in_one_line(error));
    FdLink::try_from(link).map_err(|error| fail(&error))?.pin(&pin).map_err(|error| fail(&error))?;
    Ok(Hook::Pinned(pin))
}

/// Attaches a program as a filter of the device's clsact qdisc, which outlives vnetd without a pin.
pub(super) fn attach_filter(program: &mut SchedClassifier, device: &str) -> Result<Hook, KernelError> {
    let (priority, handle) = FILTER;
    // The qdisc may exist from a vnetd that has died. Without it, attaching fails with the reason.
    let _ = qdisc_add_clsact(device);
    let options = TcAttachOptions::Netlink(NlOptions { priority, handle, classid: None });
    let id = program.attach_with_options(device, TcAttachType::Ingress, options).or_else(|error| {
        let there = SchedClassifierLink::attached(device, TcAttachType::Ingress, priority, handle, None);
        there.map_or(Err(error), |there| program.attach_to_link(there))
    })?;
    Ok(Hook::Held { _link: program.take_link(id)? })
}
