//! Notes of interfaces: likely misconfigurations of guests, derived from the frames that are dropped because of them.

use std::collections::HashMap;
use std::net::IpAddr;

use super::desired::*;
use super::engine::Engine;
use super::open_close::LiveInterface;
use vnet::frame::{NetworkId, PortId};
use vnet::stats::Sent;
use vnet::wire::ethernet::{HEADER_LEN, Mac};

/// A frame that exceeded the MTU of its destination interface.
struct Oversize {
    sent: Sent,
    /// The destination interface.
    to: String,
    mtu: u32,
}

/// Mistakes that concern more than one interface.
pub(super) struct Mistakes {
    /// Recent drops.
    oversize: Vec<Oversize>,
    /// Interfaces by the IP addresses that they list.
    owners: HashMap<(NetworkId, IpAddr), Vec<String>>,
}

/// See `dispatch/share.rs`.
const EXCESS: &str = "the guest's frames have more descriptors or segments than a driver needs, so they wait";

impl Mistakes {
    /// Collects the IP addresses, and the recent oversize drops, of all interfaces; their senders are guests of this or another host.
    pub fn of(engine: &Engine) -> Mistakes {
        let oversize = |(name, live): (&String, &LiveInterface)| {
            let sent = live.stats.last_oversize.lately()?;
            Some(Oversize { sent, to: name.clone(), mtu: live.mtu() })
        };
        let mut owners: HashMap<_, Vec<String>> = HashMap::new();
        for Item { spec, .. } in &engine.current().interfaces {
            for address in &spec.addresses {
                owners.entry((spec.network, *address)).or_default().push(spec.name.clone());
            }
        }
        Mistakes { oversize: engine.interfaces.iter().filter_map(oversize).collect(), owners }
    }

    /// The notes of an interface, one sentence for each likely misconfiguration.
    pub fn notes(&self, spec: &InterfaceSpec, live: &LiveInterface) -> Vec<String> {
        let mut notes = live.interface.notes();
        notes.extend(self.of_guest(spec, live.port, live.stats.last_bad_source.lately()));
        notes.extend(self.of_addresses(spec));
        notes.extend(live.drive.gauge.has_excess().then(|| EXCESS.to_owned()));
        notes
    }

    /// Notes about IP addresses that other interfaces list, too.
    fn of_addresses(&self, spec: &InterfaceSpec) -> Vec<String> {
        let shared = |address: &IpAddr| {
            let owners = self.owners.get(&(spec.network, *address))?;
            let other = owners.iter().find(|name| **name != spec.name)?;
            Some(format!("interface {other} lists its address {address}, too; give each guest its own"))
        };
        spec.addresses.iter().filter_map(shared).collect()
    }

    /// Notes about the guest at `port`; `refused` is the last frame that port security dropped there.
    fn of_guest(&self, spec: &InterfaceSpec, port: PortId, refused: Option<Sent>) -> Vec<String> {
        let mut notes = vec![];
        if let (true, Some(ours), Some(refused)) = (spec.port_security, spec.mac, refused) {
            let from = Mac(refused.mac);
            notes.push(format!(
                "its frames come from {from}, but port security admits only {ours}; give the guest that address, or set mac"
            ));
        }
        for Oversize { sent, to, mtu } in &self.oversize {
            let payload = sent.len.saturating_sub(HEADER_LEN);
            let advice = format!("give all guests of network {} the same MTU", spec.network.get());
            if *to == spec.name {
                let from = Mac(sent.mac);
                notes.push(format!(
                    "a packet of {payload} bytes from {from} exceeds its MTU of {mtu}; {advice}"
                ));
            } else if PortId(sent.port) == port {
                notes.push(format!(
                    "its guest sends packets of {payload} bytes, but interface {to} takes {mtu}; {advice}"
                ));
            }
        }
        notes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_of_a_mistaken_mtu_are_told() {
        let sent = Sent { mac: [2, 0, 0, 0, 0, 9], port: 3, len: 9014 };
        let mistakes = Mistakes {
            oversize: vec![Oversize { sent, to: "c2".into(), mtu: 1500 }],
            owners: HashMap::new(),
        };
        let notes = |name: &str, port| {
            let spec = InterfaceSpec { name: name.into(), ..InterfaceSpec::default() };
            mistakes.of_guest(&spec, PortId(port), None).join("\n")
        };
        let advice = "give all guests of network 1 the same MTU";
        assert_eq!(
            notes("c2", 4),
            format!("a packet of 9000 bytes from 02:00:00:00:00:09 exceeds its MTU of 1500; {advice}")
        );
        assert_eq!(
            notes("c1", 3),
            format!("its guest sends packets of 9000 bytes, but interface c2 takes 1500; {advice}")
        );
        assert_eq!(notes("c3", 5), "");
    }

    #[test]
    fn a_guest_with_another_address_is_told_only_with_port_security() {
        let refused = Some(Sent { mac: [2, 0, 0, 0, 0, 9], port: 3, len: 60 });
        let notes = |port_security, mac: Option<&str>| {
            let mac = mac.map(|mac| mac.parse().unwrap());
            let spec = InterfaceSpec { mac, port_security, ..InterfaceSpec::default() };
            Mistakes { oversize: vec![], owners: HashMap::new() }
                .of_guest(&spec, PortId(3), refused)
                .join("\n")
        };
        assert_eq!(
            notes(true, Some("52:54:00:00:00:01")),
            "its frames come from 02:00:00:00:00:09, but port security admits only 52:54:00:00:00:01; give the guest that \
             address, or set mac"
        );
        assert_eq!(notes(false, Some("52:54:00:00:00:01")), "");
        assert_eq!(notes(true, None), "");
    }
}
