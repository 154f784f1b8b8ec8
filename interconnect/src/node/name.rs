//! Names of endpoints.

use std::net::ToSocketAddrs;

use super::Error;
use crate::ether::address;
use crate::proto::Peer;

/// Parses the name of an endpoint: `HOST:PORT/ENDPOINT`, where HOST is an address or a name that the system resolves, or
/// `ether://MAC:PORT/ENDPOINT` of a node at an Ethernet device.
pub fn resolve(name: &str) -> Result<Peer, Error> {
    let wrong = |why: String| Error::Name(name.into(), why);
    let (host, endpoint) = name.rsplit_once('/').ok_or_else(|| wrong("no '/'".into()))?;
    let endpoint = endpoint.parse().map_err(|_| wrong(format!("'{endpoint}' is no number below 1024")))?;
    if let Some(station) = address::parse(host) {
        return Ok(Peer { address: station.map_err(|why| wrong(why.into()))?, endpoint });
    }
    let mut addresses = host.to_socket_addrs().map_err(|error| wrong(error.to_string()))?;
    let address = addresses.next().ok_or_else(|| wrong("the host has no address".into()))?;
    Ok(Peer { address, endpoint })
}

/// Returns the name of an endpoint, as `resolve` takes it.
pub fn name_of(peer: Peer) -> String {
    format!("{}/{}", address::name_of(peer.address), peer.endpoint)
}
