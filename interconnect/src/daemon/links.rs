//! Links between processes that the daemon serves: packets of one engine are given to the other one, without the network.
//!
//! All engines run in one thread, so a link is a direct call, and holds no packets. Bytes of a write or of pulled data are copied once,
//! from the registered memory of the one process to that of the other; the receiving engine checks keys, ranges and rights as
//! for packets of the network. Nothing keeps the address of bytes of the other process after the call, so its memory can be
//! unmapped as soon as its links are gone.
//!
//! A link begins as a ring does (`proto/engine/local.rs`): the elder of two engines invites the younger one by a packet on the open
//! channel, with its name here and the channel's secret. Only the holder of the other end of the channel has both, and no address is
//! compared, because containers may have the same ones. Two processes are linked if their containers or virtual machines have an
//! interface in the same network. The channel has been opened by packets of the network, which port security has let pass.
//!
//! When a link ends, packets take the sockets again, and the engines repeat what was lost.

use std::net::SocketAddr;

use super::served::Served;
use crate::meeting::Place;
use crate::proto::Departure;
use crate::proto::wire::Invite;

/// One direction of a link.
struct Way {
    /// Address by which the sender knows the other process.
    to: SocketAddr,
    /// The other process, and the address by which it knows the sender.
    slot: usize,
    from: SocketAddr,
    /// The receiving engine has refused a packet: the link ends.
    is_broken: bool,
}

/// What the links know of a process.
struct Member {
    /// Identity of its container or virtual machine, as in `Place`.
    container: (u64, u64),
    /// At most one for each other process.
    ways: Vec<Way>,
    /// Number of channels that its engine had closed when ways without a channel were last looked for.
    closed: u64,
}

pub(super) type Processes = [Option<Box<Served>>];

/// The links between all processes of a room, which are named by their places there.
#[derive(Default)]
pub(super) struct Links {
    members: Vec<Option<Member>>,
    places: Vec<Place>,
    /// Number of packets that have been delivered.
    delivered: u64,
    /// Header and payload of a packet that is not placed.
    packet: Vec<u8>,
}

impl Links {
    /// A process has come.
    pub(super) fn enter(&mut self, slot: usize, container: (u64, u64)) {
        if self.members.len() <= slot {
            self.members.resize_with(slot + 1, || None);
        }
        self.members[slot] = Some(Member { container, ways: vec![], closed: 0 });
    }

    /// A process goes: its links end.
    pub(super) fn leave(&mut self, slot: usize, served: &mut Processes) {
        self.end(slot, served, |_, _| true);
        self.members[slot] = None;
    }

    pub(super) fn set_places(&mut self, places: Vec<Place>, served: &mut Processes) {
        self.places = places;
        for slot in 0..self.members.len() {
            self.end(slot, served, |links, way| !links.may_meet(slot, way.slot));
        }
    }

    /// Number of packets that have been delivered.
    pub(super) fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Gives a packet to the process for which it is. Returns false if it has to take the network.
    pub(super) fn deliver(
        &mut self,
        now: u64,
        slot: usize,
        packet: &Departure,
        served: &mut Processes,
    ) -> bool {
        let Some(member) = self.members.get_mut(slot).and_then(Option::as_mut) else { return false };
        let Some(way) = member.ways.iter_mut().find(|way| way.to == packet.to && !way.is_broken) else {
            return false;
        };
        let other = served.get_mut(way.slot).and_then(Option::as_mut);
        let Some(other) = other.filter(|_| !packet.is_handshake()) else { return false };
        self.delivered += 1;
        way.is_broken = !other.take_packet(now, way.from, packet, &mut self.packet);
        true
    }

    /// After a turn of a process: links the peers that have invited it, and ends links that broke or whose channel is gone.
    pub(super) fn tend(&mut self, slot: usize, served: &mut Processes) {
        let Some(process) = served[slot].as_mut() else { return };
        let (closed, invite) = (process.closed(), process.next_invite());
        let Some(member) = self.members[slot].as_mut() else { return };
        let has_closed = std::mem::replace(&mut member.closed, closed) != closed;
        if has_closed || member.ways.iter().any(|way| way.is_broken) {
            let is_over = |_: &Self, way: &Way| way.is_broken;
            self.end(slot, served, is_over);
            let known = |served: &Processes, to| served[slot].as_ref().is_some_and(|own| own.is_local(to));
            let gone: Vec<SocketAddr> =
                self.ways(slot).map(|way| way.to).filter(|to| !known(served, *to)).collect();
            self.end(slot, served, |_, way| gone.contains(&way.to));
        }
        let mut next = invite;
        while let Some((from, invite)) = next {
            self.join(slot, from, &invite, served);
            next = served[slot].as_mut().and_then(|process| process.next_invite());
        }
    }

    fn ways(&self, slot: usize) -> impl Iterator<Item = &Way> {
        self.members.get(slot).and_then(Option::as_ref).into_iter().flat_map(|member| &member.ways)
    }

    fn may_meet(&self, a: usize, b: usize) -> bool {
        let container = |slot: usize| Some(self.members.get(slot)?.as_ref()?.container);
        let (Some(a), Some(b)) = (container(a), container(b)) else { return false };
        let place = |id| self.places.iter().find(|place| place.id == id);
        a == b || place(a).zip(place(b)).is_some_and(|(a, b)| a.may_meet(b))
    }

    /// Links a process with the one that has invited it and that it knows by `elder`.
    fn join(&mut self, slot: usize, elder: SocketAddr, invite: &Invite, served: &mut Processes) {
        let has_name = |process: &Option<Box<Served>>| {
            process.as_ref().is_some_and(|process| process.name() == invite.name)
        };
        let Some(other) = served.iter().position(has_name) else { return };
        let is_linked = self.ways(slot).any(|way| way.slot == other);
        if other == slot || is_linked || !self.may_meet(slot, other) {
            return;
        }
        let Some(own) = served[other].as_ref().and_then(|process| process.invited(&invite.secret)) else {
            return;
        };
        for (slot, other, to, from) in [(slot, other, elder, own), (other, slot, own, elder)] {
            if let Some(member) = self.members[slot].as_mut() {
                member.ways.push(Way { to, slot: other, from, is_broken: false });
            }
        }
        let is_open = [(slot, elder), (other, own)]
            .map(|(slot, to)| served[slot].as_mut().is_some_and(|process| process.set_local(to, true)));
        if is_open.contains(&false) {
            self.end(slot, served, |_, way| way.slot == other);
        }
    }

    /// Ends the links of a process for which `is_over` holds.
    fn end(&mut self, slot: usize, served: &mut Processes, is_over: impl Fn(&Self, &Way) -> bool) {
        let over: Vec<usize> = self.ways(slot).filter(|way| is_over(self, way)).map(|way| way.slot).collect();
        for other in over {
            for (slot, other) in [(slot, other), (other, slot)] {
                let Some(member) = self.members[slot].as_mut() else { continue };
                let Some(place) = member.ways.iter().position(|way| way.slot == other) else { continue };
                let way = member.ways.swap_remove(place);
                if let Some(process) = served[slot].as_mut() {
                    process.set_local(way.to, false);
                }
            }
        }
    }
}
