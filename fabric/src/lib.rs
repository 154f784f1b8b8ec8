//! The libfabric provider `vnet`.
//!
//! Its objects are in C, a file for each kind, on the C interface of [`vnet_rdma`]: libfabric's interface is structures and inline functions
//! of its headers. This crate makes a shared object of both. docs/interconnect.md tells how MPI programs use it.

use std::ffi::c_void;

/// Keeps the library, which only the C files call.
pub use vnet_rdma::Node;

unsafe extern "C" {
    fn vnet_fi_provider() -> *mut c_void;
}

/// What libfabric looks for in a provider: a `struct fi_provider`.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut c_void {
    // SAFETY: the function returns the address of a static structure, and does nothing else.
    unsafe { vnet_fi_provider() }
}
