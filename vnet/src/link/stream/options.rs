//! Configuration of a stream link's connections.

use std::net::SocketAddr;

use crate::wire::socks::{Credentials, Destination};

/// A SOCKS 5 proxy (RFC 1928).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Address on which the proxy listens.
    pub address: SocketAddr,
    /// User name and password, if the proxy requires them (RFC 1929).
    pub credentials: Option<Credentials>,
}

/// Configuration of a stream link's connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// The other host. A host name needs a proxy, which resolves it.
    pub destination: Destination,
    /// The proxy for outgoing connections; `None`: connect directly.
    pub proxy: Option<Proxy>,
    /// True if this side dials; false if it waits for the other side to connect.
    pub connect: bool,
}
