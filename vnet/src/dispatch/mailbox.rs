//! Mail from one thread to another, which looks for it once a round without a lock.

use super::sync::{AtomicBool, Mutex, Ordering};

/// A thread's mail, until it takes it.
pub(super) struct Mailbox<T> {
    /// True when there is mail.
    waiting: AtomicBool,
    mail: Mutex<T>,
}

impl<T: Default> Mailbox<T> {
    pub(super) fn new() -> Mailbox<T> {
        Mailbox { waiting: AtomicBool::new(false), mail: Mutex::new(T::default()) }
    }

    /// Adds to the mail. The caller wakes the thread afterwards.
    pub(super) fn add(&self, add: impl FnOnce(&mut T)) {
        let mut mail = self.mail.lock();
        add(&mut mail);
        self.waiting.store(true, Ordering::Release);
    }

    /// True when there is mail.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Takes the mail.
    pub(super) fn take(&self) -> T {
        let mut mail = self.mail.lock();
        self.waiting.store(false, Ordering::Relaxed);
        std::mem::take(&mut *mail)
    }
}
