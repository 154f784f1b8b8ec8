//! The client's side of SOCKS 5 (RFC 1928) with user name and password (RFC 1929): what is said, and what the answers mean.
//!
//! Only CONNECT is used. A name is handed to the proxy as it is, which resolves it: nothing about it leaks to this host's
//! resolver, and names that only the proxy knows (a bastion's, a `.onion`) work.

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
/// Longest name, user name and password in bytes: their length is one byte.
pub const TEXT_MAX: usize = 255;
/// Bytes of an answer to CONNECT from which its length can be told.
pub const ANSWER_START: usize = 5;

/// Where the proxy is to connect to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Destination {
    /// An address.
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
    /// Without the password: this may end in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:…", self.user)
    }
}

/// Why the proxy does not connect us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SocksError {
    /// Something else answers there.
    #[error("what answers is no SOCKS 5 proxy (first byte {0}); look at the link's proxy")]
    Version(u8),
    /// It takes none of the methods offered.
    #[error("the proxy wants another way to log in; write the proxy as socks5://USER:PASSWORD@ADDRESS:PORT")]
    Method,
    /// It does not know the user name or password.
    #[error("the proxy refuses user name or password; correct them in the link's proxy")]
    Denied,
    /// It does not connect.
    #[error("the proxy cannot connect: {}", reason(*.0))]
    Refused(u8),
    /// The answer has an address of unknown kind.
    #[error("the proxy's answer cannot be understood (address type {0})")]
    AddressType(u8),
}

/// Meaning of a reply code (RFC 1928 section 6).
fn reason(code: u8) -> &'static str {
    match code {
        1 => "general failure",
        2 => "its rules do not allow it",
        3 => "network unreachable",
        4 => "host unreachable",
        5 => "connection refused",
        6 => "time-to-live expired",
        7 => "it does not know the command",
        8 => "it does not know the kind of address",
        _ => "unknown reason",
    }
}

/// How the proxy wants the client to log in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Login {
    /// Not at all.
    None,
    /// By user name and password.
    Password,
}

/// The first message: the ways to log in that the client knows.
pub fn greeting(credentials: bool) -> Vec<u8> {
    if credentials { vec![VERSION, 2, METHOD_NONE, METHOD_PASSWORD] } else { vec![VERSION, 1, METHOD_NONE] }
}

/// The answer to [`greeting`].
pub fn login(answer: [u8; 2], credentials: bool) -> Result<Login, SocksError> {
    match answer {
        [VERSION, METHOD_NONE] => Ok(Login::None),
        [VERSION, METHOD_PASSWORD] if credentials => Ok(Login::Password),
        [VERSION, _] => Err(SocksError::Method),
        [other, _] => Err(SocksError::Version(other)),
    }
}

/// User name and password (RFC 1929 section 2).
pub fn password(credentials: &Credentials) -> Vec<u8> {
    let mut message = vec![PASSWORD_VERSION];
    for text in [&credentials.user, &credentials.password] {
        put_text(&mut message, text);
    }
    message
}

/// The answer to [`password`].
pub fn granted(answer: [u8; 2]) -> Result<(), SocksError> {
    // The version is that of the negotiation, but some proxies answer with their own: only the status counts.
    if answer[1] == 0 { Ok(()) } else { Err(SocksError::Denied) }
}

/// The request to connect (RFC 1928 section 4).
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

/// How many bytes of the answer to [`connect`] are still to be read behind its first ones. What comes after those is the other
/// end's.
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
    fn messages_are_those_of_the_rfcs() {
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
    fn answers_are_understood_or_refused_with_a_reason() {
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
