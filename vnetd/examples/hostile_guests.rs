//! Hostile guests of the interconnect's engine at length: `hostile_guests SEED OPERATIONS`.
//!
//! Ends with a panic, or a fault, when a byte outside registered memory was read or written (`src/hostile_guests.rs`).

use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [seed, operations] = numbers[..] else { return Err("usage: hostile_guests SEED OPERATIONS".into()) };
    let begin = Instant::now();
    let report = vnetd::hostile_guests::run(seed, operations);
    let per_second = report.operations() as f64 / begin.elapsed().as_secs_f64();
    println!("seed {seed}: {report:?}, {per_second:.0} operations per second");
    Ok(())
}
