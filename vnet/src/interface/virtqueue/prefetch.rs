//! Cache prefetches of guest memory. A prefetch never faults, so any address may be given.

/// Prefetches the cache line at `address` in exclusive state, for a write. Reading a line first and writing it later would cost
/// two transfers, because the guest's processor also holds it.
#[inline(always)]
pub(super) fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, allowed on any address; x86-64 processors without PREFETCHW execute it as a NOP.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line at `address` for reading.
#[inline(always)]
pub(super) fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, allowed on any address; SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast())
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
