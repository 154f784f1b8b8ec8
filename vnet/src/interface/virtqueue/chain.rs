//! Descriptor chains (virtio 1.2 section 2.7.5): from a head to a list of checked buffers.
//!
//! Each descriptor is copied once and only the copy is looked at. A walk ends after [`CHAIN_MAX`] descriptors, so loops
//! need no detection of their own.

use super::memory::Translator;
use super::{DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};

/// Descriptors of one chain, those of an indirect table included (DESIGN.md section 10).
pub const CHAIN_MAX: usize = 256;

/// A run of guest memory that a descriptor names, inside one mapping.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// First byte.
    pub ptr: *mut u8,
    /// Bytes, never 0.
    pub len: usize,
}

// SAFETY: a pointer and a length; whoever follows the pointer keeps the mapping alive by the queue's memory.
unsafe impl Send for Buffer {}

/// Why a chain was given back unused. The ring itself is fine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// More than [`CHAIN_MAX`] descriptors, or a loop.
    #[error("descriptor chain has more than {CHAIN_MAX} descriptors or loops")]
    TooLong,
    /// `next` lies outside the table.
    #[error("descriptor chain leaves its table")]
    Index,
    /// A buffer is not wholly inside one mapping.
    #[error("descriptor address lies outside guest memory")]
    Address,
    /// A readable descriptor follows a writable one.
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

/// Where a chain starts.
pub(super) struct Table {
    /// The queue's descriptor table, mapped for `size` descriptors.
    pub(super) base: *const u8,
    /// Descriptors in it.
    pub(super) size: u16,
    /// INDIRECT_DESC was negotiated.
    pub(super) indirect: bool,
}

/// Appends the buffers of the chain that begins with `first` to `buffers`, readable ones before writable ones, and returns
/// how many are readable. Buffers of length zero are left out, wherever they point. After an error `buffers` is as before.
#[inline]
pub(super) fn walk(
    table: Table,
    first: Descriptor,
    translator: &mut Translator,
    buffers: &mut Vec<Buffer>,
) -> Result<usize, ChainError> {
    let before = buffers.len();
    let result = walk_on(table, first, translator, buffers);
    if result.is_err() {
        buffers.truncate(before);
    }
    result
}

fn walk_on(
    mut table: Table,
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
            table = enter(&table, descriptor, in_table, translator)?;
            in_table = true;
            // SAFETY: `enter` translated at least one descriptor.
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

/// Checks an indirect descriptor and returns its table (virtio 1.2 section 2.7.5.3). Its WRITE flag means nothing.
#[inline]
fn enter(
    table: &Table,
    descriptor: Descriptor,
    in_table: bool,
    translator: &mut Translator,
) -> Result<Table, ChainError> {
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
    Ok(Table { base, size: size as u16, indirect: true })
}
