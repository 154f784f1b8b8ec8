//! Sealed links: nothing travels in clear text.
//!
//! Two hosts agree on keys by TLS with certificates of both ([`identity`], [`handshake`]), which the [`keeper`] does outside the
//! data path. A [`session`] holds the keys of one epoch; [`aead`] encrypts datagrams with them, [`replay`] refuses what was
//! received before, and [`roaming`] follows a peer to another address. [`signature`] signs records of the overlay.

pub mod aead;
pub mod handshake;
pub mod identity;
pub mod keeper;
#[cfg(any(test, feature = "test-util"))]
pub mod pki;
pub(in crate::link) mod replay;
pub(in crate::link) mod roaming;
pub(in crate::link) mod session;
pub mod signature;
