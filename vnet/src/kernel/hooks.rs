//! Programs at devices: by links, pinned or not, and by filters. `loader/` attaches them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use aya::programs::tc::SchedClassifierLink;

/// A program at a device. Dropping detaches it.
pub(super) enum Hook {
    /// By the link's file.
    Pinned(PathBuf),
    /// By the link.
    Held {
        _link: OwnedFd,
    },
    Filter {
        _filter: SchedClassifierLink,
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
