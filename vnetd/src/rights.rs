//! Two processes, two sets of rights: vnetd keeps what its data plane needs, its helper ([`vnet::helper`]) all that vnetd was started
//! with. vnetd parts with the rest before it reads a foreign byte; no program that it might start would get it back (`no_new_privs`).

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use vnet::helper;

use crate::confine;

/// What vnetd keeps, of what it has: devices and their addresses; packet sockets; programs and maps of the kernel's own path, whose memory
/// Linux 5.10 limits; the threads' priority; locked memory; owners of sockets; ports below 1024.
const KEPT: CapabilitySet = CapabilitySet::NET_ADMIN
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    .union(CapabilitySet::SYS_RESOURCE)
    .union(CapabilitySet::SYS_NICE)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::NET_BIND_SERVICE);

/// Starts the helper, gives up the other rights, and confines this process. Call it before any thread starts.
///
/// # Errors
/// The helper cannot be started.
pub fn part() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("cannot start vnetd's privileged helper: {error}");
    helper::start(Command::new("/proc/self/exe").arg0("vnetd").arg("--helper")).map_err(failed)?;
    let give_up = || {
        let CapabilitySets { effective, permitted, .. } = capabilities(None)?;
        let inheritable = CapabilitySet::empty();
        set_capabilities(
            None,
            CapabilitySets { effective: effective & KEPT, permitted: permitted & KEPT, inheritable },
        )
    };
    give_up().map_err(|error| format!("cannot give up rights that only the helper needs: {error}"))?;
    confine::begin(confine::Who::Vnetd);
    Ok(())
}

/// The helper, on standard input, until vnetd ends: a service manager that stops both by a signal lets vnetd end first.
///
/// # Errors
/// Standard input cannot be used.
pub fn help() -> std::io::Result<()> {
    rustix::thread::set_name(c"vnetd-helper")?;
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    confine::begin(confine::Who::Helper);
    helper::serve(&std::io::stdin().as_fd().try_clone_to_owned()?);
    Ok(())
}
