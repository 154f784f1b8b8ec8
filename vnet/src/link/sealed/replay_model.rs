//! Loom model of [`replay`]: of all dispatchers that mark a number, one succeeds.

use loom::sync::Arc;
use loom::thread;

use crate::alone;
use crate::loomed::explore;

#[allow(clippy::duplicate_mod, dead_code, reason = "the real code, with loom's types")]
#[path = "replay.rs"]
mod replay;
mod sync {
    pub(super) use loom::sync::atomic::AtomicU64;
    pub(super) use loom::sync::atomic::Ordering::Relaxed;
}
use replay::{BLOCK_BITS, ReplayWindow, SLOTS};

/// Two dispatchers mark these numbers; returns how often each was accepted.
fn mark(numbers: [[u64; 2]; 2]) -> impl Fn(u64) -> usize {
    let window = Arc::new(ReplayWindow::new());
    let run =
        |window: Arc<ReplayWindow>, numbers: [u64; 2]| move || numbers.map(|number| window.mark(number));
    let other = thread::spawn(run(window.clone(), numbers[1]));
    let mine = run(window, numbers[0])();
    let accepted = [mine, other.join().unwrap()];
    move |wanted| {
        let pairs = numbers.as_flattened().iter().zip(accepted.as_flattened());
        pairs.filter(|(number, accepted)| **number == wanted && **accepted).count()
    }
}

#[test]
fn concurrent_marks_accept_a_number_once() {
    alone("link::sealed::replay_model::concurrent_marks_accept_a_number_once", || {
        // A copy of each datagram arrives at each dispatcher, in one block.
        explore(3, || {
            let accepted = mark([[17, 18], [18, 17]]);
            assert_eq!((accepted(17), accepted(18)), (1, 1));
        });
        // A newer block takes the slot meanwhile: the older number may be too late, but never passes twice.
        explore(3, || {
            let newer = 17 + (SLOTS << BLOCK_BITS);
            let accepted = mark([[17, newer], [newer, 17]]);
            assert!(accepted(17) <= 1);
            assert_eq!(accepted(newer), 1);
        });
    });
}
