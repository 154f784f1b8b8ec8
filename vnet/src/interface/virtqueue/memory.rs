//! Guest memory: maps the regions that a front end shares and translates addresses into pointers.
//!
//! A [`GuestMemory`] is an immutable sorted table. A change (SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG) builds a new table that
//! shares the remaining regions. Queues hold the table by `Arc`, so a mapping lives as long as pointers into it are used. There
//! are two kinds of addresses: guest physical ones in descriptors, and addresses in the front end's own address space (*user*
//! addresses) by which vhost-user locates the rings.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::FileType;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::sigbus::{REGION_LEN_MAX, Registration};

/// Maximum number of regions of one guest; reported as the number of memory slots (GET_MAX_MEM_SLOTS).
pub const REGIONS_MAX: usize = 64;

/// A region as the front end describes it, untrusted until [`Region::map`] has checked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// First guest physical address.
    pub guest_addr: u64,
    /// First address in the front end's own address space.
    pub user_addr: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of the region in its file, in bytes.
    pub offset: u64,
}

/// Error for memory that vnetd refuses.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The range is empty, larger than 1 TiB, or its end overflows 64 bits.
    #[error("memory region at guest address {0:#x} is empty, overflows, or is larger than 1 TiB")]
    BadRange(u64),
    /// The file ends before the region.
    #[error(
        "memory region at guest address {guest_addr:#x} wants bytes up to {end:#x} of a file of {size:#x} bytes; the \
         VM's memory must be a shared file, as in QEMU's memory-backend-memfd,share=on"
    )]
    FileTooSmall {
        /// The region's first guest physical address.
        guest_addr: u64,
        /// End of the region in its file, in bytes.
        end: u64,
        /// Size of the file in bytes.
        size: u64,
    },
    /// The file descriptor is a device, pipe or socket.
    #[error("memory region at guest address {0:#x} is not a file or memfd")]
    NotAFile(u64),
    /// The file lies on a file system whose pages may be missing or slow to access.
    #[error(
        "memory region at guest address {0:#x} is a file on a disk or network; let the VM's memory be a memfd, as in QEMU's \
         memory-backend-memfd,share=on, or a file in /dev/shm or hugetlbfs"
    )]
    NotMemory(u64),
    /// Two regions contain the same address.
    #[error("memory regions overlap at guest address {0:#x}")]
    Overlap(u64),
    /// There are more regions than [`REGIONS_MAX`].
    #[error("more than {REGIONS_MAX} memory regions")]
    TooMany,
    /// The kernel refused to map the region.
    #[error("cannot map the memory region at guest address {guest_addr:#x}: {source}")]
    Map {
        /// The region's first guest physical address.
        guest_addr: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A mapped region; unmapped when its last owner drops it.
#[derive(Debug)]
pub struct Region {
    spec: RegionSpec,
    /// Pointer to the first byte of the region. The mapping may start before it, aligned to the file's block size.
    host: *mut u8,
    mapping: *mut u8,
    mapping_len: usize,
    /// Size in bytes of the pages that the kernel maps: of hugetlbfs, the huge pages'.
    page_len: u64,
    /// The file behind the region, for another vnetd that takes over.
    file: OwnedFd,
    /// `None` only during construction and drop.
    registration: Option<Registration>,
}

// SAFETY: the pointers lead to memory that stays mapped until the region is dropped, and code that dereferences them treats the
// memory as concurrently written by the guest. The region itself is immutable.
unsafe impl Send for Region {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Region {}

impl Region {
    /// Checks `spec` against the file and maps it readable and writable.
    ///
    /// # Errors
    /// The region is invalid, or the kernel cannot map it.
    pub fn map(spec: RegionSpec, file: &File) -> Result<Arc<Region>, MemoryError> {
        let guest_addr = spec.guest_addr;
        let fits = spec.len != 0
            && spec.len <= REGION_LEN_MAX
            && guest_addr.checked_add(spec.len).is_some()
            && spec.user_addr.checked_add(spec.len).is_some();
        let end =
            spec.offset.checked_add(spec.len).filter(|_| fits).ok_or(MemoryError::BadRange(guest_addr))?;
        let map_error = |source: rustix::io::Errno| MemoryError::Map { guest_addr, source: source.into() };

        let copy = file.as_fd().try_clone_to_owned();
        let copy = copy.map_err(|source| MemoryError::Map { guest_addr, source })?;
        let stat = rustix::fs::fstat(file).map_err(map_error)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(MemoryError::NotAFile(guest_addr));
        }
        // vnetd's threads touch these pages: a file system on a disk, on a network or in a process could make them wait forever.
        let kind = rustix::fs::fstatfs(file).map_err(map_error)?.f_type;
        if ![libc::TMPFS_MAGIC, libc::HUGETLBFS_MAGIC].contains(&kind) {
            return Err(MemoryError::NotMemory(guest_addr));
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if end > size {
            return Err(MemoryError::FileTooSmall { guest_addr, end, size });
        }

        // hugetlbfs maps whole huge pages and reports their size as its block size.
        let block = u64::try_from(stat.st_blksize).unwrap_or(4096).max(4096);
        let block = if block.is_power_of_two() { block } else { 4096 };
        let before = spec.offset % block;
        let mapping_len = usize::try_from((before + spec.len).next_multiple_of(block))
            .map_err(|_| MemoryError::BadRange(guest_addr))?;
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address chosen by the kernel overlaps no existing one.
        let mapping = unsafe {
            mmap(std::ptr::null_mut(), mapping_len, prot, flags, file.as_fd(), spec.offset - before)
        }
        .map_err(map_error)?
        .cast::<u8>();
        // From here on, dropping `region` unmaps the memory.
        let host = mapping.wrapping_add(before as usize);
        let page_len = if kind == libc::HUGETLBFS_MAGIC { block } else { 4096 };
        let mut region =
            Region { spec, host, mapping, mapping_len, page_len, file: copy, registration: None };
        let registration = Registration::new(mapping as usize, mapping_len);
        region.registration = Some(registration.map_err(|source| MemoryError::Map { guest_addr, source })?);
        Ok(Arc::new(region))
    }

    /// The file behind the region.
    pub(in crate::interface) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The region as the front end described it.
    pub fn spec(&self) -> &RegionSpec {
        &self.spec
    }

    /// Pointer to the first byte of the region, mapped for `spec().len` bytes as long as the region lives.
    #[inline]
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// Size in bytes of the pages of the mapping.
    pub(super) fn page_len(&self) -> u64 {
        self.page_len
    }

    /// True once the region's file was truncated under the mapping.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.registration.as_ref().is_some_and(Registration::is_poisoned)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        #[cfg(test)]
        unmapping::tell(&self.spec);
        // Unregister before unmapping: the signal handler must never replace pages that another mapping may reuse.
        self.registration = None;
        // SAFETY: the region owns the mapping; its last owner is gone, so no pointer into it is used any more.
        if let Err(error) = unsafe { munmap(self.mapping.cast(), self.mapping_len) } {
            tracing::warn!(%error, "cannot unmap guest memory");
        }
    }
}

/// Lets a test look on while a region is about to be unmapped.
#[cfg(test)]
pub(crate) mod unmapping {
    use super::RegionSpec;

    type Witness = Box<dyn Fn(&RegionSpec) + Send>;
    static WITNESSES: parking_lot::Mutex<Vec<Witness>> = parking_lot::Mutex::new(vec![]);

    /// Calls `witness` for each region of the process that is unmapped from now on.
    pub(crate) fn watch(witness: impl Fn(&RegionSpec) + Send + 'static) {
        WITNESSES.lock().push(Box::new(witness));
    }

    pub(super) fn tell(spec: &RegionSpec) {
        WITNESSES.lock().iter().for_each(|witness| witness(spec));
    }
}

/// One row of the translation table: a region's guest physical range and its mapping.
#[derive(Clone, Copy, Debug)]
struct Row {
    guest_addr: u64,
    len: u64,
    host: *mut u8,
}

impl Row {
    /// A row that contains no address.
    const EMPTY: Row = Row { guest_addr: 0, len: 0, host: std::ptr::null_mut() };

    #[inline]
    fn translate(&self, addr: u64, len: u64) -> Option<*mut u8> {
        // An address below the row wraps to an offset beyond its end, because guest_addr + len does not overflow.
        let offset = addr.wrapping_sub(self.guest_addr);
        (offset < self.len && len <= self.len - offset).then(|| self.host.wrapping_add(offset as usize))
    }
}

/// Index of the first of `ranges` (start and length, sorted by start, no end overflows) that begins before the one before it ends.
fn first_overlap(ranges: impl Iterator<Item = (u64, u64)>) -> Option<usize> {
    let mut end = 0;
    ranges.enumerate().find_map(|(index, (start, len))| {
        let overlaps = start < end;
        end = start + len;
        overlaps.then_some(index)
    })
}

/// The memory of one guest: regions sorted by guest physical address.
#[derive(Debug, Default)]
pub struct GuestMemory {
    rows: Vec<Row>,
    regions: Vec<Arc<Region>>,
}

// SAFETY: the pointers in `rows` lead to memory of `regions`, which are Send and Sync.
unsafe impl Send for GuestMemory {}
// SAFETY: as above; the table is immutable.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// Builds a table of `regions`, given in any order.
    ///
    /// # Errors
    /// [`MemoryError::TooMany`] or [`MemoryError::Overlap`].
    pub fn new(mut regions: Vec<Arc<Region>>) -> Result<GuestMemory, MemoryError> {
        if regions.len() > REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        for key in [|s: &RegionSpec| s.user_addr, |s: &RegionSpec| s.guest_addr] {
            regions.sort_by_key(|r| key(&r.spec));
            // No overflow: `Region::map` checked both ends.
            let ranges = regions.iter().map(|r| (key(&r.spec), r.spec.len));
            if let Some(index) = first_overlap(ranges) {
                return Err(MemoryError::Overlap(regions[index].spec.guest_addr));
            }
        }
        let rows = regions.iter();
        let rows =
            rows.map(|r| Row { guest_addr: r.spec.guest_addr, len: r.spec.len, host: r.host }).collect();
        Ok(GuestMemory { rows, regions })
    }

    /// The regions, sorted by guest physical address.
    pub fn regions(&self) -> &[Arc<Region>] {
        &self.regions
    }

    /// Translates guest physical address `addr`. `None` unless all `len` bytes from there lie inside one mapping.
    #[inline]
    pub fn translate(&self, addr: u64, len: usize) -> Option<*mut u8> {
        self.row(addr).and_then(|row| row.translate(addr, len as u64))
    }

    /// The region that contains all `len` bytes from guest physical address `addr`, and a pointer to the first.
    pub(super) fn locate(&self, addr: u64, len: u64) -> Option<(&Arc<Region>, *mut u8)> {
        let after = self.rows.partition_point(|row| row.guest_addr <= addr).checked_sub(1)?;
        // Rows are in the order of the regions.
        Some((self.regions.get(after)?, self.rows[after].translate(addr, len)?))
    }

    /// Like [`GuestMemory::translate`], for an address in the front end's own address space.
    pub fn translate_user(&self, addr: u64, len: usize) -> Option<*mut u8> {
        self.regions.iter().find_map(|region| {
            let row = Row { guest_addr: region.spec.user_addr, len: region.spec.len, host: region.host };
            row.translate(addr, len as u64)
        })
    }

    /// The guest physical address of a pointer that this table returned.
    pub fn guest_addr(&self, pointer: *const u8) -> Option<u64> {
        self.rows.iter().find_map(|row| {
            let offset = (pointer as u64).wrapping_sub(row.host as u64);
            (offset < row.len).then(|| row.guest_addr + offset)
        })
    }

    /// True once any region's file was truncated under its mapping: data read from this memory may be substituted zeros.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|region| region.is_poisoned())
    }

    #[inline]
    fn row(&self, addr: u64) -> Option<&Row> {
        let after = self.rows.partition_point(|row| row.guest_addr <= addr);
        self.rows.get(after.checked_sub(1)?)
    }
}

/// A [`GuestMemory`] that caches the row of the last address, which nearly always contains the next one.
#[derive(Debug)]
pub struct Translator {
    memory: Arc<GuestMemory>,
    last: Row,
}

// SAFETY: the pointer in `last` leads to memory of `memory`, which is Send.
unsafe impl Send for Translator {}

impl Translator {
    /// A translator that keeps `memory` mapped.
    pub fn new(memory: Arc<GuestMemory>) -> Translator {
        Translator { memory, last: Row::EMPTY }
    }

    /// See [`GuestMemory::translate`].
    #[inline]
    pub fn translate(&mut self, addr: u64, len: usize) -> Option<*mut u8> {
        if let Some(pointer) = self.last.translate(addr, len as u64) {
            return Some(pointer);
        }
        let row = *self.memory.row(addr)?;
        let pointer = row.translate(addr, len as u64)?;
        self.last = row;
        Some(pointer)
    }

    /// The memory.
    #[inline]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }
}

#[cfg(any(test, kani))]
#[path = "memory_proofs.rs"]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    fn memfd(len: u64) -> File {
        let file = memfd_create("vnet-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, len).unwrap();
        File::from(file)
    }

    fn spec(guest_addr: u64, len: u64, offset: u64) -> RegionSpec {
        RegionSpec { guest_addr, user_addr: guest_addr + 0x7000_0000_0000, len, offset }
    }

    #[test]
    fn translates_only_ranges_inside_one_mapping() {
        let file = memfd(0x6000);
        let low = Region::map(spec(0, 0x3000, 0), &file).unwrap();
        let high = Region::map(spec(0x3000, 0x3000, 0x3000), &file).unwrap();
        let memory = Arc::new(GuestMemory::new(vec![high, low]).unwrap());
        let mut translator = Translator::new(memory.clone());
        for (addr, len, inside) in [
            (0, 0x3000, true),
            (0, 0x3001, false),
            (0x2fff, 1, true),
            (0x2fff, 2, false),
            (0x3000, 0x3000, true),
            (0x5fff, 1, true),
            (0x6000, 1, false),
            (0x5000, usize::MAX, false),
            (u64::MAX, 1, false),
            (u64::MAX, usize::MAX, false),
        ] {
            let pointer = memory.translate(addr, len);
            assert_eq!(pointer.is_some(), inside, "{addr:#x}+{len:#x}");
            assert_eq!(translator.translate(addr, len), pointer, "{addr:#x}+{len:#x}");
            assert_eq!(memory.translate_user(addr.wrapping_add(0x7000_0000_0000), len), pointer);
            if let Some(pointer) = pointer {
                assert_eq!(memory.guest_addr(pointer), Some(addr));
            }
        }
        assert_eq!(GuestMemory::default().translate(0, 1), None);
    }

    #[test]
    fn file_offsets_need_not_be_page_aligned() {
        let file = memfd(0x4000);
        rustix::io::pwrite(&file, b"here", 0x1800).unwrap();
        let region = Region::map(spec(0x8000, 0x1000, 0x1800), &file).unwrap();
        let memory = GuestMemory::new(vec![region]).unwrap();
        let pointer = memory.translate(0x8000, 4).unwrap();
        // SAFETY: `translate` returned a pointer to four mapped bytes, and no code writes to them.
        assert_eq!(unsafe { std::slice::from_raw_parts(pointer, 4) }, b"here");
    }

    #[test]
    fn refuses_small_files_and_address_overflow() {
        let file = memfd(0x2000);
        let map = |s| Region::map(s, &file).map(drop);
        assert!(matches!(map(spec(0, 0x2001, 0)), Err(MemoryError::FileTooSmall { end: 0x2001, .. })));
        assert!(matches!(map(spec(0, 0x2000, 1)), Err(MemoryError::FileTooSmall { .. })));
        assert!(matches!(map(spec(0, 0x1000, u64::MAX - 0xfff)), Err(MemoryError::BadRange(0))));
        assert!(matches!(map(spec(0, 0, 0)), Err(MemoryError::BadRange(0))));
        let high = RegionSpec { user_addr: 0, ..spec(0, 0x1000, 0) };
        assert!(map(RegionSpec { guest_addr: u64::MAX - 0xffe, ..high }).is_err());
        assert!(map(RegionSpec { user_addr: u64::MAX - 0xffe, ..high }).is_err());
        let pipe = rustix::pipe::pipe().unwrap().0;
        assert!(matches!(Region::map(spec(0, 1, 0), &File::from(pipe)), Err(MemoryError::NotAFile(0))));
    }

    #[test]
    fn refuses_files_that_are_not_memory() {
        // Uses a source file, because sources lie on a disk and /tmp may not.
        let file = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).unwrap();
        let error = Region::map(spec(0, 1, 0), &file).map(drop).unwrap_err();
        assert!(matches!(error, MemoryError::NotMemory(0)), "{error}");
        assert!(error.to_string().contains("memory-backend-memfd,share=on"), "{error}");
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(0x1000).unwrap();
        assert!(Region::map(spec(0, 0x1000, 0), &file).is_ok());
    }

    #[test]
    fn refuses_overlapping_regions() {
        let file = memfd(0x2000);
        let region = |s| Region::map(s, &file).unwrap();
        let overlap =
            GuestMemory::new(vec![region(spec(0x1000, 0x1000, 0)), region(spec(0x1fff, 0x1000, 0))]);
        assert!(matches!(overlap, Err(MemoryError::Overlap(0x1fff))));
        let user = RegionSpec { guest_addr: 0x9000, ..spec(0x1fff, 0x1000, 0) };
        assert!(GuestMemory::new(vec![region(spec(0x1000, 0x1000, 0)), region(user)]).is_err());
        let many = (0..65).map(|i| region(spec(i * 0x1000, 0x1000, 0))).collect();
        assert!(matches!(GuestMemory::new(many), Err(MemoryError::TooMany)));
    }

    #[test]
    fn a_truncated_file_poisons_only_its_region() {
        let (file, other) = (memfd(0x4000), memfd(0x4000));
        let region = Region::map(spec(0, 0x4000, 0), &file).unwrap();
        let healthy = GuestMemory::new(vec![Region::map(spec(0, 0x4000, 0), &other).unwrap()]).unwrap();
        let memory = GuestMemory::new(vec![region]).unwrap();
        let pointer = memory.translate(0x2000, 1).unwrap();
        // SAFETY: `translate` returned a pointer to a mapped byte; no other code uses this memory.
        unsafe { pointer.write_volatile(7) };
        assert!(!memory.is_poisoned());
        ftruncate(&file, 0x1000).unwrap();
        // SAFETY: the mapping still exists; the signal handler replaces its missing pages.
        assert_eq!(unsafe { pointer.read_volatile() }, 0);
        // SAFETY: as for the read above.
        unsafe { pointer.write_volatile(9) };
        assert!(memory.is_poisoned());
        assert!(!healthy.is_poisoned());
        drop(memory);
        // The new region reuses the slot, which is no longer poisoned.
        let again = GuestMemory::new(vec![Region::map(spec(0, 0x4000, 0), &other).unwrap()]).unwrap();
        assert!(!again.is_poisoned());
    }

    /// A thread that reads zeros from the replacement of a truncated file also sees that the region is poisoned, whichever thread
    /// took the fault.
    #[test]
    fn no_reader_takes_replaced_pages_for_clean_ones() {
        for _ in 0..200 {
            let file = memfd(0x2000);
            let memory = GuestMemory::new(vec![Region::map(spec(0, 0x2000, 0), &file).unwrap()]).unwrap();
            let pointer = memory.translate(0x1000, 1).unwrap() as usize;
            // SAFETY: `translate` returned a pointer to a mapped byte.
            unsafe { (pointer as *mut u8).write_volatile(7) };
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        // SAFETY: the mapping lives as long as `memory`; the signal handler replaces its missing pages.
                        while unsafe { (pointer as *const u8).read_volatile() } == 7 {}
                        assert!(memory.is_poisoned(), "zeros were read as if the guest had written them");
                    });
                }
                ftruncate(&file, 0x1000).unwrap();
            });
        }
    }

    /// A front end truncates its guest's memory while vnetd copies from it; another guest's memory stays as it is, and the copy
    /// ends. 10^5 times with VNET_TEST_TRUNCATIONS=100000.
    #[test]
    fn files_that_are_truncated_during_a_copy_affect_no_other_memory() {
        const LEN: usize = 0x8000;
        let times = std::env::var("VNET_TEST_TRUNCATIONS").map_or(5_000, |text| text.parse().unwrap());
        let (sender, files) = std::sync::mpsc::sync_channel::<File>(0);
        let truncating =
            std::thread::spawn(move || files.iter().for_each(|file| ftruncate(&file, 0x1000).unwrap()));
        let other = memfd(2 * LEN as u64);
        let healthy =
            GuestMemory::new(vec![Region::map(spec(0, 2 * LEN as u64, 0), &other).unwrap()]).unwrap();
        let (buffer, kept) =
            (healthy.translate(0, LEN).unwrap(), healthy.translate(LEN as u64, LEN).unwrap());
        // SAFETY: `translate` returned a pointer to `LEN` mapped bytes.
        unsafe { kept.write_bytes(0x5a, LEN) };
        for _ in 0..times {
            let file = memfd(LEN as u64);
            let memory = GuestMemory::new(vec![Region::map(spec(0, LEN as u64, 0), &file).unwrap()]).unwrap();
            let guest = memory.translate(0, LEN).unwrap();
            sender.send(file).unwrap();
            while !memory.is_poisoned() {
                // SAFETY: both ranges have `LEN` mapped bytes, in two mappings; the signal handler replaces missing pages.
                unsafe { crate::copy::copy(guest, buffer, LEN) };
            }
        }
        drop(sender);
        truncating.join().unwrap();
        assert!(!healthy.is_poisoned());
        // SAFETY: as above.
        assert!(unsafe { std::slice::from_raw_parts(kept, LEN) }.iter().all(|byte| *byte == 0x5a));
    }

    #[test]
    fn sigbus_outside_guest_memory_still_kills() {
        let file = memfd(0x1000);
        // Mapping a region installs the handler.
        let _region = Region::map(spec(0, 0x1000, 0), &file).unwrap();
        let foreign = memfd(0x1000);
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at an address chosen by the kernel overlaps no existing one.
        let page = unsafe { mmap(std::ptr::null_mut(), 0x1000, prot, flags, &foreign, 0) }.unwrap();
        ftruncate(&foreign, 0).unwrap();
        // SAFETY: the child only reads memory and exits; both are allowed between fork and exec.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the page is mapped; reading it raises SIGBUS, which ends the child.
            unsafe {
                page.cast::<u8>().read_volatile();
                libc::_exit(0);
            }
        }
        let mut status = 0;
        // SAFETY: `child` is a child of this process and `status` is writable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "status {status:#x}");
        // SAFETY: mapped above; no pointer into it remains.
        unsafe { munmap(page, 0x1000) }.unwrap();
    }
}
