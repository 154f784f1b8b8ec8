//! Hostile processes of the daemon's engine at length: `hostile SEED OPERATIONS`. Odd seeds have atomic operations.
//!
//! Ends with a panic, or a fault, when a byte outside registered memory was read or written (`src/daemon/hostile.rs`).

use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<u64> = std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [seed, operations] = numbers[..] else { return Err("usage: hostile SEED OPERATIONS".into()) };
    let begin = Instant::now();
    let report = vnet_rdma::daemon::hostile::run(seed, operations);
    let per_second = report.operations as f64 / begin.elapsed().as_secs_f64();
    println!("seed {seed}: {report:?}, {per_second:.0} operations per second");
    Ok(())
}
