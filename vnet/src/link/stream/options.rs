//! How a stream link is configured to connect.

use std::net::SocketAddr;

use crate::wire::socks::{Credentials, Destination};

/// A SOCKS 5 proxy (RFC 1928).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    /// User name and password, if it asks for them (RFC 1929).
    pub credentials: Option<Credentials>,
}

/// How a stream link connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// The other host. A host name needs a proxy, which resolves it.
    pub destination: Destination,
    /// The proxy that connections go through.
    pub proxy: Option<Proxy>,
    /// This side dials; false: it waits for the other side to connect.
    pub connect: bool,
}
