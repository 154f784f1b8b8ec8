//! What a native link has beside what all links have.

use std::net::SocketAddr;
use std::sync::Arc;

use super::reassembly::ReassemblyBudget;
use super::trial::Trial;
use crate::link::common::Common;
use crate::link::inquiry::Inquiries;
use crate::link::path::state::udp_payload;
use crate::link::rendezvous::choice::PathChoice;
use crate::link::sealed::roaming::RemoteAddress;
use crate::link::sealed::session::Seal;
use crate::link::socket::name::{Name, Target};
use crate::link::socket::udp::Socket;
use crate::wire::ethernet::Mac;
use crate::wire::native::{HEADER_LEN, TAG_LEN};

/// Reassembly memory of one link in bytes.
const BUDGET: usize = 4 << 20;

/// What a native link has beside what all links have.
#[derive(Debug)]
pub(in crate::link) struct Native {
    /// Where the other host is.
    pub(in crate::link) place: RemoteAddress,
    /// Guests of the other host that receive on ports of their own.
    pub(super) guests: Vec<Guest>,
    /// Keys, if nothing may travel in clear text.
    pub(in crate::link) seal: Option<Box<Seal>>,
    /// The choice between relayed and direct path, where the hosts meet by a relay.
    pub(in crate::link) via: Option<PathChoice>,
    pub(in crate::link) budget: Arc<ReassemblyBudget>,
    pub(in crate::link) inquiries: Inquiries,
    /// Whether zero copy pays on the path's device.
    pub(super) zero_copy: Arc<Trial>,
}

/// A guest of the other host that receives on a port of its own.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) mac: Mac,
    pub(super) port: Target,
}

impl Native {
    /// To where `place` says, in clear text.
    pub(in crate::link) fn new(place: RemoteAddress, link: &Common) -> Native {
        Native {
            place,
            guests: vec![],
            seal: None,
            via: None,
            budget: Arc::new(ReassemblyBudget::new(BUDGET)),
            inquiries: Inquiries::default(),
            zero_copy: Trial::new(link.stats.clone()),
        }
    }

    /// The same, with guests of the other host, which is at `remote`, that receive on ports of their own.
    pub(in crate::link) fn with_guests(self, remote: SocketAddr, guests: &[(Mac, u16)]) -> Native {
        let guests = guests.iter().map(|&(mac, port)| {
            let mut address = remote;
            address.set_port(port);
            Guest { mac, port: Target::new(address) }
        });
        Native { guests: guests.collect(), ..self }
    }

    /// The other host's `port`th port, in the form that `socket` sends to; `None` when it cannot, or while the host's address is
    /// not known.
    #[inline]
    pub(in crate::link) fn name(&self, port: usize, socket: &Socket) -> Option<Name> {
        self.place.name(port, socket)
    }

    /// Payload of a datagram in an IP packet of `size` bytes.
    #[inline]
    pub(in crate::link) fn payload_of(&self, size: u16) -> usize {
        let is_v4 = self.place.remote().is_some_and(|remote| remote.is_ipv4());
        udp_payload(size, is_v4) - HEADER_LEN - if self.seal.is_some() { TAG_LEN } else { 0 }
    }
}
