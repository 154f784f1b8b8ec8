//! Bytes of the state that a running vnetd hands to the next one: integers, times, addresses and certificates, as succession.rs and rendezvous/ write them.
//!
//! All numbers are little-endian. A time is the number of milliseconds that have passed since; all ones stand for never.

use std::net::{SocketAddr, SocketAddrV6};
use std::time::{Duration, Instant};

use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::normalised;
use super::sealed::identity::tls::CERTIFICATES_MAX;

/// An encoded state with secrets, in memory that is zeroed when it is dropped.
pub type SealedBytes = Zeroizing<Vec<u8>>;
/// Maximum length of an encoded state in bytes: four sessions, whose certificates came by handshakes of at most 128 KiB.
pub const SEALED_STATE_MAX: usize = 1 << 20;
/// A time that never was.
pub(in crate::link) const NEVER: u64 = u64::MAX;
/// Maximum age in ms: 34 years.
const AGE_MAX_MS: u64 = 1 << 40;

/// Error of an encoded state: it is not one of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a state of this version: {0}")]
pub struct SuccessionError(pub(in crate::link) &'static str);

/// Family 1: 0 none, 4 or 6 | address 4 or 16, port 2, for family 6 scope 4.
pub(in crate::link) fn write_address(address: Option<SocketAddr>, out: &mut Vec<u8>) {
    match address {
        None => out.push(0),
        Some(SocketAddr::V4(at)) => {
            out.push(4);
            out.extend_from_slice(&at.ip().octets());
            out.extend_from_slice(&at.port().to_le_bytes());
        }
        Some(SocketAddr::V6(at)) => {
            out.push(6);
            out.extend_from_slice(&at.ip().octets());
            out.extend_from_slice(&at.port().to_le_bytes());
            out.extend_from_slice(&at.scope_id().to_le_bytes());
        }
    }
}

/// Milliseconds since a time 8.
pub(in crate::link) fn write_age(since: Option<Instant>, out: &mut Vec<u8>) {
    let ms = since.map_or(NEVER, |since| (since.elapsed().as_millis() as u64).min(AGE_MAX_MS));
    out.extend_from_slice(&ms.to_le_bytes());
}

/// Number of certificates 1 | for each, length 4 and DER.
pub(in crate::link) fn write_certificates(chain: &[CertificateDer<'_>], out: &mut Vec<u8>) {
    out.push(chain.len() as u8);
    for certificate in chain {
        out.extend_from_slice(&(certificate.len() as u32).to_le_bytes());
        out.extend_from_slice(certificate);
    }
}

/// Length in bytes of what [`write_certificates`] writes.
pub(in crate::link) fn certificates_len(chain: &[CertificateDer<'_>]) -> usize {
    1 + chain.iter().map(|certificate| 4 + certificate.len()).sum::<usize>()
}

/// Reads an encoded state from the front. Every error says what is wrong with it.
pub(in crate::link) struct Reader<'a>(pub(in crate::link) &'a [u8]);

impl<'a> Reader<'a> {
    /// A reader of a whole encoded state.
    ///
    /// # Errors
    /// It is longer than [`SEALED_STATE_MAX`].
    pub(in crate::link) fn new(bytes: &'a [u8]) -> Result<Reader<'a>, SuccessionError> {
        if bytes.len() > SEALED_STATE_MAX {
            return Err(SuccessionError("it is too long"));
        }
        Ok(Reader(bytes))
    }

    /// The state has been read to its end.
    ///
    /// # Errors
    /// Bytes follow.
    pub(in crate::link) fn end(self) -> Result<(), SuccessionError> {
        if self.0.is_empty() { Ok(()) } else { Err(SuccessionError("bytes follow it")) }
    }

    pub(in crate::link) fn take(&mut self, len: usize) -> Result<&'a [u8], SuccessionError> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(SuccessionError("it ends early"))?;
        self.0 = rest;
        Ok(taken)
    }

    pub(in crate::link) fn array<const N: usize>(&mut self) -> Result<[u8; N], SuccessionError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(SuccessionError("it ends early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(in crate::link) fn u8(&mut self) -> Result<u8, SuccessionError> {
        Ok(self.array::<1>()?[0])
    }

    pub(in crate::link) fn u16(&mut self) -> Result<u16, SuccessionError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(in crate::link) fn u32(&mut self) -> Result<u32, SuccessionError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(in crate::link) fn u64(&mut self) -> Result<u64, SuccessionError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// The byte before an optional part: true if the part follows.
    pub(in crate::link) fn has(&mut self) -> Result<bool, SuccessionError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(SuccessionError("neither there nor missing")),
        }
    }

    /// A name of 1 to `max` bytes, after its length 2.
    pub(in crate::link) fn name(&mut self, max: usize) -> Result<&'a str, SuccessionError> {
        let len = usize::from(self.u16()?);
        let text = std::str::from_utf8(self.take(len)?).ok();
        text.filter(|name| (1..=max).contains(&name.len())).ok_or(SuccessionError("a name"))
    }

    /// The last number of a counter, with room for 2^48 more.
    pub(in crate::link) fn counted(&mut self) -> Result<u64, SuccessionError> {
        let number = self.u64()?;
        number.checked_add(1 << 48).map(|_| number).ok_or(SuccessionError("a number"))
    }

    /// A time in the past.
    pub(in crate::link) fn instant(&mut self) -> Result<Instant, SuccessionError> {
        self.age()?.ok_or(SuccessionError("an age"))
    }

    /// A time in the past, or never.
    pub(in crate::link) fn age(&mut self) -> Result<Option<Instant>, SuccessionError> {
        let ms = self.u64()?;
        if ms == NEVER {
            return Ok(None);
        }
        let age = Some(ms).filter(|ms| *ms <= AGE_MAX_MS).map(Duration::from_millis);
        let since = age.and_then(|age| Instant::now().checked_sub(age));
        since.map(Some).ok_or(SuccessionError("an age"))
    }

    pub(in crate::link) fn address(&mut self) -> Result<Option<SocketAddr>, SuccessionError> {
        match self.u8()? {
            0 => Ok(None),
            4 => Ok(Some(SocketAddr::new(self.array::<4>()?.into(), self.u16()?))),
            6 => {
                let (ip, port, scope) = (self.array::<16>()?.into(), self.u16()?, self.u32()?);
                Ok(Some(normalised(SocketAddrV6::new(ip, port, 0, scope).into())))
            }
            _ => Err(SuccessionError("an address of an unknown family")),
        }
    }

    /// Certificates, perhaps none.
    pub(in crate::link) fn certificates(&mut self) -> Result<Vec<CertificateDer<'static>>, SuccessionError> {
        let count = self.u8()?;
        if usize::from(count) > CERTIFICATES_MAX {
            return Err(SuccessionError("a number of certificates"));
        }
        let one = |_| {
            let len = self.u32()?;
            Ok(CertificateDer::from(self.take(len as usize)?.to_vec()))
        };
        (0..count).map(one).collect()
    }
}
