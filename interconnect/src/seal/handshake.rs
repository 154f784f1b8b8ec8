//! New sessions: OPEN, AGREE, and keys from the daemon.

use std::net::SocketAddr;

use chacha20::rand_core::Rng;

use super::peer::{Known, Opening};
use super::session::Session;
use super::wire::Control;
use super::{ASKS_MAX, DOUBT_NS, Note, Sealing};
use crate::meeting::{KeyRequest, Keys, Message, Nonce, Question, Reach, Role};
use crate::proto::Span;

impl Sealing {
    pub(super) fn control(&mut self, now: u64, from: SocketAddr, control: Control) {
        match control {
            Control::Open { id, nonce } => {
                if self.has_daemon && (self.peers.contains_key(&from) || self.strangers_answered.takes(now)) {
                    self.opened(now, from, id, nonce);
                }
            }
            Control::Agree { to, id, epoch, nonce } => self.agreed(from, to, (id, epoch, nonce)),
            Control::Ask { id } => self.asked(now, from, id),
        }
    }

    /// The peer wants a session.
    fn opened(&mut self, now: u64, from: SocketAddr, id: u32, nonce: Nonce) {
        let peer = self.peer(now, from);
        if peer.opening.as_ref().is_some_and(|own| own.nonce > nonce) && peer.is_opening(now) {
            // Both open at once: the one with the larger nonce is answered.
            return;
        }
        if let Some(answer) = &peer.answering
            && (answer.peer_id, answer.peer_nonce) == (id, nonce)
        {
            match answer.epoch {
                Some(epoch) => {
                    let agree = Control::Agree { to: id, id: answer.id, epoch, nonce: answer.nonce };
                    return self.send(from, &agree);
                }
                None if !answer.is_due(now) => return,
                None => {}
            }
        }
        let (own_id, own_nonce) = self.fresh();
        let peer = self.peer(now, from);
        peer.opening = None;
        peer.answer(now, (own_id, own_nonce), (id, nonce));
        self.request(from, Role::Answerer, None, own_nonce, nonce);
    }

    /// The peer has answered OPEN.
    fn agreed(&mut self, from: SocketAddr, to: u32, (id, epoch, nonce): (u32, u8, Nonce)) {
        let opening = self.peers.get_mut(&from).and_then(|peer| peer.opening.as_mut());
        let Some(opening) = opening.filter(|opening| opening.id == to && opening.agreed.is_none()) else {
            return;
        };
        opening.agreed = Some(id);
        let own_nonce = opening.nonce;
        self.request(from, Role::Opener, Some(epoch), own_nonce, nonce);
    }

    /// The peer takes only sealed packets, or has no key for this id.
    fn asked(&mut self, now: u64, from: SocketAddr, id: u32) {
        if !self.has_daemon {
            return self.note(Note::Wanted, from);
        }
        let Some(peer) = self.peers.get_mut(&from) else { return };
        match peer.known {
            Known::Sealed if peer.has_lost(id) => self.open(now, from),
            Known::Clear => {
                // The answer was the same a moment ago: the two daemons disagree.
                if now.saturating_sub(peer.asked_at) < DOUBT_NS && !peer.is_asked {
                    self.note(Note::Wanted, from);
                }
                self.ask(now, from, DOUBT_NS);
            }
            _ => {}
        }
    }

    /// Sends OPEN, if its time has come.
    pub(super) fn open(&mut self, now: u64, address: SocketAddr) {
        let (id, nonce) = self.fresh();
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if peer.is_answering(now) {
            return;
        }
        let opening = peer.opening.get_or_insert_with(|| Opening::new(id, nonce));
        if !opening.is_due(now) {
            return;
        }
        opening.again(now);
        let open = Control::Open { id: opening.id, nonce: opening.nonce };
        let (is_silent, is_doubtful) = (opening.is_silent(), opening.is_doubtful());
        // Packets still arrive with earlier keys.
        let is_silent = is_silent && peer.known == Known::Sealed && peer.sealing(now).is_none();
        self.send(address, &open);
        if is_silent {
            self.note(Note::Silent, address);
        }
        if is_doubtful {
            // The link may be clear by now.
            self.ask(now, address, DOUBT_NS);
        }
    }

    /// Asks the daemon for keys.
    fn request(&mut self, peer: SocketAddr, role: Role, epoch: Option<u8>, nonce: Nonce, peer_nonce: Nonce) {
        if self.asks.len() >= ASKS_MAX || self.tickets.len() >= ASKS_MAX {
            return;
        }
        self.ticket = self.ticket.wrapping_add(1);
        let between = Question { own: self.own, peer };
        let ticket = self.ticket;
        let request = KeyRequest { ticket, role, epoch, between, nonce, peer_nonce };
        self.tickets.retain(|(_, address, own)| (*address, *own) != (peer, role));
        self.tickets.push_back((ticket, peer, role));
        self.asks.push_back(Message::Key(request));
    }

    /// The daemon gives keys, or says why not.
    pub(crate) fn keys(&mut self, now: u64, ticket: u32, answer: Result<Keys, Reach>) {
        self.answered();
        let Some(place) = self.tickets.iter().position(|(own, ..)| *own == ticket) else { return };
        let Some((_, address, role)) = self.tickets.remove(place) else { return };
        let Some(peer) = self.peers.get_mut(&address) else { return };
        let ids = match role {
            Role::Opener => peer.opening.as_ref().and_then(|own| Some((own.id, own.agreed?))),
            Role::Answerer => peer.answering.as_ref().map(|answer| (answer.id, answer.peer_id)),
        };
        let (Some(ids), Ok(keys)) = (ids, answer) else {
            match role {
                Role::Opener => peer.opening = None,
                Role::Answerer => peer.answering = None,
            }
            // What keys cannot be had for is known by now to be not sealed, or refused.
            if let Err(reach) = answer.map(|_| ()) {
                self.learn(now, address, reach);
            }
            return;
        };
        let mut session = Session::new(&keys, role, ids, now);
        if role == Role::Opener {
            let mut shown = vec![];
            session.seal(&mut shown, &[], Span::EMPTY);
            self.packets.push_back((address, shown));
        }
        peer.add(session);
        self.end_clear_text(address, Known::Sealed);
        self.counters.sessions += 1;
        let Some(peer) = self.peers.get_mut(&address) else { return };
        match role {
            Role::Opener => peer.opening = None,
            Role::Answerer => {
                let agree = peer.answering.as_mut().map(|answer| {
                    answer.epoch = Some(keys.epoch);
                    Control::Agree {
                        to: answer.peer_id,
                        id: answer.id,
                        epoch: keys.epoch,
                        nonce: answer.nonce,
                    }
                });
                agree.iter().for_each(|agree| self.send(address, agree));
            }
        }
        self.ready.push(address);
    }

    /// A key id and a nonce.
    fn fresh(&mut self) -> (u32, Nonce) {
        let mut nonce = Nonce::default();
        self.random.fill_bytes(&mut nonce);
        (self.random.next_u32(), nonce)
    }
}
