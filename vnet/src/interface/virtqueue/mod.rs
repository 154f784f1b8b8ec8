//! Virtqueues over the mapped memory of a hostile guest (virtio 1.2 section 2.7, split format).
//!
//! How it works, in the order in which a chain meets it:
//!
//! 1. [`memory`] maps what the front end shares and turns guest addresses into pointers: a range is inside one mapping or
//!    refused. [`sigbus`] keeps a file truncated under its mapping from taking the daemon down.
//! 2. [`split`] reads the available ring in bursts, copies each descriptor once and then checks the copy, and gives chains
//!    back strictly in the order in which they came.
//! 3. [`net`] turns chains into frames of a [`Batch`](crate::frame::Batch), and frames into filled chains (section 5.1.6).
//!
//! What the guest may do wrong is of two kinds. A [`RingError`] means that the ring itself cannot be trusted any more: the
//! queue is disabled until the guest resets it. A [`ChainError`] spoils one chain, which is given back unused.
//!
//! Nothing here waits, allocates per frame, or loops on a number that the guest chose.

mod chain;
pub mod dirty;
pub mod memory;
pub mod net;
pub mod sigbus;
pub mod split;

#[cfg(any(test, feature = "test-util"))]
pub mod fuzz;
#[cfg(any(test, feature = "test-util"))]
pub mod mock;
#[cfg(test)]
mod tests;

pub use chain::{Buffer, CHAIN_MAX, ChainError};
pub use split::{Ring, RingConfig, RingError};

/// The descriptor continues in `next` (`VIRTQ_DESC_F_NEXT`).
pub const DESC_NEXT: u16 = 1;
/// The device writes the buffer (`VIRTQ_DESC_F_WRITE`).
pub const DESC_WRITE: u16 = 2;
/// The buffer is a table of descriptors (`VIRTQ_DESC_F_INDIRECT`).
pub const DESC_INDIRECT: u16 = 4;
/// `avail.flags`: the driver wants no interrupts (`VIRTQ_AVAIL_F_NO_INTERRUPT`).
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// `used.flags`: the device wants no notifications (`VIRTQ_USED_F_NO_NOTIFY`).
pub const USED_NO_NOTIFY: u16 = 1;
/// Largest queue size (virtio 1.2 section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 32_768;

// The rings are little endian (virtio 1.2 section 2.7) and read as they are.
const _: () = assert!(cfg!(target_endian = "little"), "virtqueues are implemented for little-endian hosts");

/// A descriptor as it stands in guest memory (virtio 1.2 section 2.7.5).
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest physical address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// `DESC_*` bits.
    pub flags: u16,
    /// Next descriptor, when [`DESC_NEXT`] is set.
    pub next: u16,
}

impl Descriptor {
    /// Bytes of one descriptor.
    pub const SIZE: usize = 16;

    /// Copies entry `index` of the table at `table`, once.
    ///
    /// # Safety
    /// `table` must be readable for `(index + 1) * 16` bytes. Others may write to it at the same time.
    #[inline]
    unsafe fn fetch(table: *const u8, index: u16) -> Descriptor {
        /// Two words without alignment: indirect tables may lie anywhere.
        #[repr(C, packed)]
        struct Words(u64, u64);
        // SAFETY: in bounds by the caller's promise; the type has no alignment; a volatile read happens exactly once, so
        // that what is checked is what is used.
        let Words(addr, rest) =
            unsafe { table.add(usize::from(index) * Descriptor::SIZE).cast::<Words>().read_volatile() };
        Descriptor { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

/// Asks the processor to own the line at `address` soon, to write to it. A line that is only read first has to be asked for
/// twice: the guest's processor has it too. Any address is fine: a prefetch never faults.
#[inline(always)]
fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, allowed on any address; processors of x86-64 without PREFETCHW take it for a NOP.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Asks the processor to have the line at `address` in its cache soon. Any address is fine: a prefetch never faults.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, allowed on any address; SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
