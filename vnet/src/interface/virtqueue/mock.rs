//! The driver side of a virtqueue in a memfd, for tests and fuzz targets: a correct driver, with raw access to break the rules.

use std::fs::File;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, memfd_create};

use super::layout::{DESC_NEXT, Descriptor};
use super::memory::{GuestMemory, Region, RegionSpec};
use super::split::RingConfig;

/// Offset of user addresses from guest physical addresses.
pub const USER_BASE: u64 = 0x7f00_0000_0000;
/// First guest physical address; not 0, so that a zero address is invalid.
pub const GUEST_BASE: u64 = 0x1000;

/// Guest memory of one memfd region. The mock guest accesses it by system calls, the device through a mapping.
#[derive(Debug)]
pub struct MockMemory {
    file: File,
    len: u64,
}

impl MockMemory {
    /// Creates `len` bytes of zeros at [`GUEST_BASE`].
    ///
    /// # Panics
    /// If the system has no memory; this is a test helper.
    pub fn new(len: u64) -> MockMemory {
        let file = File::from(memfd_create("vnet-mock", MemfdFlags::CLOEXEC).expect("memfd"));
        file.set_len(len).expect("memory");
        MockMemory { file, len }
    }

    /// The memfd.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The only region.
    pub fn spec(&self) -> RegionSpec {
        RegionSpec { guest_addr: GUEST_BASE, user_addr: USER_BASE + GUEST_BASE, len: self.len, offset: 0 }
    }

    /// Maps the memory as a device does.
    ///
    /// # Panics
    /// If it cannot be mapped; this is a test helper.
    pub fn map(&self) -> Arc<GuestMemory> {
        let region = Region::map(self.spec(), &self.file).expect("region");
        Arc::new(GuestMemory::new(vec![region]).expect("memory"))
    }

    /// Writes guest memory.
    ///
    /// # Panics
    /// If the range lies outside guest memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        assert!(
            addr >= GUEST_BASE && addr + bytes.len() as u64 <= GUEST_BASE + self.len,
            "address {addr:#x}"
        );
        assert_eq!(rustix::io::pwrite(&self.file, bytes, addr - GUEST_BASE), Ok(bytes.len()));
    }

    /// Reads guest memory.
    ///
    /// # Panics
    /// If the range lies outside guest memory.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(rustix::io::pread(&self.file, &mut bytes, addr - GUEST_BASE), Ok(len));
        bytes
    }

    fn read_u16(&self, addr: u64) -> u16 {
        let bytes = self.read(addr, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }
}

/// The driver's side of one split virtqueue, laid out at `base`: descriptor table, available ring, used ring.
#[derive(Debug)]
pub struct MockRing {
    /// Queue size.
    pub size: u16,
    /// Guest physical address of the descriptor table.
    pub base: u64,
    /// Next available index of the driver.
    pub avail_idx: u16,
    /// Index of the next used entry to collect.
    pub used_idx: u16,
    /// Free descriptors.
    pub free: Vec<u16>,
    chains: Vec<Vec<u16>>,
}

impl MockRing {
    /// An empty ring of `size` entries at `base`, both indices at `start`.
    pub fn new(memory: &MockMemory, base: u64, size: u16, start: u16) -> MockRing {
        let ring = MockRing {
            size,
            base,
            avail_idx: start,
            used_idx: start,
            free: (0..size).rev().collect(),
            chains: vec![vec![]; usize::from(size)],
        };
        memory.write(ring.avail() + 2, &start.to_le_bytes());
        memory.write(ring.used() + 2, &start.to_le_bytes());
        ring
    }

    /// Size in bytes of a ring of `size` entries.
    pub fn bytes(size: u16) -> u64 {
        let size = u64::from(size);
        16 * size + (6 + 2 * size).next_multiple_of(4) + 6 + 8 * size
    }

    /// Guest physical address of the available ring.
    pub fn avail(&self) -> u64 {
        self.base + 16 * u64::from(self.size)
    }

    /// Guest physical address of the used ring.
    pub fn used(&self) -> u64 {
        self.avail() + (6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    /// The device's configuration for this ring.
    pub fn config(&self, event_idx: bool, indirect: bool) -> RingConfig {
        RingConfig {
            size: self.size.into(),
            descriptors: USER_BASE + self.base,
            available: USER_BASE + self.avail(),
            used: USER_BASE + self.used(),
            used_log: None,
            base: self.used_idx,
            event_idx,
            indirect,
        }
    }

    /// Writes descriptor `index` of the table.
    pub fn describe(&self, memory: &MockMemory, index: u16, descriptor: Descriptor) {
        memory.write(self.base + 16 * u64::from(index), &bytes_of(descriptor));
    }

    /// Adds a chain of `buffers` (guest address, length, flags) to the available ring without publishing it. Returns its head, or
    /// `None` if too few descriptors are free.
    pub fn add(&mut self, memory: &MockMemory, buffers: &[(u64, u32, u16)]) -> Option<u16> {
        if self.free.len() < buffers.len() || buffers.is_empty() {
            return None;
        }
        let ids = self.free.split_off(self.free.len() - buffers.len());
        for (i, (addr, len, flags)) in buffers.iter().enumerate() {
            let next = ids.get(i + 1).copied();
            let flags = flags | if next.is_some() { DESC_NEXT } else { 0 };
            let descriptor = Descriptor { addr: *addr, len: *len, flags, next: next.unwrap_or(0) };
            self.describe(memory, ids[i], descriptor);
        }
        let head = ids[0];
        self.offer(memory, head);
        self.chains[usize::from(head)] = ids;
        Some(head)
    }

    /// Adds `head` to the available ring, without any check.
    pub fn offer(&mut self, memory: &MockMemory, head: u16) {
        let slot = u64::from(self.avail_idx % self.size);
        memory.write(self.avail() + 4 + 2 * slot, &head.to_le_bytes());
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// Writes the available index, so that the device sees all chains added so far.
    pub fn publish(&self, memory: &MockMemory) {
        memory.write(self.avail() + 2, &self.avail_idx.to_le_bytes());
    }

    /// Takes the next used entry (head, bytes written) and frees its descriptors.
    pub fn collect(&mut self, memory: &MockMemory) -> Option<(u16, u32)> {
        if memory.read_u16(self.used() + 2) == self.used_idx {
            return None;
        }
        let slot = u64::from(self.used_idx % self.size);
        let entry = memory.read(self.used() + 4 + 8 * slot, 8);
        let id = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        let len = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        self.used_idx = self.used_idx.wrapping_add(1);
        let head = u16::try_from(id).expect("used id");
        let chain = std::mem::take(&mut self.chains[usize::from(head)]);
        self.free.extend(chain);
        Some((head, len))
    }

    /// Requests an interrupt for the time when used entry `event` is written (EVENT_IDX).
    pub fn set_used_event(&self, memory: &MockMemory, event: u16) {
        memory.write(self.avail() + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
    }

    /// The available entry at which the device wants a notification (EVENT_IDX).
    pub fn avail_event(&self, memory: &MockMemory) -> u16 {
        memory.read_u16(self.used() + 4 + 8 * u64::from(self.size))
    }

    /// `used.flags`.
    pub fn used_flags(&self, memory: &MockMemory) -> u16 {
        memory.read_u16(self.used())
    }

    /// Sets `avail.flags`.
    pub fn set_avail_flags(&self, memory: &MockMemory, flags: u16) {
        memory.write(self.avail(), &flags.to_le_bytes());
    }
}

/// A descriptor's bytes in guest memory.
pub fn bytes_of(descriptor: Descriptor) -> [u8; 16] {
    let Descriptor { addr, len, flags, next } = descriptor;
    let words = u128::from(addr) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112;
    words.to_le_bytes()
}
