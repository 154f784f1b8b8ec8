//! Privilege separation: vnetd keeps the capabilities that its data plane needs, its helper ([`vnet::helper`]) all that vnetd was started
//! with. vnetd drops the others before it reads a foreign byte, and cannot regain them (`no_new_privs`, no execve).

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use vnet::helper;
use vnet::kernel::maps_need_cap_bpf;

use crate::confine;

/// Capabilities that vnetd keeps, if it has them: for devices and addresses; real-time priority; locked memory; owners of sockets; ports
/// below 1024. Only the helper loads programs and opens packet sockets.
const KEPT: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// What vnetd keeps on this kernel: before Linux 5.19 also what bpf(2) takes for maps that the helper has made.
fn kept() -> CapabilitySet {
    if maps_need_cap_bpf() { KEPT | CapabilitySet::BPF } else { KEPT }
}

/// Starts the helper, drops the other capabilities, and confines this process. Call it before any thread starts.
///
/// # Errors
/// The helper cannot be started.
pub fn separate() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot start vnetd's privileged helper: {error}");
    helper::start(Command::new("/proc/self/exe").arg0("vnetd").arg("--helper")).map_err(failed)?;
    let drop_others = || {
        let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
        let (inheritable, kept) = (CapabilitySet::empty(), kept());
        set_capabilities(
            None,
            CapabilitySets { effective: effective & kept, permitted: permitted & kept, inheritable },
        )
    };
    drop_others().map_err(|error| format!("cannot drop capabilities that only the helper needs: {error}"))?;
    confine::begin(confine::Who::Vnetd);
    Ok(())
}

/// Serves vnetd's requests on standard input until vnetd ends. Ignores SIGTERM, which systemd sends to all processes of the unit: vnetd
/// needs the helper until its end.
///
/// # Errors
/// Standard input cannot be used.
pub fn run_helper() -> std::io::Result<()> {
    rustix::thread::set_name(c"vnetd-helper")?;
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    confine::begin(confine::Who::Helper);
    helper::serve(&std::io::stdin().as_fd().try_clone_to_owned()?);
    Ok(())
}
