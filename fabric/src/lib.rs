//! The libfabric provider `vnet`.
//!
//! libfabric defines its provider interface as structures and inline functions in C headers, so the provider is written in C. Each
//! kind of object has one source file, which calls the C interface of [`vnet_rdma`]. This crate links the C files and `vnet_rdma`
//! into one shared object. docs/interconnect.md describes how MPI programs use the provider.

use std::ffi::c_void;

/// This re-export makes the linker keep `vnet_rdma`, which only the C files call.
pub use vnet_rdma::Node;

unsafe extern "C" {
    fn vnet_fi_provider() -> *mut c_void;
}

/// Entry point that libfabric calls after it loads the provider. Returns a pointer to the `struct fi_provider`.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut c_void {
    // SAFETY: the C function has no precondition: it only returns the address of a static structure.
    unsafe { vnet_fi_provider() }
}
