//! `vnetd --take-over`: takes the place of a running vnetd of this host, under traffic.
//!
//! The running vnetd listens on a socket beside its control socket, `NAME.take-over`, for root and its own user. The conversation is described
//! in [`vnet_control::take_over`]; `channel` carries it, `give` is the running vnetd's side, `take` the new one's.
//!
//! While the new vnetd prepares, frames flow and requests wait. Both sides bound each step. If the new vnetd fails once frames wait,
//! the running one makes sure that it is dead, and goes on.

pub mod background;
mod channel;
pub mod give;
pub mod take;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use vnet::unix::Peer;

/// Names of the control part's descriptors.
pub const CONTROL: &str = "control/socket";
pub const HTTP: &str = "control/http";
pub const CONSOLE: &str = "control/console";
pub const TAKE_OVER: &str = "control/take-over";

/// True if a process is of root or of this process's user: others neither take over nor are taken over.
fn may_take_part(peer: &Peer) -> bool {
    peer.uid == 0 || peer.uid == rustix::process::geteuid().as_raw()
}

/// The socket for take-overs of the vnetd with this control socket.
pub fn socket_of(control: &Path) -> PathBuf {
    let mut name = OsString::from(control);
    name.push(".take-over");
    name.into()
}
