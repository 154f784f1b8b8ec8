//! Sealed datagrams: AES-256-GCM with the native header as additional data (docs/security.md has every byte).
//!
//! ```text
//! | 16 bytes header, SEALED set, epoch | payload, encrypted | 16 bytes tag |
//! ```
//!
//! The nonce is the key's 4-byte salt and the header's datagram number. Numbers are taken from one counter per link, which never
//! decreases, and a key belongs to one direction of one TLS session: no nonce is used twice under a key, however many dispatchers
//! seal at once and however often a host restarts.
//!
//! An opening key has a replay window (`replay.rs`). A number is looked up before a datagram is decrypted, so that replays cost
//! next to nothing, and marked only afterwards: a forged datagram changes nothing.
//!
//! Implemented here rather than with a DTLS or WireGuard library, because it seals in place, on many threads, without a lock.
//! AWS-LC provides AES-GCM, constant-time comparison of tags included.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::link::sealed::replay::ReplayWindow;
use crate::stats::DiscardReason;
use crate::wire::native::HEADER_LEN;

pub use crate::wire::native::TAG_LEN;
/// Length of the keying material in bytes: a key and its salt.
pub const MATERIAL_LEN: usize = KEY_LEN + SALT_LEN;
/// Maximum number of datagrams that one key seals.
pub const DATAGRAMS_MAX: u64 = 1 << 32;
const KEY_LEN: usize = 32;
const SALT_LEN: usize = 4;

/// Position of the datagram number in the header.
const NUMBER: std::ops::Range<usize> = 8..16;

/// A key with its salt.
struct Material {
    key: LessSafeKey,
    salt: [u8; SALT_LEN],
}

impl Material {
    fn new(material: &[u8; MATERIAL_LEN]) -> Material {
        let (key, salt) = material.split_at(KEY_LEN);
        let key = UnboundKey::new(&AES_256_GCM, key).expect("32 bytes are a key of AES-256");
        Material { key: LessSafeKey::new(key), salt: salt.try_into().expect("4 bytes are left") }
    }

    #[inline]
    fn nonce(&self, header: &[u8; HEADER_LEN]) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[..SALT_LEN].copy_from_slice(&self.salt);
        nonce[SALT_LEN..].copy_from_slice(&header[NUMBER]);
        Nonce::assume_unique_for_key(nonce)
    }
}

/// Encrypts the datagrams that this host sends.
pub struct SealingKey {
    material: Material,
    epoch: u8,
    /// The link's next datagram number when the key was created: the key has sealed no lower number.
    first: u64,
}

impl fmt::Debug for SealingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealingKey(epoch {}, from {})", self.epoch, self.first)
    }
}

impl SealingKey {
    /// A key of `epoch` for datagrams with numbers from `first` on.
    pub fn new(material: &[u8; MATERIAL_LEN], epoch: u8, first: u64) -> SealingKey {
        SealingKey { material: Material::new(material), epoch: epoch & 3, first }
    }

    /// The epoch in the headers of datagrams sealed with this key.
    #[inline]
    pub fn epoch(&self) -> u8 {
        self.epoch
    }

    /// The link's next datagram number when the key was created.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// True when the key must not seal a batch of datagrams from number `next` on.
    #[inline]
    pub fn is_spent(&self, next: u64) -> bool {
        const BATCH: u64 = 1 << 20;
        next.saturating_sub(self.first) > DATAGRAMS_MAX - BATCH
    }

    /// True when a rekey is due.
    pub fn is_worn(&self, next: u64) -> bool {
        next.saturating_sub(self.first) > DATAGRAMS_MAX / 2
    }

    /// Encrypts a datagram in place: header, payload, then [`TAG_LEN`] bytes for the tag.
    ///
    /// The caller must not have used the header's number with this key before.
    ///
    /// # Panics
    /// When `datagram` is shorter than header and tag.
    #[inline]
    pub fn seal(&self, datagram: &mut [u8]) {
        let (header, rest) = datagram.split_first_chunk_mut::<HEADER_LEN>().expect("a header stands first");
        let (payload, tag) = rest.split_last_chunk_mut::<TAG_LEN>().expect("room for the tag is left");
        let nonce = self.material.nonce(header);
        let made = self.material.key.seal_in_place_separate_tag(nonce, Aad::from(&header[..]), payload);
        // Sealing fails only for more than 2^36 bytes.
        tag.copy_from_slice(made.expect("a datagram is never too long").as_ref());
    }
}

/// Decrypts the datagrams that this host receives.
pub struct OpeningKey {
    material: Material,
    window: ReplayWindow,
}

impl fmt::Debug for OpeningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OpeningKey")
    }
}

impl OpeningKey {
    /// A key with an empty replay window.
    pub fn new(material: &[u8; MATERIAL_LEN]) -> OpeningKey {
        OpeningKey { material: Material::new(material), window: ReplayWindow::new() }
    }

    /// A key that goes on with a replay window.
    pub fn resumed(material: &[u8; MATERIAL_LEN], window: ReplayWindow) -> OpeningKey {
        OpeningKey { material: Material::new(material), window }
    }

    /// The numbers that the key has opened.
    pub fn window(&self) -> &ReplayWindow {
        &self.window
    }

    /// True when the key has opened a datagram.
    pub fn has_opened(&self) -> bool {
        self.window.has_marks()
    }

    /// True when the key has opened no datagram with a higher number.
    pub fn is_newest(&self, number: u64) -> bool {
        self.window.is_highest(number)
    }

    /// Decrypts a datagram in place: afterwards the plain payload lies between header and tag. Any number of threads may call
    /// this concurrently.
    ///
    /// # Errors
    /// The reason under which to count the datagram. Its payload is destroyed; the key is unchanged.
    #[inline]
    pub fn open(&self, datagram: &mut [u8]) -> Result<(), DiscardReason> {
        let (header, sealed) =
            datagram.split_first_chunk_mut::<HEADER_LEN>().ok_or(DiscardReason::Truncated)?;
        if sealed.len() < TAG_LEN {
            return Err(DiscardReason::Truncated);
        }
        let number = u64::from_be_bytes(header[NUMBER].try_into().expect("8 bytes"));
        if self.window.has_seen(number) {
            return Err(DiscardReason::Replayed);
        }
        let nonce = self.material.nonce(header);
        self.material
            .key
            .open_in_place(nonce, Aad::from(&header[..]), sealed)
            .map_err(|_| DiscardReason::Forged)?;
        // Two dispatchers may have decrypted the same datagram at the same time.
        if self.window.mark(number) { Ok(()) } else { Err(DiscardReason::Replayed) }
    }
}

#[cfg(test)]
#[path = "aead_tests.rs"]
mod tests;
