//! Detects guest memory that a front end maps privately.
//!
//! A front end passes the file behind its guest's memory. If it maps that file privately itself (QEMU without share=on), the
//! guest writes to private copies of the pages, and the rings always look empty to vnetd. The front end's list of mappings shows it,
//! which the helper may read.

use std::fs::File;

use crate::helper;

/// Note of the interface for this case.
pub(super) const NOTE: &str = "the VM keeps its memory private, so that none of its frames arrives: start QEMU with \
                               -object memory-backend-memfd,share=on";

/// True if process `pid` certainly maps one of `files` only privately.
pub(super) fn maps_privately(pid: i32, files: &[File]) -> bool {
    files.iter().any(|file| helper::maps_privately(pid, file) == Some(true))
}
