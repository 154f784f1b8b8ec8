//! How a frame would be forwarded on this host, and why (`vnet trace`).
//!
//! The rule table, the learned addresses and the guard explain their decision (`route::explain`). The dispatchers' caches are
//! queried, too: they decide about known flows, with the same result. A trace learns no address and sends no frame.

use super::api;
use super::desired::Target;
use super::engine::{Engine, EngineError};
use vnet::frame::{NetworkId, PortId};
use vnet::interface::State;
use vnet::kernel::Known;
use vnet::link::LinkState;
use vnet::route::{By, Flow, explain};
use vnet::stats::DropReason;
use vnet::wire::ethernet::Mac;

/// The stage that decided about a frame, and its reason.
struct Decision {
    by: &'static str,
    why: String,
    guard: String,
    rules: Vec<u32>,
    priority: Option<u8>,
}

impl Engine {
    /// Explains how a frame would be forwarded. Without `from` it enters at the port of its source address.
    ///
    /// # Errors
    /// `from` does not exist, or is absent and the source is unknown.
    pub fn trace(
        &self,
        network: NetworkId,
        src: Mac,
        dst: Mac,
        from: Option<&Target>,
    ) -> Result<api::Trace, EngineError> {
        let targets = self.targets();
        let from = match from {
            Some(target) => {
                let found = targets.iter().find(|(_, at)| *at == target).map(|(port, _)| *port);
                found.ok_or_else(|| EngineError::no(target))?
            }
            None => self.port_of(network, src)?,
        };
        let flow = Flow { network, src, dst, from };
        let known = Known { network, from, dst, src, datagram: None };
        let kernel_ms = self.core.kernel_if_open().and_then(|kernel| kernel.lease_ms(&known));
        let cached_by = self.ask_caches(&flow).iter().map(|answer| answer.dispatcher).collect();
        let found = explain(&self.core.table(), self.core.learned(), &flow, self.core.now_ms());
        let Decision { by, why, guard, rules, priority } =
            self.decision(dst, targets.get(&from), found.by, found.outcome.as_ref().err().copied());
        let name = |port: &PortId| targets.get(port).map(ToString::to_string).unwrap_or_default();
        let (ports, drop) = match found.outcome {
            Ok(ports) => (ports, None),
            Err(reason) => (vec![], Some(reason.name().to_string())),
        };
        let copies =
            ports.iter().filter_map(|port| targets.get(port)).filter_map(|at| self.traced_copy(at)).collect();
        let to = ports.iter().map(name).collect();
        let from = name(&from);
        Ok(api::Trace {
            network,
            src,
            dst,
            from,
            by: by.into(),
            why,
            guard,
            rules,
            priority,
            cached_by,
            kernel_ms,
            to,
            copies,
            drop,
        })
    }

    /// The decision as text. `from` is the frame's origin, `reason` the guard's drop reason.
    fn decision(&self, dst: Mac, from: Option<&Target>, by: By, reason: Option<DropReason>) -> Decision {
        let (mut rules, mut decisive, mut guard) = (vec![], None, "admitted".to_string());
        let (by, why) = match by {
            By::Guard => {
                guard = reason.map(|reason| reason.name().into()).unwrap_or_default();
                (
                    "guard",
                    reason.map_or("it may not enter".into(), |r| format!("it may not enter: {}", r.help())),
                )
            }
            By::Rules { priority, rules: found } => {
                rules.extend(found.iter().map(|rule| rule.index));
                decisive = Some(priority);
                let indices: Vec<_> = rules.iter().map(ToString::to_string).collect();
                let shared = match rules.len() {
                    1 => String::new(),
                    2 => "; two rules of equal priority: both get the frame".into(),
                    count => format!("; {count} rules of equal priority: each gets the frame"),
                };
                ("rules", format!("route {} of priority {priority}{shared}", indices.join(" and ")))
            }
            By::Pinned => ("configured", format!("{dst} is configured or published there")),
            By::Learned { age_s, frozen } => {
                let frozen = if frozen { ", frozen there" } else { "" };
                ("learned", format!("{dst} was heard there {age_s} s ago{frozen}"))
            }
            By::Flood => {
                let limit = self.storm_limit(from);
                ("flood", format!("{dst} is a group address or unknown, so the network is flooded{limit}"))
            }
            By::Nothing => ("nothing", "no route applies and the network does not learn".into()),
        };
        Decision { by, why, guard, rules, priority: decisive }
    }

    /// The port at which this host knows an address.
    fn port_of(&self, network: NetworkId, mac: Mac) -> Result<PortId, EngineError> {
        let known = self.known();
        let found = known.iter().find(|entry| entry.mac == mac && entry.network == network);
        Ok(found.ok_or(EngineError::UnknownSource(mac))?.port)
    }

    /// The storm limit of an interface, as text.
    fn storm_limit(&self, from: Option<&Target>) -> String {
        let Some(Target::Interface(name)) = from else { return String::new() };
        let item = self.current.interfaces.iter().find(|item| item.spec.name == *name);
        let limit =
            item.map(|item| format!(", within its storm limit of {} frames/s", item.spec.storm_limit));
        limit.unwrap_or_default()
    }

    /// A copy to a destination, with the destination's state.
    fn traced_copy(&self, to: &Target) -> Option<api::TracedCopy> {
        let (state, mtu, remote) = match to {
            Target::Interface(name) => {
                let live = self.interfaces.get(name)?;
                let state = match live.state() {
                    State::Up => "up".into(),
                    State::Down(reason) => format!("down ({reason})"),
                    State::Broken(reason) => format!("broken ({reason})"),
                };
                (state, live.mtu(), None)
            }
            Target::Link(name) => {
                let link = &self.links.get(name)?.link;
                let state = match link.state() {
                    LinkState::Up => "up".into(),
                    LinkState::Degraded(reason) => format!("degraded ({reason})"),
                    LinkState::Down(reason) | LinkState::Unreachable(reason) => format!("down ({reason})"),
                };
                let spec = self.current.links.iter().find(|item| item.spec.name == *name);
                (state, u32::from(link.path_mtu()), spec.map(|item| item.spec.remote_text()))
            }
        };
        Some(api::TracedCopy { to: to.to_string(), state, mtu, remote, next: None, silent: None })
    }
}
