//! Sealed datagrams: AES-256-GCM with the native header as additional data (docs/security.md has every byte).
//!
//! ```text
//! | 16 bytes header, SEALED set, epoch | payload, encrypted | 16 bytes tag |
//! ```
//!
//! The nonce is the key's 4-byte salt and the header's datagram number. Numbers are taken from one counter per link, which
//! never goes back, and keys are of one direction and one TLS session: no nonce is used twice under a key, however many
//! dispatchers seal at once and however often a host starts again.
//!
//! An opening key knows which numbers it has opened (`replay.rs`). A number is looked up before a datagram is opened, so
//! that repetitions cost nothing, and marked only after: what is forged changes nothing.
//!
//! Comparing tags in constant time, and keeping keys out of timing altogether, is left to AWS-LC.

use std::fmt;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::link::sealed::replay::ReplayWindow;
use crate::stats::DiscardReason;
use crate::wire::native::HEADER_LEN;

/// Bytes that sealing adds to a datagram.
pub const TAG_LEN: usize = 16;
/// Bytes of a key and its salt, as the TLS exporter gives them.
pub const MATERIAL_LEN: usize = KEY_LEN + SALT_LEN;
/// Datagrams that one key seals at most.
pub const DATAGRAMS_MAX: u64 = 1 << 32;
const KEY_LEN: usize = 32;
const SALT_LEN: usize = 4;

/// Where the number stands in the header.
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

/// A key of one direction that this host sends with.
pub struct SealingKey {
    material: Material,
    epoch: u8,
    /// The link's next number when the key was made: it has sealed nothing below.
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

    /// What the header's epoch field says.
    #[inline]
    pub fn epoch(&self) -> u8 {
        self.epoch
    }

    /// True when datagrams with numbers from `next` on would be more than the key may seal, those of a batch included.
    #[inline]
    pub fn is_spent(&self, next: u64) -> bool {
        const BATCH: u64 = 1 << 20;
        next.saturating_sub(self.first) > DATAGRAMS_MAX - BATCH
    }

    /// True when it is time for another key.
    pub fn is_worn(&self, next: u64) -> bool {
        next.saturating_sub(self.first) > DATAGRAMS_MAX / 2
    }

    /// Encrypts a datagram in place: header, payload, and [`TAG_LEN`] bytes of room for the tag.
    ///
    /// The header's number must be one that this key has not sealed.
    ///
    /// # Panics
    /// When there is no room for header and tag.
    #[inline]
    pub fn seal(&self, datagram: &mut [u8]) {
        let (header, rest) = datagram.split_first_chunk_mut::<HEADER_LEN>().expect("a header stands first");
        let (payload, tag) = rest.split_last_chunk_mut::<TAG_LEN>().expect("room for the tag is left");
        let nonce = self.material.nonce(header);
        let made = self.material.key.seal_in_place_separate_tag(nonce, Aad::from(&header[..]), payload);
        // It fails for more than 2^36 bytes only.
        tag.copy_from_slice(made.expect("a datagram is never too long").as_ref());
    }
}

/// A key of one direction that this host receives with.
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
    /// A key that has opened nothing.
    pub fn new(material: &[u8; MATERIAL_LEN]) -> OpeningKey {
        OpeningKey { material: Material::new(material), window: ReplayWindow::new() }
    }

    /// True when it has opened a datagram.
    pub fn has_opened(&self) -> bool {
        self.window.has_marks()
    }

    /// True when it has opened none with a higher number.
    pub fn is_newest(&self, number: u64) -> bool {
        self.window.is_highest(number)
    }

    /// Decrypts a datagram in place: afterwards its payload lies between header and tag. Any thread may.
    ///
    /// An error is the reason to count it under; its payload is lost then, and nothing else has changed.
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
        // Two dispatchers may have opened the same datagram at the same time.
        if self.window.mark(number) { Ok(()) } else { Err(DiscardReason::Replayed) }
    }
}

#[cfg(test)]
#[path = "aead_tests.rs"]
mod tests;
