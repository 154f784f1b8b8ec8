//! The distributed overlay: records that hosts exchange through a store, and the links and routes computed from them.
//!
//! [`Overlay`] is a state machine without I/O and clock. Its inputs are the store's contents ([`Overlay::put`],
//! [`Overlay::delete`]), this host's stations ([`Overlay::locals`]) and the time; its outputs are writes to the store
//! ([`Overlay::writes`]) and this host's links and routes ([`Overlay::computed`]). An agent in `vnetd` connects it to etcd and to
//! the engine.
//!
//! # Ownership of records
//! Under one lease, a host writes a record of itself for each network that it has interfaces in, and a record for each interface
//! with a configured MAC address and a connected guest. Nothing learned from guests' frames is written: a guest can neither fill
//! the store nor take over an address. A station that appears at a new host is claimed with the next sequence number (RFC 7432,
//! section 7.7). The losing host claims it back only if its own guest still sends frames.
//!
//! # Trust
//! Anyone with write access to the store can write any record. Three rules limit the damage:
//!
//! - Each host watches its own records and repairs them. A change of a settled record is therefore delayed
//!   (`entry.rs`).
//! - Five moves within 180 s freeze an object at its host for 180 s; no host writes it meanwhile, so two hosts that both claim it
//!   cannot overload the store.
//! - A guest's address in use on this host stays here, whatever the store contains.
//!
//! With sealed links, the state machine only receives records that their writer's certificate authorizes (`authenticator.rs`,
//! `signed_format.rs`); any other record counts as missing (`vouched.rs`).
//!
//! # Store failures
//! All records stay in force. While the store is unreachable, only learning from frames changes the routes; records that are
//! missing when it returns are kept. A host missing from the store is forgotten after [`FORGET_MS`], if two snapshots lacked it
//! and its link received nothing meanwhile. A record that withdraws it removes it at once. Other hosts' records survive a restart
//! (`last_known.rs`).

mod alarm;
mod authenticator;
mod compute;
mod entry;
mod last_known;
#[cfg(test)]
mod migration_tests;
#[cfg(test)]
mod oracle;
mod places;
mod publish;
pub mod record;
pub mod signed_format;
mod state;
mod store_input;
#[cfg(test)]
mod tests;
mod vouched;

pub use alarm::Alarm;
pub use authenticator::Authenticator;
pub use compute::{Computed, PeerLink};
pub use entry::{HOLD_MS, SEQUENCE_STEP_MAX};
pub use state::{FORGET_MS, HOSTS_MAX, Local, Overlay, STATIONS_MAX, Settings, Write};
