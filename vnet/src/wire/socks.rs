//! SOCKS 5 client messages (RFC 1928) with user name and password authentication (RFC 1929).
//!
//! Only CONNECT is used. The proxy resolves host names: none leaks to this host's resolver, and names that only the proxy can
//! resolve (those behind a bastion host, or a `.onion` name) work.
//!
//! Implemented here because it is three small messages without I/O, which the fuzzer reaches directly; the libraries bring their
//! own sockets.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const VERSION: u8 = 5;
const CONNECT: u8 = 1;
const METHOD_NONE: u8 = 0;
const METHOD_PASSWORD: u8 = 2;
const PASSWORD_VERSION: u8 = 1;
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;
/// Maximum length of name, user name and password in bytes: the length field has one byte.
pub const TEXT_MAX: usize = 255;
/// Number of bytes at the start of a reply to CONNECT that determine its length.
pub const ANSWER_START: usize = 5;

/// Destination of a connection through the proxy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// An IP address and a port.
    Address(SocketAddr),
    /// A name of 1 to [`TEXT_MAX`] bytes, and a port.
    Name(String, u16),
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Destination::Address(address) => address.fmt(f),
            Destination::Name(name, port) => write!(f, "{name}:{port}"),
        }
    }
}

/// User name and password, each of 1 to [`TEXT_MAX`] bytes.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// User name.
    pub user: String,
    /// Password.
    pub password: String,
}

impl fmt::Debug for Credentials {
    /// Omits the password, which must not appear in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:…", self.user)
    }
}

/// Error of a SOCKS negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SocksError {
    /// The server does not speak SOCKS 5.
    #[error("the proxy does not speak SOCKS 5 (first byte {0}); check the link's proxy")]
    Version(u8),
    /// The proxy accepts none of the offered authentication methods.
    #[error(
        "the proxy requires another authentication method; write the proxy as socks5://USER:PASSWORD@ADDRESS:PORT"
    )]
    Method,
    /// The proxy rejected the user name or password.
    #[error("the proxy rejected user name or password; correct them in the link's proxy")]
    Denied,
    /// The proxy could not connect to the destination.
    #[error("the proxy cannot connect: {}", reason(*.0))]
    Refused(u8),
    /// The reply has an unknown address type.
    #[error("the proxy's reply has an unknown address type ({0})")]
    AddressType(u8),
}

/// Meaning of a reply code (RFC 1928 section 6).
fn reason(code: u8) -> &'static str {
    match code {
        1 => "general failure",
        2 => "not allowed by its rules",
        3 => "network unreachable",
        4 => "host unreachable",
        5 => "connection refused",
        6 => "time-to-live expired",
        7 => "command not supported",
        8 => "address type not supported",
        _ => "unknown reason",
    }
}

/// Authentication method that the proxy selected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Login {
    /// No authentication.
    None,
    /// User name and password.
    Password,
}

/// The first message of the client: the offered authentication methods.
pub fn greeting(credentials: bool) -> Vec<u8> {
    if credentials { vec![VERSION, 2, METHOD_NONE, METHOD_PASSWORD] } else { vec![VERSION, 1, METHOD_NONE] }
}

/// Parses the reply to [`greeting`].
pub fn login(answer: [u8; 2], credentials: bool) -> Result<Login, SocksError> {
    match answer {
        [VERSION, METHOD_NONE] => Ok(Login::None),
        [VERSION, METHOD_PASSWORD] if credentials => Ok(Login::Password),
        [VERSION, _] => Err(SocksError::Method),
        [other, _] => Err(SocksError::Version(other)),
    }
}

/// The authentication request (RFC 1929 section 2).
pub fn password(credentials: &Credentials) -> Vec<u8> {
    let mut message = vec![PASSWORD_VERSION];
    for text in [&credentials.user, &credentials.password] {
        put_text(&mut message, text);
    }
    message
}

/// Parses the reply to [`password`].
pub fn granted(answer: [u8; 2]) -> Result<(), SocksError> {
    // The version should be 1, but some proxies send 5: only the status is checked.
    if answer[1] == 0 { Ok(()) } else { Err(SocksError::Denied) }
}

/// The CONNECT request (RFC 1928 section 4).
pub fn connect(to: &Destination) -> Vec<u8> {
    let mut message = vec![VERSION, CONNECT, 0];
    let port = match to {
        Destination::Address(address) => {
            match address.ip() {
                IpAddr::V4(ip) => {
                    message.push(IPV4);
                    message.extend(ip.octets());
                }
                IpAddr::V6(ip) => {
                    message.push(IPV6);
                    message.extend(ip.octets());
                }
            }
            address.port()
        }
        Destination::Name(name, port) => {
            message.push(NAME);
            put_text(&mut message, name);
            *port
        }
    };
    message.extend(port.to_be_bytes());
    message
}

fn put_text(message: &mut Vec<u8>, text: &str) {
    let bytes = &text.as_bytes()[..text.len().min(TEXT_MAX)];
    message.push(bytes.len() as u8);
    message.extend_from_slice(bytes);
}

/// Number of bytes of the reply to [`connect`] after its first [`ANSWER_START`] bytes. All later bytes come from the destination.
pub fn answer_rest(start: [u8; ANSWER_START]) -> Result<usize, SocksError> {
    const PORT: usize = 2;
    match start {
        [VERSION, 0, _, IPV4, _] => Ok(size_of::<Ipv4Addr>() - 1 + PORT),
        [VERSION, 0, _, IPV6, _] => Ok(size_of::<Ipv6Addr>() - 1 + PORT),
        [VERSION, 0, _, NAME, len] => Ok(usize::from(len) + PORT),
        [VERSION, 0, _, other, _] => Err(SocksError::AddressType(other)),
        [VERSION, code, ..] => Err(SocksError::Refused(code)),
        [other, ..] => Err(SocksError::Version(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_match_the_rfcs() {
        assert_eq!(greeting(false), [5, 1, 0]);
        assert_eq!(greeting(true), [5, 2, 0, 2]);
        let credentials = Credentials { user: "me".into(), password: "pw!".into() };
        assert_eq!(password(&credentials), *b"\x01\x02me\x03pw!");
        assert!(!format!("{credentials:?}").contains("pw!"));
        let v4 = Destination::Address("10.1.2.3:9000".parse().unwrap());
        assert_eq!(connect(&v4), [5, 1, 0, 1, 10, 1, 2, 3, 0x23, 0x28]);
        let v6 = connect(&Destination::Address("[fd00::1]:1".parse().unwrap()));
        assert_eq!((v6.len(), v6[3], &v6[4..6], &v6[18..]), (22, 4, &[0xfd, 0][..], &[0, 0, 1, 0, 1][1..]));
        assert_eq!(connect(&Destination::Name("h.onion".into(), 258)), *b"\x05\x01\0\x03\x07h.onion\x01\x02");
    }

    #[test]
    fn replies_are_parsed_or_refused_with_a_reason() {
        assert_eq!(login([5, 0], false), Ok(Login::None));
        assert_eq!(login([5, 2], true), Ok(Login::Password));
        assert_eq!(login([5, 2], false), Err(SocksError::Method), "it was not offered");
        assert_eq!(login([5, 0xff], true), Err(SocksError::Method));
        assert_eq!(login([b'H', b'T'], true), Err(SocksError::Version(b'H')));
        assert_eq!((granted([1, 0]), granted([1, 1])), (Ok(()), Err(SocksError::Denied)));
        assert_eq!(answer_rest([5, 0, 0, 1, 9]), Ok(5));
        assert_eq!(answer_rest([5, 0, 0, 4, 9]), Ok(17));
        assert_eq!(answer_rest([5, 0, 0, 3, 9]), Ok(11));
        assert_eq!(answer_rest([5, 0, 0, 2, 9]), Err(SocksError::AddressType(2)));
        assert_eq!(answer_rest([4, 0, 0, 1, 9]), Err(SocksError::Version(4)));
        let refused = answer_rest([5, 5, 0, 1, 0]).unwrap_err();
        assert_eq!(refused.to_string(), "the proxy cannot connect: connection refused");
    }
}
