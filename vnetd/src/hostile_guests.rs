//! Hostile guests against the memory of virtual machines as vnetd lends it: [`vnet_rdma::vm::hostile`] says what they do.

use std::sync::Arc;

use parking_lot::Mutex;
use vnet::interface::virtqueue::memory::{GuestMemory, Region, RegionSpec};
use vnet::interface::virtqueue::window::Loans;
use vnet_rdma::daemon::Lent;
use vnet_rdma::vm::Run;
use vnet_rdma::vm::hostile::{self, Physical, Piece, Report};

use crate::guests::lend;

/// A guest's memory table.
#[derive(Default)]
struct Table {
    loans: Loans,
    /// Regions that are mapped, with their pieces.
    mapped: Mutex<Vec<(Piece, Arc<Region>)>>,
}

impl Physical for Table {
    fn set(&self, pieces: &[Piece]) {
        let mut mapped = self.mapped.lock();
        // As with a front end, a region that stays is not mapped again.
        mapped.retain(|(known, _)| pieces.iter().any(|piece| is_same(piece, known)));
        for piece in pieces {
            if !mapped.iter().any(|(known, _)| is_same(piece, known)) {
                let Piece { addr, offset, len, .. } = *piece;
                let spec = RegionSpec { guest_addr: addr, user_addr: addr, len, offset };
                mapped.push((piece.clone(), Region::map(spec, &piece.file).expect("a region")));
            }
        }
        let regions = mapped.iter().map(|(_, region)| Arc::clone(region)).collect::<Vec<_>>();
        let memory = (!regions.is_empty()).then(|| GuestMemory::new(regions).expect("a memory table"));
        self.loans.follow(memory.map(Arc::new).as_ref(), false, None);
    }

    fn lend(&self, runs: &[Run]) -> Option<Arc<dyn Lent>> {
        lend(&self.loans, runs).ok()
    }
}

fn is_same(one: &Piece, other: &Piece) -> bool {
    one.addr == other.addr && Arc::ptr_eq(&one.file, &other.file)
}

/// Runs this many operations of hostile guests.
///
/// # Panics
/// A byte outside registered memory was read or written, or a guest that does no harm was cut off or not served.
pub fn run(seed: u64, operations: u64) -> Report {
    hostile::run(seed, operations, &|| Arc::new(Table::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cargo run --release --example hostile_guests --features test-util -- SEED OPERATIONS` runs more.
    #[test]
    fn hostile_guests_reach_registered_memory_only() {
        let report = run(1, 300_000);
        assert!(report.frames > 10_000 && report.entries > 100_000 && report.refused > 1_000, "{report:?}");
        assert!(report.opened > 10 && report.broken > 0 && report.exchanged > 10, "{report:?}");
        assert!(report.same_host_bytes > 1 << 20, "{report:?}");
    }
}
