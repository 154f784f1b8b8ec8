//! Registered memory that the library owns, for applications without `unsafe`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::attached::Endpoint;
use crate::node::Error;
use crate::node::pages::Pages;
use crate::proto::{Access, Key, Span};

/// Bytes that peers and the owner may access concurrently. Copies are bytewise; each byte is read or written atomically.
pub struct Region {
    bytes: Arc<Pages>,
    key: Key,
}

impl Region {
    /// Registers `len` bytes of new zeroed memory. Processes that are forked share it.
    pub fn new(endpoint: &Endpoint, len: usize, access: Access) -> Result<Self, Error> {
        let (bytes, key) = endpoint.allocate(len, access)?;
        Ok(Self { bytes, key })
    }

    /// Key by which peers address the region.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns a span of the region from `offset`, for an operation of the endpoint with which the region was registered.
    pub fn span(&self, offset: usize, len: usize) -> Result<Span, Error> {
        // The node holds a reference to the bytes until it is closed, so they outlive all its operations.
        self.bytes.span().part(offset as u64, len as u64).ok_or(Error::Range(
            offset,
            offset.saturating_add(len),
            self.len(),
        ))
    }

    /// Copies bytes into the region.
    pub fn fill(&self, offset: usize, from: &[u8]) -> Result<(), Error> {
        let end = offset.saturating_add(from.len());
        let to = self.bytes.get(offset..end).ok_or(Error::Range(offset, end, self.len()))?;
        to.iter().zip(from).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        Ok(())
    }

    /// Copies bytes out of the region.
    pub fn copy_to(&self, offset: usize, to: &mut [u8]) -> Result<(), Error> {
        let end = offset.saturating_add(to.len());
        let from = self.bytes.get(offset..end).ok_or(Error::Range(offset, end, self.len()))?;
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
        Ok(())
    }
}
