//! Listening on a port that a vnetd which is just dying still holds.
//!
//! A killed process is gone for its parent before the kernel has closed its last socket: stopping its rings and devices takes up to
//! a tenth of a second.

use std::io;
use std::time::{Duration, Instant};

/// How long a port in use is waited for, and the pause between two attempts.
const WAIT_MAX: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// Repeats `bind` for up to two seconds while the port is in use.
///
/// # Errors
/// The error of the last attempt.
pub fn until_free<T>(bind: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    until(bind, |error| error.kind() == io::ErrorKind::AddrInUse)
}

/// Repeats `attempt` for up to two seconds while its error `passes`.
///
/// # Errors
/// The error of the last attempt.
pub(crate) fn until<T, E>(
    mut attempt: impl FnMut() -> Result<T, E>,
    passes: impl Fn(&E) -> bool,
) -> Result<T, E> {
    let deadline = Instant::now() + WAIT_MAX;
    loop {
        match attempt() {
            Err(error) if passes(&error) && Instant::now() < deadline => std::thread::sleep(PAUSE),
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_errors_are_not_waited_for() {
        let mut attempts = 0;
        let refused = until_free(|| {
            attempts += 1;
            Err::<(), _>(io::Error::from(io::ErrorKind::PermissionDenied))
        });
        assert!(refused.is_err() && attempts == 1);
    }
}
