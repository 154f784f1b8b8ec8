//! `vnet interface timeline`: when a guest is notified of what arrives, and when it reacts.

use vnet_control::api::{Timeline, TimelineStep};

use crate::show::TextTable;

/// Explains the table.
pub const HELP: &str = "Times count from the event that shows vnetd the data. announced: early notification, before the receive \
(interrupts = optimistic); received: from the link or the other guest; delivered: into the guest's ring; notified: after the \
receive; reacted: the guest's next frame, such as the answer to a ping. Let pings to the guest run meanwhile.";

/// A line for each step.
pub fn show(timeline: &Timeline) -> String {
    let Timeline { interface, receptions, steps } = timeline;
    let mut table = TextTable::new(&["STEP", "COUNT", "MEDIAN us", "9 OF 10 us"], &[1, 2, 3]);
    for TimelineStep { step, count, median_us, ninth_decile_us } in steps {
        let us = |us: &f64| if *count == 0 { "-".into() } else { format!("{us:.1}") };
        table.push(vec![step.clone(), count.to_string(), us(median_us), us(ninth_decile_us)]);
    }
    format!("{receptions} receptions by {interface}\n{}", table.print())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_never_happened_has_no_time() {
        let step = |step: &str, count| {
            let times = if count == 0 { (0.0, 0.0) } else { (2.04, 150.0) };
            TimelineStep { step: step.into(), count, median_us: times.0, ninth_decile_us: times.1 }
        };
        let steps = vec![step("announced", 0), step("received", 12)];
        let shown = show(&Timeline { interface: "vm1".into(), receptions: 12, steps });
        let expected = "12 receptions by vm1\n\
                        STEP       COUNT  MEDIAN us  9 OF 10 us\n\
                        announced      0          -           -\n\
                        received      12        2.0       150.0\n";
        assert_eq!(shown, expected);
    }
}
