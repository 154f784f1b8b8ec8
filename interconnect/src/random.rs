//! Random bytes from the kernel.

use std::io;

/// Returns random bytes.
pub(crate) fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0u8; 32];
    // SAFETY: the kernel writes at most as many bytes into `bytes` as it has.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}
