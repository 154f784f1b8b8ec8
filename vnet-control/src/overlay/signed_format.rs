//! Signed values of the store: format, parsing, signing.
//!
//! A signed value is a record (`record.rs`) with further members, which readers of unsigned records ignore:
//!
//! | member | |
//! |---|---|
//! | `"certificate"` | in a host's record: its certificate chain without the authority, a list of DER in base64 |
//! | `"signed"` | time of signing in microseconds since 1970 by the writer's clock, strictly increasing per writer |
//! | `"signature"` | base64; always the last member, written exactly as `,"signature":"…"}` |
//!
//! The signature covers [`CONTEXT`], the key, a zero byte, and the value up to the comma before the signature. Covering the key
//! prevents replay of a value under another key; covering the bytes as they are needs no canonical JSON.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use super::record::Key;

/// Prefix of every signed message.
pub const CONTEXT: &[u8] = b"vnet overlay record 1\0";
/// Maximum number of certificates in a chain.
const CHAIN_MAX: usize = 4;
/// Maximum length of a signature in bytes: RSA with 8192 bits.
const SIGNATURE_MAX: usize = 1024;
const MEMBER: &[u8] = b",\"signature\":\"";
const END: &[u8] = b"\"}";

/// Members that are parsed before verification.
#[derive(Deserialize)]
struct Members {
    #[serde(default)]
    host: Option<Box<str>>,
    #[serde(default)]
    certificate: Vec<String>,
    signed: u64,
}

/// A parsed signed value, not verified yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Signed {
    /// The signed bytes.
    pub message: Vec<u8>,
    /// The signature.
    pub signature: Vec<u8>,
    /// The value without the signature.
    pub value: Vec<u8>,
    /// Name of the host in a station's record.
    pub host: Option<Box<str>>,
    /// Certificate chain, the host's own first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Time of signing, in microseconds since 1970.
    pub signed: u64,
}

impl Signed {
    /// Parses the value of `key`; `None` if it is not a signed value. Verifies nothing.
    pub fn parse(key: &Key, value: &[u8]) -> Option<Signed> {
        let rest = value.strip_suffix(END).filter(|_| value.len() <= key.value_max())?;
        // Search only the tail for the last member: base64 cannot contain its name.
        let tail = rest.len().saturating_sub(SIGNATURE_MAX.div_ceil(3) * 4 + MEMBER.len());
        let at = tail + rest[tail..].windows(MEMBER.len()).rposition(|window| window == MEMBER)?;
        let (body, signature) = (&rest[..at], STANDARD.decode(&rest[at + MEMBER.len()..]).ok()?);
        let value = [body, b"}"].concat();
        let members: Members = serde_json::from_slice(&value).ok()?;
        if members.certificate.len() > CHAIN_MAX {
            return None;
        }
        let der = |text: &String| STANDARD.decode(text).ok().map(CertificateDer::from);
        let chain = members.certificate.iter().map(der).collect::<Option<_>>()?;
        let message = message(key, body);
        Some(Signed { message, signature, value, host: members.host, chain, signed: members.signed })
    }
}

/// Signs `value`, the unsigned record of `key`, and adds `chain` unless it is empty. The error is one line.
pub fn sign(
    key: &Key,
    value: &[u8],
    chain: &[CertificateDer<'_>],
    signed: u64,
    sign: impl FnOnce(&[u8]) -> Result<Vec<u8>, String>,
) -> Result<Vec<u8>, String> {
    #[derive(Serialize)]
    struct Members {
        #[serde(skip_serializing_if = "Vec::is_empty")]
        certificate: Vec<String>,
        signed: u64,
    }
    if chain.len() > CHAIN_MAX {
        return Err(format!("more than {CHAIN_MAX} certificates in a chain"));
    }
    let certificate = chain.iter().map(|certificate| STANDARD.encode(certificate)).collect();
    let members = serde_json::to_vec(&Members { certificate, signed }).map_err(|error| error.to_string())?;
    let record = value.strip_suffix(b"}").ok_or("the value is no record")?;
    let inner = members[1..].strip_suffix(b"}").ok_or("the value has no members")?;
    let body = [record, b",", inner].concat();
    let signature = STANDARD.encode(sign(&message(key, &body))?);
    let value = [&body, MEMBER, signature.as_bytes(), END].concat();
    if value.len() > key.value_max() {
        return Err(format!("it takes more than {} bytes with its certificates", key.value_max()));
    }
    Ok(value)
}

fn message(key: &Key, body: &[u8]) -> Vec<u8> {
    [CONTEXT, key.to_string().as_bytes(), b"\0", body].concat()
}

#[cfg(test)]
mod tests {
    use super::super::record::{HostRecord, Record};
    use super::*;

    fn key() -> Key {
        Key::parse(b"/vnet/v1/1/hosts/h1").unwrap()
    }

    const RECORD: &[u8] = br#"{"address":"10.0.0.1:9000","instance":5}"#;

    fn made(chain: &[CertificateDer<'_>]) -> Vec<u8> {
        sign(&key(), RECORD, chain, 7, |_| Ok(vec![1, 2, 3])).unwrap()
    }

    #[test]
    fn a_value_is_signed_as_documented() {
        let value = made(&[CertificateDer::from(&[0xff; 3][..])]);
        let text = r#"{"address":"10.0.0.1:9000","instance":5,"certificate":["////"],"signed":7,"signature":"AQID"}"#;
        assert_eq!(String::from_utf8(value.clone()).unwrap(), text);
        let signed = Signed::parse(&key(), &value).unwrap();
        let body = text.split(",\"signature").next().unwrap();
        assert_eq!(signed.message, format!("vnet overlay record 1\0/vnet/v1/1/hosts/h1\0{body}").as_bytes());
        assert_eq!((signed.signature.as_slice(), signed.signed), (&[1, 2, 3][..], 7));
        assert_eq!(signed.chain, [CertificateDer::from(&[0xff; 3][..])]);
        // Readers of unsigned records parse the same record from it.
        assert_eq!(HostRecord::parse(&value), HostRecord::parse(RECORD));
        assert_eq!(HostRecord::parse(&signed.value), HostRecord::parse(RECORD));
        let elsewhere = Key::parse(b"/vnet/v1/1/hosts/h2").unwrap();
        assert_ne!(Signed::parse(&elsewhere, &value).unwrap().message, signed.message);
    }

    #[test]
    fn what_is_not_signed_is_not_taken_for_it() {
        let long = format!(r#"{{"signed":1,"x":"{}","signature":"AQID"}}"#, "x".repeat(key().value_max()));
        for bad in [
            "",
            "nonsense",
            "{}",
            r#"{"signed":1}"#,
            r#"{"signed":1,"signature":"AQID" }"#,
            r#"{"signed":1,"signature":"A?ID"}"#,
            r#"{"signed":-1,"signature":"AQID"}"#,
            r#"{"signed":1,"signed":1,"signature":"AQID"}"#,
            r#"{"x":1,"signature":"AQID"}"#,
            r#"{"signed":1,"certificate":["?"],"signature":"AQID"}"#,
            r#"{"signed":1,"certificate":["","","","",""],"signature":"AQID"}"#,
            r#"{"signed":1},"signature":"AQID"}"#,
            &long,
        ] {
            assert_eq!(Signed::parse(&key(), bad.as_bytes()), None, "{bad}");
        }
        let large = CertificateDer::from(vec![0; 30_000]);
        assert!(sign(&key(), RECORD, &[large], 1, |_| Ok(vec![])).unwrap_err().contains("bytes"));
        let refused = sign(&key(), RECORD, &[], 1, |_| Err("no".into()));
        assert_eq!(refused.unwrap_err(), "no");
    }
}
