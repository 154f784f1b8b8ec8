//! Proofs over a bounded domain: a property is a function of [`Choices`], and holds for every combination of them.
//!
//! As a test, [`prove`] enumerates the combinations, one run of the property for each. Under Kani (`cfg(kani)`) every choice is a
//! symbolic value, and the model checker covers the same domain in one run. `make test` takes the quick bound of each domain, `make
//! proof` (`VNET_PROOF=1`) the full one; docs/proofs.md lists them.

/// The choices of one run.
pub(crate) struct Choices {
    /// Each choice made so far, and of how many.
    #[cfg(not(kani))]
    made: Vec<(u64, u64)>,
    #[cfg(not(kani))]
    at: usize,
}

#[cfg(not(kani))]
impl Choices {
    /// Any number below `count`, which must not be 0.
    pub(crate) fn below(&mut self, count: u64) -> u64 {
        assert_ne!(count, 0, "a choice among nothing");
        if self.at == self.made.len() {
            self.made.push((0, count));
        }
        let (choice, known) = self.made[self.at];
        assert_eq!(known, count, "a property depends on more than its choices");
        self.at += 1;
        choice
    }

    /// Advances to the next combination. Returns false after the last one.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((choice, count)) = self.made.pop() {
            if choice + 1 < count {
                self.made.push((choice + 1, count));
                return true;
            }
        }
        false
    }
}

#[cfg(kani)]
impl Choices {
    /// Any number below `count`, which must not be 0.
    pub(crate) fn below(&mut self, count: u64) -> u64 {
        let choice: u64 = kani::any();
        kani::assume(choice < count);
        choice
    }
}

impl Choices {
    /// Either.
    pub(crate) fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    /// Any of `values`.
    pub(crate) fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}

/// Names the combination if the property fails.
#[cfg(not(kani))]
impl Drop for Choices {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("fails for these choices (number, of how many): {:?}", self.made);
        }
    }
}

/// Runs `property` for every combination of its choices. Returns the number of combinations.
#[cfg(not(kani))]
pub(crate) fn prove(mut property: impl FnMut(&mut Choices)) -> u64 {
    let mut choices = Choices { made: vec![], at: 0 };
    let mut runs = 0;
    loop {
        property(&mut choices);
        assert_eq!(choices.at, choices.made.len(), "a property depends on more than its choices");
        runs += 1;
        if !choices.advance() {
            println!("{runs} combinations");
            return runs;
        }
    }
}

/// Runs `property` once, with symbolic choices.
#[cfg(kani)]
pub(crate) fn prove(mut property: impl FnMut(&mut Choices)) -> u64 {
    property(&mut Choices {});
    1
}

/// The bound of a domain: `full` for `make proof` and for Kani, else `quick`.
pub(crate) fn bound<T>(quick: T, full: T) -> T {
    if cfg!(kani) || std::env::var_os("VNET_PROOF").is_some_and(|value| value == "1") { full } else { quick }
}

/// Declares proofs: tests, or harnesses of Kani.
macro_rules! proofs {
    ($($(#[$attribute:meta])* $name:ident: $property:expr;)*) => {$(
        $(#[$attribute])*
        #[cfg_attr(not(kani), test)]
        #[cfg_attr(kani, kani::proof)]
        fn $name() {
            crate::proof::prove($property);
        }
    )*};
}
pub(crate) use proofs;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_combination_once() {
        let mut seen = HashSet::new();
        let runs = prove(|choices| {
            let count = choices.below(3);
            let numbers: Vec<u64> = (0..count).map(|_| choices.below(4)).collect();
            assert!(seen.insert(numbers));
        });
        assert_eq!(runs, 1 + 4 + 16);
        assert_eq!(seen.len(), 21);
    }

    #[test]
    fn a_rare_failure_is_found() {
        let property = |choices: &mut Choices| assert!((0..4).any(|_| choices.below(5) != 4));
        assert!(std::panic::catch_unwind(|| prove(property)).is_err());
    }
}
