//! Constants and descriptors of split virtqueues (virtio 1.2 section 2.7).

/// The chain continues at `next` (`VIRTQ_DESC_F_NEXT`).
pub const DESC_NEXT: u16 = 1;
/// The device writes the buffer (`VIRTQ_DESC_F_WRITE`).
pub const DESC_WRITE: u16 = 2;
/// The buffer is a table of descriptors (`VIRTQ_DESC_F_INDIRECT`).
pub const DESC_INDIRECT: u16 = 4;
/// `avail.flags`: the driver wants no interrupts (`VIRTQ_AVAIL_F_NO_INTERRUPT`).
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// `used.flags`: the device wants no notifications (`VIRTQ_USED_F_NO_NOTIFY`).
pub const USED_NO_NOTIFY: u16 = 1;
/// Maximum queue size in entries (virtio 1.2 section 2.7).
pub const QUEUE_SIZE_MAX: u16 = 32_768;

// Rings are little endian (virtio 1.2 section 2.7) and accessed without byte swapping.
const _: () = assert!(cfg!(target_endian = "little"), "virtqueues are implemented for little-endian hosts");

/// A descriptor as in guest memory (virtio 1.2 section 2.7.5).
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// `DESC_*` bits.
    pub flags: u16,
    /// Index of the next descriptor if [`DESC_NEXT`] is set.
    pub next: u16,
}

impl Descriptor {
    /// Size of a descriptor in bytes.
    pub const SIZE: usize = 16;

    /// Copies entry `index` of the descriptor table at `table`, reading it once.
    ///
    /// # Safety
    /// `table` must be readable for `(index + 1) * 16` bytes. The guest may write to it concurrently.
    #[inline]
    pub(super) unsafe fn fetch(table: *const u8, index: u16) -> Descriptor {
        /// Two unaligned words: indirect tables may start at any address.
        #[repr(C, packed)]
        struct Words(u64, u64);
        // SAFETY: the caller promises that the entry is in bounds; the packed type needs no alignment; a volatile read happens
        // exactly once, so that the copy that is checked is the copy that is used.
        let Words(addr, rest) =
            unsafe { table.add(usize::from(index) * Descriptor::SIZE).cast::<Words>().read_volatile() };
        Descriptor { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}
