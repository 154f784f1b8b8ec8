//! Settings of the nodes that a C program opens.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::node::Options;

static TIMEOUT_MS: AtomicU32 = AtomicU32::new(60_000);
static OWN_MEMORY: AtomicBool = AtomicBool::new(true);

/// Sets the deadline of operations.
#[unsafe(no_mangle)]
pub extern "C" fn vnet_rdma_set_timeout(timeout_ms: u32) {
    TIMEOUT_MS.store(timeout_ms, Ordering::Relaxed);
}

/// Sets whether the program registers memory of its own.
#[unsafe(no_mangle)]
pub extern "C" fn vnet_rdma_set_own_memory(is_registered: c_int) {
    OWN_MEMORY.store(is_registered != 0, Ordering::Relaxed);
}

/// Applies what the program has set.
pub(crate) fn apply(options: &mut Options) {
    let timeout_ms = TIMEOUT_MS.load(Ordering::Relaxed);
    options.config.operation_timeout_ns = u64::from(timeout_ms) * 1_000_000;
    if timeout_ms == 0 {
        options.config.not_ready_ns = 0;
    }
    options.own_memory = OWN_MEMORY.load(Ordering::Relaxed);
}
