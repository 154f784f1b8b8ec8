//! The part of the C interface that polls and waits.

use std::ffi::c_int;
use std::time::Duration;

use crate::attached::Endpoint;
use crate::c_api::{code, invalid};
use crate::c_types::CCompletion;
use crate::proto::Completion;

/// Sleeps until there may be completions to take.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_pause(endpoint: *mut Endpoint, timeout_ms: u32) {
    // SAFETY: the caller guarantees that the pointer is null or open.
    if let Some(endpoint) = unsafe { endpoint.as_ref() } {
        endpoint.pause(Duration::from_millis(timeout_ms.into()));
    }
}

/// Returns a descriptor to wait on.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_descriptor(endpoint: *mut Endpoint) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = (unsafe { endpoint.as_ref() }) else { return invalid("no endpoint") };
    endpoint.descriptor().unwrap_or_else(|error| code(&error))
}

/// Wakes a thread that sleeps on the endpoint.
///
/// # Safety
/// `endpoint` is null or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_wake(endpoint: *mut Endpoint) {
    // SAFETY: the caller guarantees that the pointer is null or open.
    if let Some(endpoint) = unsafe { endpoint.as_ref() } {
        endpoint.wake();
    }
}

/// Takes completions.
///
/// # Safety
/// `endpoint` is null or open; `completions` has room for `max` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_poll(
    endpoint: *mut Endpoint,
    completions: *mut CCompletion,
    max: c_int,
) -> c_int {
    // SAFETY: the caller guarantees valid pointers and memory.
    unsafe { vnet_rdma_wait(endpoint, completions, max, 0) }
}

/// Waits for completions.
///
/// # Safety
/// `endpoint` is null or open; `completions` has room for `max` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_wait(
    endpoint: *mut Endpoint,
    completions: *mut CCompletion,
    max: c_int,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = unsafe { endpoint.as_ref() }.filter(|_| !completions.is_null() && max > 0) else {
        return invalid("no endpoint, or no place for completions");
    };
    let first = match u64::try_from(timeout_ms) {
        Ok(0) => endpoint.poll(),
        Ok(timeout) => endpoint.wait(Some(Duration::from_millis(timeout))),
        Err(_) => endpoint.wait(None),
    };
    // SAFETY: the caller guarantees room for `max` completions.
    unsafe { fill(completions, max, first, || endpoint.take()) }
}

/// Takes completions, except the arrivals of peers' writes.
///
/// # Safety
/// `endpoint` is null or open; `completions` has room for `max` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vnet_rdma_poll_own(
    endpoint: *mut Endpoint,
    completions: *mut CCompletion,
    max: c_int,
) -> c_int {
    // SAFETY: the caller guarantees that the pointer is null or open.
    let Some(endpoint) = unsafe { endpoint.as_ref() }.filter(|_| !completions.is_null() && max > 0) else {
        return invalid("no endpoint, or no place for completions");
    };
    // SAFETY: the caller guarantees room for `max` completions.
    unsafe { fill(completions, max, endpoint.poll_own(), || endpoint.poll_own()) }
}

/// Writes completions to C, and returns their number.
///
/// # Safety
/// `completions` has room for `max` completions, and `max` is positive.
unsafe fn fill(
    completions: *mut CCompletion,
    max: c_int,
    first: Option<Completion>,
    mut take: impl FnMut() -> Option<Completion>,
) -> c_int {
    let (mut next, mut count) = (first, 0);
    while let Some(completion) = next {
        // SAFETY: `count` is below `max`, and the caller guarantees room for `max` completions.
        unsafe { completions.add(count as usize).write(completion.into()) };
        count += 1;
        next = if count < max { take() } else { None };
    }
    count
}
