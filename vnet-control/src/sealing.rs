//! Which sealed link leads from a container or virtual machine to another host's guest, and keys for applications at its two ends.

use std::net::{IpAddr, SocketAddr, SocketAddrV4};
use std::sync::Arc;

use vnet::dispatch::sealed_sessions::{Application, SealedSession, SealedSessions};
use vnet::frame::NetworkId;
use vnet::link::{ApplicationKeys, Encapsulation};
use vnet::route::{Flow, explain};
use vnet::stats::DropReason;
use vnet::wire::ethernet::Mac;
use vnet::wire::sealed_datagram::SealedDatagram;

use super::desired::{InterfaceSpec, LinkSpec, Target};
use super::engine::Engine;

/// How a guest's frames to an address leave this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// By no sealed link.
    Clear,
    /// By the sealed link with this name.
    Sealed(String),
    /// By a sealed link that is a TLS stream: its keys belong to TLS.
    Stream,
    /// By several ports, of which one is a sealed link.
    Several,
    /// To all ports: nobody has heard the address yet, or no rule applies.
    Unknown,
    /// The guest may not use its source address.
    Foreign,
}

/// A guest's packets to another station.
#[derive(Clone, Copy, Debug)]
pub struct Wayfarer<'a> {
    /// Name of the guest's interface.
    pub interface: &'a str,
    /// MAC address of its device.
    pub mac: Mac,
    /// Source address of its packets.
    pub source: IpAddr,
    /// MAC address of the destination.
    pub to: Mac,
}

impl Engine {
    /// Whether a link that carries one of `networks` is sealed; of any network without `networks`.
    pub fn has_sealed_links(&self, networks: Option<&[NetworkId]>) -> bool {
        let carries = |link: &LinkSpec| {
            networks.is_none_or(|networks| networks.iter().any(|network| link.carries(*network)))
        };
        self.current().links.iter().any(|link| link.spec.security.peer.is_some() && carries(&link.spec))
    }

    /// How frames to a station leave this host.
    pub fn way_of(&self, who: &Wayfarer<'_>) -> Way {
        let mut interfaces = self.current().interfaces.iter().map(|item| &item.spec);
        let Some(spec) = interfaces.clone().find(|spec| spec.name == who.interface) else {
            return Way::Unknown;
        };
        let source = who.source.to_canonical();
        let has_source = |spec: &InterfaceSpec| spec.addresses.iter().any(|own| own.to_canonical() == source);
        let is_others = interfaces.any(|other| other.network == spec.network && has_source(other));
        if !has_source(spec) && (spec.address_security || is_others) {
            return Way::Foreign;
        }
        let targets = self.targets();
        let own = Target::Interface(spec.name.clone());
        let Some(from) = targets.iter().find(|(_, at)| **at == own).map(|(port, _)| *port) else {
            return Way::Unknown;
        };
        let flow = Flow { network: spec.network, src: who.mac, dst: who.to, from };
        let found = explain(&self.core.table(), self.core.learned(), &flow, self.core.now_ms());
        let ports = match found.outcome {
            Ok(ports) => ports,
            // Between two applications of one machine: nothing leaves it.
            Err(DropReason::Hairpin) if who.to == who.mac => return Way::Clear,
            Err(_) => return Way::Unknown,
        };
        let sealed = |target: &Target| self.sealed(target);
        match (&ports[..], ports.iter().filter_map(|port| targets.get(port)).find_map(sealed)) {
            (_, None) => Way::Clear,
            ([_], Some(link)) if link.kind.encapsulation() == Encapsulation::Stream => Way::Stream,
            ([_], Some(link)) => Way::Sealed(link.name.clone()),
            _ if found.by == vnet::route::By::Flood => Way::Unknown,
            _ => Way::Several,
        }
    }

    fn sealed(&self, target: &Target) -> Option<&LinkSpec> {
        let Target::Link(name) = target else { return None };
        let link = self.current().links.iter().map(|item| &item.spec).find(|spec| spec.name == *name)?;
        link.security.peer.as_ref().map(|_| link)
    }

    /// Lets the datagrams of a session in `network` take the kernel's own path across the sealed link `link`: what application `by`
    /// sends from port `own` to `peer`, and the answers. What belongs to IPv6 takes the link as before, and so does what this host sends
    /// beyond the limits. Returns false if the application must not have the session's keys.
    pub fn admit_sealed(
        &self,
        by: Application,
        who: &Wayfarer<'_>,
        (own, peer): (u16, SocketAddr),
        (network, link): (NetworkId, &str),
    ) -> bool {
        let (IpAddr::V4(source), SocketAddr::V4(peer)) = (who.source, peer) else { return true };
        let out = SealedDatagram { src: SocketAddrV4::new(source, own), dst: peer };
        let interface = self.interfaces.get(who.interface);
        let Some((interface, link)) = interface.zip(self.links.get(link)) else { return false };
        let (own, peer) = ((who.mac, interface.port), (who.to, link.link.port()));
        self.sealed_sessions().admit(by, SealedSession { network, own, peer, out })
    }

    /// All sessions that were admitted and have not ended.
    pub fn sealed_sessions(&self) -> &Arc<SealedSessions> {
        self.core.sealed_sessions()
    }

    /// Keys of a session between two applications at the ends of a link ([`vnet::link::Link::application_keys`]).
    pub fn application_keys(
        &self,
        link: &str,
        epoch: Option<u8>,
        opens: bool,
        context: &[u8],
    ) -> Option<(u8, ApplicationKeys)> {
        self.links.get(link)?.link.application_keys(epoch, opens, context)
    }
}

#[cfg(test)]
mod tests {
    use vnet::link::sealed::pki::{Flaw, Pki};

    use super::*;
    use crate::config::parse;

    fn mac(last: u8) -> Mac {
        Mac([0x52, 0x54, 0, 0, 0, last])
    }

    #[test]
    fn the_way_of_a_container_is_that_of_its_frames() {
        let dir = tempfile::tempdir().unwrap();
        let files = Pki::new(dir.path()).issue("h1", 1, Flaw::None, &[]);
        let (ca, certificate, key) = (files.ca.display(), files.certificate.display(), files.key.display());
        let mut text =
            "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[[network]]\nid = 7\n".to_string();
        text += &format!("[identity]\nca = \"{ca}\"\ncertificate = \"{certificate}\"\nkey = \"{key}\"\n");
        for (name, more) in [
            ("c1", "mac = \"52:54:00:00:00:01\"\naddresses = [\"10.0.0.1\"]"),
            ("c2", "mac = \"52:54:00:00:00:06\"\naddresses = [\"10.0.0.2\"]\naddress_security = true"),
            ("c3", "network = 7"),
        ] {
            let socket = dir.path().join(name).display().to_string();
            text += &format!(
                "[[interface]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n{more}\n"
            );
        }
        for (number, more) in [
            (2, "sealed = true\nnetworks = [1]"),
            (3, "trusted = true\nnetworks = [1]"),
            (4, "sealed = true\nnetworks = [1]\nencapsulation = \"stream\""),
        ] {
            text += &format!("[[link]]\nname = \"h{number}\"\nremote = \"10.1.2.{number}:9000\"\n{more}\n");
        }
        for (last, to) in [(2, "h2"), (3, "h3"), (4, "h4"), (5, "h2"), (5, "h3")] {
            text += &format!("[[route]]\ndst = \"{}\"\nto = \"link {to}\"\n", mac(last));
        }
        let engine = Engine::start(parse("f", &text).unwrap().desired).unwrap();
        let way = |interface, source: &str, to| {
            engine.way_of(&Wayfarer { interface, mac: mac(1), source: source.parse().unwrap(), to: mac(to) })
        };
        assert_eq!(way("c1", "10.0.0.1", 2), Way::Sealed("h2".into()));
        assert_eq!(way("c1", "10.0.0.1", 3), Way::Clear);
        assert_eq!(way("c1", "10.0.0.1", 4), Way::Stream);
        assert_eq!(way("c1", "10.0.0.1", 5), Way::Several);
        assert_eq!(way("c1", "10.0.0.1", 6), Way::Clear, "on this host");
        assert_eq!(way("c1", "10.0.0.1", 9), Way::Unknown, "flooded");
        assert_eq!(way("c1", "10.0.0.9", 2), Way::Sealed("h2".into()), "nobody else's address");
        assert_eq!(way("c1", "10.0.0.2", 2), Way::Foreign, "another container's address");
        assert_eq!(way("c1", "::ffff:10.0.0.2", 2), Way::Foreign, "in another spelling");
        assert_eq!(way("c2", "10.0.0.9", 2), Way::Foreign, "none of its addresses");
        assert_eq!(way("c3", "10.0.0.2", 9), Way::Unknown, "no link carries its network");
        assert_eq!(way("gone", "10.0.0.1", 2), Way::Unknown);
        assert_eq!(way("c1", "10.0.0.1", 1), Way::Clear, "its own address");
        let network = |id| NetworkId::new(id).unwrap();
        assert!(engine.has_sealed_links(None) && engine.has_sealed_links(Some(&[network(1)])));
        assert!(!engine.has_sealed_links(Some(&[network(7)])));
        assert_eq!(engine.application_keys("h2", None, true, b""), None, "no handshake yet");
        assert_eq!(engine.application_keys("h3", None, true, b""), None);
        engine.stop();
    }
}
