//! Where stations are and whose IP addresses are whose, kept up to date station by station: with a hundred thousand of them
//! a move must not cost as much as all of them.
//!
//! The maps are shared with whoever was given them last. A change copies one that is still in use, which for plain keys and
//! values is a copy of memory.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// A station of a network.
pub(super) type Place = (NetworkId, Mac);

/// Where stations are, and whose addresses are whose.
#[derive(Default)]
pub(super) struct Places {
    /// The link towards each station on another host, by its place in a list that is kept elsewhere.
    pub stations: Arc<HashMap<Place, u16>>,
    /// The station that has an address. One that several claim is nobody's.
    pub neighbours: Arc<HashMap<(NetworkId, IpAddr), Mac>>,
    /// Who claims an address.
    claims: HashMap<(NetworkId, IpAddr), Vec<Mac>>,
    /// What a station claims.
    claimed: HashMap<Place, Box<[IpAddr]>>,
}

impl Places {
    /// Puts a station where it is now: behind a link, or here or nowhere (`None`); with these addresses.
    pub fn set(&mut self, place: Place, hop: Option<u16>, addresses: &[IpAddr]) {
        if self.stations.get(&place) != hop.as_ref() {
            let stations = Arc::make_mut(&mut self.stations);
            match hop {
                Some(hop) => stations.insert(place, hop),
                None => stations.remove(&place),
            };
        }
        let before = self.claimed.get(&place).map_or(&[][..], |addresses| &**addresses);
        if before == addresses {
            return;
        }
        let (network, mac) = place;
        for address in self.claimed.remove(&place).unwrap_or_default() {
            let key = (network, address);
            if let Some(claims) = self.claims.get_mut(&key) {
                claims.retain(|other| *other != mac);
            }
            self.decide(key);
        }
        for address in addresses {
            let key = (network, *address);
            let claims = self.claims.entry(key).or_default();
            if !claims.contains(&mac) {
                claims.push(mac);
            }
            self.decide(key);
        }
        if !addresses.is_empty() {
            self.claimed.insert(place, addresses.into());
        }
    }

    /// Decides whose an address is.
    fn decide(&mut self, key: (NetworkId, IpAddr)) {
        let claims = self.claims.get(&key).map_or(&[][..], Vec::as_slice);
        let owner = if let [only] = claims { Some(*only) } else { None };
        if claims.is_empty() {
            self.claims.remove(&key);
        }
        if self.neighbours.get(&key) != owner.as_ref() {
            let neighbours = Arc::make_mut(&mut self.neighbours);
            match owner {
                Some(owner) => neighbours.insert(key, owner),
                None => neighbours.remove(&key),
            };
        }
    }
}
