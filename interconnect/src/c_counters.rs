//! Counters for C programs.

use std::ffi::c_int;

use crate::attached::{Endpoint, Node};
use crate::c_api::{code, invalid, remember};
use crate::c_types::{CEndpointCounters, CNodeCounters};

/// Fills in the counters of a node.
///
/// # Safety
/// `node` is null or an open node; `counters` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_counters_of_node(
    node: *const Node,
    counters: *mut CNodeCounters,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(node) = unsafe { node.as_ref() }.filter(|_| !counters.is_null()) else {
        return invalid("no node, or no place for the counters");
    };
    let Some(found) = node.counters() else {
        remember(
            "the host's daemon runs the engine, and does not tell its counters; its metrics have packets",
        );
        return -libc::ENOTSUP;
    };
    // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
    unsafe { counters.write(found.into()) };
    0
}

/// Fills in the counters of an endpoint.
///
/// # Safety
/// `endpoint` is null or open; `counters` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_counters_of_endpoint(
    endpoint: *mut Endpoint,
    counters: *mut CEndpointCounters,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = unsafe { endpoint.as_ref() }.filter(|_| !counters.is_null()) else {
        return invalid("no endpoint, or no place for the counters");
    };
    match endpoint.counters() {
        Ok(found) => {
            // SAFETY: the pointer is not null, and the caller guarantees that it is writable.
            unsafe { counters.write(found.into()) };
            0
        }
        Err(error) => code(&error),
    }
}
