//! What the engine of a guest's process asks about its peers: how they are reached, and the keys of sessions with those behind sealed links.
//!
//! A process of a container asks at the meeting point. Here only the engine asks, by a socket pair, and the daemon's thread for guests answers.
//! The guest itself asks nothing: keys stay in the daemon.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::nic::{Nic, Stations};
use super::per_second::PerSecond;
use super::wire::Token;
use crate::daemon::MacAddress;
use crate::daemon::carrier::Neighbours;
use crate::meeting::{Message, Reach};

/// Questions of one engine that are answered in a second, as of a process in a container. Each looks up a route; a hostile guest has its engines
/// ask about any number of peers.
const QUESTIONS_PER_S: u32 = 100;

/// The questions of one engine.
pub(super) struct Questions {
    nic: Arc<dyn Nic>,
    socket: OwnedFd,
    /// Name of the engine.
    name: Token,
    /// The guest's address, which is the engine's.
    own: (SocketAddr, MacAddress),
    neighbours: Arc<Mutex<Neighbours>>,
    /// The engine got keys.
    has_keys: bool,
    /// Questions that were answered.
    answered: PerSecond,
    /// When questions are answered again, if not now.
    answers_at: Option<Instant>,
}

impl Questions {
    pub(super) fn new(
        nic: Arc<dyn Nic>,
        socket: OwnedFd,
        name: Token,
        own: (SocketAddr, MacAddress),
        neighbours: Arc<Mutex<Neighbours>>,
    ) -> Self {
        let answered = PerSecond::default();
        Self { nic, socket, name, own, neighbours, has_keys: false, answered, answers_at: None }
    }

    /// Answers what has been asked. Returns when to call again, if questions beyond the bound may wait.
    pub(super) fn answer(&mut self, now: Instant) -> Option<Instant> {
        self.answers_at = self.answered.full_until(now, QUESTIONS_PER_S);
        while self.answers_at.is_none()
            && let Some(message) = self.hear()
        {
            self.answered.takes(now, QUESTIONS_PER_S);
            self.reply(message);
            self.answers_at = self.answered.full_until(now, QUESTIONS_PER_S);
        }
        self.answers_at
    }

    /// The next question, if there is one; `Some(None)`: nonsense.
    fn hear(&self) -> Option<Option<Message>> {
        let mut bytes = [0; Message::BYTES_MAX];
        match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            // Nothing, or the engine has ended: its bell says that.
            Err(_) | Ok((0, _)) => None,
            Ok((len, _)) => Some(Message::decode(&bytes[..len])),
        }
    }

    fn reply(&mut self, message: Option<Message>) {
        let answer = match message {
            Some(Message::Reach(question)) => {
                Message::Reached(question.peer, self.nic.reach(&self.stations(question.peer)))
            }
            Some(Message::Key(request)) => {
                let stations = self.stations(request.between.peer);
                let keys = self.nic.keys(self.name, &stations, &request);
                self.has_keys |= keys.is_ok();
                // Only keys say that.
                let keys = keys.map_err(|why| if why == Reach::Sealed { Reach::NotYet } else { why });
                Message::Keys(request.ticket, keys)
            }
            _ => return,
        };
        let (bytes, len) = answer.encode();
        // The engine reads answers before it asks more than the socket holds.
        let _ = send(&self.socket, &bytes[..len], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    }

    fn stations(&self, peer: SocketAddr) -> Stations {
        let (own, mac) = self.own;
        Stations { own: (own.ip(), mac), peer: self.neighbours.lock().known(peer.ip()) }
    }

    /// Readable when the engine has asked. `None`: its questions wait.
    pub(super) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.answers_at.is_none().then(|| self.socket.as_fd())
    }
}

impl Drop for Questions {
    fn drop(&mut self) {
        if self.has_keys {
            self.nic.gone(self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;
    use crate::meeting::{Guest, Heard, KeyRequest, Question, Role};
    use crate::vm::fake::FakeGuest;

    #[test]
    fn an_engine_hears_about_peers_gets_keys_and_is_bounded() {
        let nic = FakeGuest::new(1, &Arc::default());
        *nic.reach.lock() = Reach::Sealed;
        let kind = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (socket, engine) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, kind, None).unwrap();
        let engine = Guest::on(engine);
        let neighbours = Arc::<Mutex<Neighbours>>::default();
        let [own, peer] = ["10.0.0.1:7000", "10.0.0.2:7001"].map(|at| at.parse::<SocketAddr>().unwrap());
        let own_ends = (own, nic.mac);
        let mut questions =
            Questions::new(Arc::new(nic.clone()), socket, [1; 16], own_ends, Arc::clone(&neighbours));
        let now = Instant::now();
        let between = Question { own, peer };
        let reach = Message::Reach(between);
        let (nonce, peer_nonce) = ([1; 16], [2; 16]);
        let key = Message::Key(KeyRequest {
            ticket: 7,
            role: Role::Opener,
            epoch: None,
            between,
            nonce,
            peer_nonce,
        });
        let mut ask = |message, now| {
            assert!(engine.say(message));
            let answers_at = questions.answer(now);
            assert_eq!(questions.descriptor().is_some(), answers_at.is_none());
            (engine.receive().unwrap(), answers_at)
        };
        assert!(matches!(ask(reach, now), (Some(Heard::Reached(at, Reach::NotYet)), None) if at == peer));
        assert!(matches!(ask(key, now).0, Some(Heard::Keys(7, Err(Reach::NotYet)))), "no MAC address");
        assert!(ask(Message::Named([0; 16]), now).0.is_none());
        neighbours.lock().learn(peer.ip(), [2; 6], now);
        assert!(matches!(ask(reach, now).0, Some(Heard::Reached(_, Reach::Sealed))));
        assert!(matches!(ask(key, now).0, Some(Heard::Keys(7, Ok(_)))));
        let others: Vec<_> = (5..QUESTIONS_PER_S).map(|_| ask(reach, now)).collect();
        assert!(others.iter().all(|(answer, _)| answer.is_some()));
        assert!(ask(reach, now).0.is_none(), "the bound holds for the second");
        let later = now + Duration::from_secs(1);
        assert_eq!(others.last().and_then(|(_, at)| *at), Some(later));
        assert_eq!(questions.answer(later), None);
        assert!(engine.receive().unwrap().is_some(), "the question that waited");
        assert_eq!(nic.engines.1.load(Ordering::Relaxed), 0);
        drop(questions);
        assert_eq!(nic.engines.1.load(Ordering::Relaxed), 1);
    }
}
