//! How another process maps a file, which `/proc/PID/maps` shows to who may trace it (CAP_SYS_PTRACE).

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;

/// Upper bound on the bytes read: 65 530 mappings (`vm.max_map_count`) of about 100 bytes.
const MAPS_MAX: u64 = 8 << 20;

/// `Some(true)` if process `pid` maps `file` only privately, `Some(false)` if it shares the file; `None` if that is unknown.
pub(super) fn maps_privately(pid: i32, file: &File) -> Option<bool> {
    let meta = file.metadata().ok()?;
    let maps = File::open(format!("/proc/{pid}/maps")).ok()?.take(MAPS_MAX);
    judge(BufReader::new(maps), (rustix::fs::major(meta.dev()), rustix::fs::minor(meta.dev())), meta.ino())
}

/// Evaluates the lines of a maps file (proc_pid_maps(5)): `address perms offset dev inode path`.
fn judge(maps: impl BufRead, device: (u32, u32), inode: u64) -> Option<bool> {
    let (device, inode) = (format!("{:02x}:{:02x}", device.0, device.1), inode.to_string());
    let mut private = None;
    for line in maps.lines() {
        let line = line.ok()?;
        let mut words = line.split_ascii_whitespace().skip(1);
        let (Some(perms), Some(_), Some(dev), Some(ino)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        if (dev, ino) == (&*device, &*inode) {
            if perms.ends_with('s') {
                return Some(false);
            }
            private = Some(true);
        }
    }
    private
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    #[test]
    fn only_a_file_that_is_mapped_privately_alone_is_private() {
        let line =
            |perms, inode| format!("7f00-7f10 {perms} 00000000 00:01 {inode}   /memfd:a b (deleted)\n");
        let judge = |text: String| judge(text.as_bytes(), (0, 1), 42);
        assert_eq!(judge(line("rw-p", 42)), Some(true));
        assert_eq!(judge(line("rw-s", 42)), Some(false));
        assert_eq!(judge(line("rw-p", 42) + &line("rw-s", 42)), Some(false));
        assert_eq!(judge(line("rw-p", 43)), None);
        assert_eq!(judge("7f00-7f10 rw-p 00000000 08:01 42 /a\nshort\n".into()), None);
    }

    #[test]
    fn finds_the_mappings_of_a_process() {
        let file = File::from(memfd_create("vnet-private", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 0x1000).unwrap();
        let pid = std::process::id() as i32;
        assert_eq!(maps_privately(pid, &file), None);
        for (flags, private) in [(MapFlags::PRIVATE, true), (MapFlags::SHARED, false)] {
            // SAFETY: a new mapping at an address chosen by the kernel overlaps no existing one; no code uses it.
            let page =
                unsafe { mmap(std::ptr::null_mut(), 0x1000, ProtFlags::READ, flags, &file, 0) }.unwrap();
            assert_eq!(maps_privately(pid, &file), Some(private));
            // SAFETY: mapped above; no pointer into it remains.
            unsafe { munmap(page, 0x1000) }.unwrap();
        }
    }
}
