//! Sealed links: nothing travels in clear text (docs/security.md).
//!
//! ```text
//!  keeper ----- starts and answers handshakes, rekeys, moves links, away from the data path
//!    |
//!  handshake -- TLS 1.3 with certificates of both hosts (identity) gives keys for one epoch
//!    |
//!  session ---- which keys seal and which open; published as a keyring that dispatchers load once per batch
//!    |
//!  aead ------- encrypts and decrypts datagrams in place; replay: each number opens once
//! ```
//!
//! [`handshake_gate`] bounds the handshakes that other hosts start. [`keepalive`] shows that the peer lives and where it is;
//! [`roaming`] follows it to another address. [`signature_algorithms`] signs records of the overlay with the same certificates.

pub mod aead;
pub mod handshake;
pub(in crate::link) mod handshake_gate;
pub mod identity;
pub(in crate::link) mod keepalive;
pub mod keeper;
#[cfg(any(test, feature = "test-util"))]
pub mod pki;
pub(in crate::link) mod replay;
#[cfg(test)]
mod replay_model;
#[cfg(any(test, kani))]
mod replay_proofs;
#[cfg(test)]
mod replay_tests;
pub(in crate::link) mod roaming;
pub(in crate::link) mod session;
#[cfg(test)]
mod session_model;
#[cfg(test)]
mod session_proofs;
#[cfg(test)]
pub(in crate::link) mod session_tests;
pub mod signature_algorithms;
pub(in crate::link) mod source_table;

/// The replay window and sessions are built from these; their models take loom's.
mod sync {
    pub(super) use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

    pub(super) use arc_swap::{ArcSwap, Guard};
    pub(super) use parking_lot::{Mutex, RwLock, RwLockReadGuard};
}
