//! Station locations and owners of IP addresses, updated per station: with a hundred thousand stations, a move must not cost a
//! full recomputation.
//!
//! Readers share the maps. An update while a reader holds a map copies the map, which for plain keys and values is a memory copy.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

/// A station's key.
pub(super) type StationKey = (NetworkId, Mac);

/// Station locations and owners of IP addresses.
#[derive(Default)]
pub(super) struct Places {
    /// The link to each remote station, as an index into the link names that the caller keeps.
    pub stations: Arc<HashMap<StationKey, u16>>,
    /// The owner of each IP address; an address that several stations claim has none.
    pub neighbours: Arc<HashMap<(NetworkId, IpAddr), Mac>>,
    /// The stations that claim each IP address.
    claims: HashMap<(NetworkId, IpAddr), Vec<Mac>>,
    /// The IP addresses that each station claims.
    claimed: HashMap<StationKey, Box<[IpAddr]>>,
}

impl Places {
    /// Sets a station's link (`None`: local or unknown) and IP addresses.
    pub fn set(&mut self, place: StationKey, hop: Option<u16>, addresses: &[IpAddr]) {
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

    /// Updates the owner of an IP address.
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
