//! vnet: a layer-2 overlay that connects virtual machines and containers on many hosts as one Ethernet LAN (the VNET model of Xia
//! et al., "Fast VMM-based overlay networking", 2013).
//!
//! This crate is the data plane. In the order in which a frame passes:
//!
//! 1. [`interface`]: a frame leaves a guest (vhost-user, TAP) through a [`source`] and joins a [`frame::Batch`];
//! 2. [`dispatch`]: one loop runs the batch to completion;
//! 3. [`route`]: guard, cache, table and learned addresses decide where each frame goes;
//! 4. [`link`]: the bridge encapsulates it for another host, or
//! 5. [`interface`] again: it is copied straight into the receiving guest's ring.
//!
//! [`wire`] has the formats and does no I/O. [`stats`] counts every dropped frame under exactly one reason. The crate
//! `vnet-control` turns a configuration into a running core; a machine monitor that embeds the data plane can do so itself, with
//! [`dispatch::core::Core`].
//!
//! [`kernel`] forwards known flows between containers inside the kernel, without these steps. [`capture`] copies frames as they
//! pass a port.
//!
//! Dependencies point one way: `dispatch` sees `interface`, `route` and `link`; these three never see each other; `frame` sees
//! only `wire`, and `wire` sees no other room. `tests/structure` checks this.

pub mod capture;
mod copy;
pub mod dispatch;
pub mod frame;
pub mod helper;
pub mod inherit;
pub mod interface;
pub mod kernel;
pub mod link;
pub mod listen;
mod loader;
pub mod log_limit;
#[cfg(test)]
mod loomed;
mod netlink;
pub mod poll;
#[cfg(any(test, kani))]
mod proof;
pub mod route;
mod scratch;
pub mod source;
pub mod stats;
pub mod threads;
pub mod unix;
pub mod wire;

/// Runs `model` in a separate process, where `name` is the only test: loom's coroutines install signal handlers that disturb
/// other tests.
#[cfg(test)]
fn alone(name: &str, model: impl FnOnce()) {
    const ALONE: &str = "VNET_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return model();
    }
    let program = std::env::current_exe().unwrap();
    let child = std::process::Command::new(program).args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(
        child.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&child.stderr)
    );
}
