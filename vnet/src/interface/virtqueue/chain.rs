//! Descriptor chains (virtio 1.2 section 2.7.5): walks a chain from its head and returns a list of checked buffers.
//!
//! Each descriptor is copied once and only the copy is used. A walk ends after [`CHAIN_MAX`] descriptors, which also ends loops.

use super::layout::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};
use super::memory::Translator;

/// Maximum number of descriptors in one chain, including those of its indirect table.
pub const CHAIN_MAX: usize = 256;

/// A buffer in guest memory, inside one mapping.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Pointer to the first byte.
    pub ptr: *mut u8,
    /// Length in bytes, never 0.
    pub len: usize,
}

// SAFETY: a pointer and a length have no thread affinity; code that dereferences the pointer keeps the mapping alive through the
// queue's memory.
unsafe impl Send for Buffer {}

/// Reason why a chain was returned unused. The ring itself stays usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// More than [`CHAIN_MAX`] descriptors, or a loop.
    #[error("descriptor chain has more than {CHAIN_MAX} descriptors or loops")]
    TooLong,
    /// `next` lies outside the table.
    #[error("descriptor chain leaves its table")]
    Index,
    /// A buffer does not lie inside one mapping.
    #[error("descriptor address lies outside guest memory")]
    Address,
    /// A device-readable descriptor follows a device-writable one.
    #[error("readable descriptor behind a writable one")]
    Order,
    /// An indirect table in an indirect table, or an indirect descriptor that continues.
    #[error("indirect descriptor is nested or chained on")]
    Nested,
    /// An indirect table that is empty, too long, or not a whole number of descriptors.
    #[error("indirect table has a bad length")]
    TableLength,
    /// INDIRECT_DESC was not negotiated.
    #[error("indirect descriptor without VIRTIO_F_INDIRECT_DESC")]
    NotNegotiated,
}

/// A descriptor table: the queue's, or an indirect one.
pub(super) struct DescriptorTable {
    /// Pointer to the first descriptor, mapped for `size` descriptors.
    pub(super) base: *const u8,
    /// Number of descriptors.
    pub(super) size: u16,
    /// True if VIRTIO_F_INDIRECT_DESC was negotiated.
    pub(super) indirect: bool,
}

/// Appends the buffers of the chain that begins with `first` to `buffers`, readable ones before writable ones, and returns the
/// number of readable ones. Buffers of length zero are skipped and their addresses ignored. On error `buffers` is unchanged.
#[inline]
pub(super) fn walk(
    table: DescriptorTable,
    first: Descriptor,
    translator: &mut Translator,
    buffers: &mut Vec<Buffer>,
) -> Result<usize, ChainError> {
    let before = buffers.len();
    let result = walk_descriptors(table, first, translator, buffers);
    if result.is_err() {
        buffers.truncate(before);
    }
    result
}

fn walk_descriptors(
    mut table: DescriptorTable,
    first: Descriptor,
    translator: &mut Translator,
    buffers: &mut Vec<Buffer>,
) -> Result<usize, ChainError> {
    let mut in_table = false;
    let (mut readable, mut writable) = (0, false);
    let mut descriptor = first;
    for _ in 0..CHAIN_MAX {
        let Descriptor { addr, len, flags, next } = descriptor;
        if flags & DESC_INDIRECT != 0 {
            table = indirect_table(&table, descriptor, in_table, translator)?;
            in_table = true;
            // SAFETY: `indirect_table` translated at least one descriptor.
            descriptor = unsafe { Descriptor::fetch(table.base, 0) };
            continue;
        }
        if flags & DESC_WRITE != 0 {
            writable = true;
        } else if writable {
            return Err(ChainError::Order);
        }
        if len != 0 {
            let ptr = translator.translate(addr, len as usize).ok_or(ChainError::Address)?;
            buffers.push(Buffer { ptr, len: len as usize });
            readable += usize::from(!writable);
        }
        if flags & DESC_NEXT == 0 {
            return Ok(readable);
        }
        if next >= table.size {
            return Err(ChainError::Index);
        }
        // SAFETY: `next` is an index into the table, which is mapped for `size` descriptors.
        descriptor = unsafe { Descriptor::fetch(table.base, next) };
    }
    Err(ChainError::TooLong)
}

/// Checks an indirect descriptor and returns its table (virtio 1.2 section 2.7.5.3). Its WRITE flag is ignored.
#[inline]
fn indirect_table(
    table: &DescriptorTable,
    descriptor: Descriptor,
    in_table: bool,
    translator: &mut Translator,
) -> Result<DescriptorTable, ChainError> {
    if !table.indirect {
        return Err(ChainError::NotNegotiated);
    }
    if in_table || descriptor.flags & DESC_NEXT != 0 {
        return Err(ChainError::Nested);
    }
    let len = descriptor.len as usize;
    let size = len / Descriptor::SIZE;
    if size == 0 || size > CHAIN_MAX || !len.is_multiple_of(Descriptor::SIZE) {
        return Err(ChainError::TableLength);
    }
    let base = translator.translate(descriptor.addr, len).ok_or(ChainError::Address)?;
    Ok(DescriptorTable { base, size: size as u16, indirect: true })
}

#[cfg(any(test, kani))]
#[path = "chain_proofs.rs"]
mod proofs;
