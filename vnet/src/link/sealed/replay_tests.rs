use super::replay::{ReplayWindow, SPAN};
use proptest::prelude::*;
use std::collections::HashSet;

proptest! {
    /// Compared with a set: no number is accepted twice, and every new number within the span is accepted.
    #[test]
    fn each_number_once(
        start in prop::sample::select(vec![1u64, 100_000, 1 << 60, (1 << 52) - 5000, u64::MAX - 2_000_000]),
        steps in prop::collection::vec((0u64..600, 0u64..9000), 1..2000),
        leap in 0u64..100_000,
    ) {
        let window = ReplayWindow::new();
        let (mut highest, mut accepted) = (start, HashSet::new());
        for (step, (ahead, back)) in steps.into_iter().enumerate() {
            highest += if step % 700 == 699 { leap } else { ahead };
            for number in [highest, highest.saturating_sub(back).max(start)] {
                let seen = window.has_seen(number);
                let marked = window.mark(number);
                prop_assert_eq!(seen, !marked);
                prop_assert_eq!(window.is_highest(number), number == highest);
                if marked {
                    prop_assert!(accepted.insert(number), "{} was accepted twice", number);
                } else if highest - number < SPAN {
                    prop_assert!(accepted.contains(&number), "{} was refused, {} below", number, highest - number);
                }
            }
        }
    }
}

#[test]
fn numbers_far_below_the_highest_are_refused() {
    let window = ReplayWindow::new();
    let start = 1_700_000_000_000_000_000;
    assert!((start..start + 3 * SPAN).all(|number| number % 1000 == 7 || window.mark(number)));
    let highest = start + 3 * SPAN - 1;
    let late = |number: &u64| number % 1000 == 7;
    for number in (start..highest).filter(late) {
        let below = highest - number;
        if below < SPAN {
            assert!(window.mark(number), "{below} below");
        }
        if below >= SPAN + 16 {
            assert!(!window.mark(number), "{below} below");
        }
        assert!(!window.mark(number));
    }
}

#[test]
fn threads_share_a_window() {
    let window = ReplayWindow::new();
    let accepted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| (1..=4000u64).filter(|number| window.mark(*number)).count()))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(accepted, 4000);
}
