//! What the engine of a guest's process asks about its peers: how they are reached, and the keys of sessions with those behind sealed links.
//!
//! A process of a container asks at the meeting point. Here only the engine asks, by a socket pair, and the daemon's thread for guests answers.
//! The guest itself asks nothing: keys stay in the daemon.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::nic::{Nic, Stations};
use super::wire::Token;
use crate::daemon::MacAddress;
use crate::daemon::carrier::Neighbours;
use crate::meeting::{Message, Reach};

/// Questions of one guest that are answered in a second. Each looks up a route; a hostile guest has its engines ask about any number of
/// peers.
const QUESTIONS_PER_S: u32 = 200;

/// How much one guest has asked in this second.
#[derive(Default)]
pub(super) struct Asked(Option<(Instant, u32)>);

impl Asked {
    /// When the next question is answered, if not now.
    pub(super) fn next_at(&self, now: Instant) -> Option<Instant> {
        let (since, count) = self.0?;
        let end = since + Duration::from_secs(1);
        (count >= QUESTIONS_PER_S && now < end).then_some(end)
    }

    fn count(&mut self, now: Instant) {
        match &mut self.0 {
            Some((since, count)) if now.saturating_duration_since(*since).as_secs() == 0 => *count += 1,
            other => *other = Some((now, 1)),
        }
    }
}

/// The questions of one engine.
pub(super) struct Questions {
    pub(super) nic: Arc<dyn Nic>,
    pub(super) socket: OwnedFd,
    /// Name of the engine.
    pub(super) name: Token,
    /// The guest's address, which is the engine's.
    pub(super) own: (SocketAddr, MacAddress),
    pub(super) neighbours: Arc<Mutex<Neighbours>>,
    /// The engine got keys.
    pub(super) has_keys: bool,
}

impl Questions {
    /// Answers what has been asked, as far as the guest's bound allows it.
    pub(super) fn answer(&mut self, now: Instant, asked: &mut Asked) {
        while asked.next_at(now).is_none() {
            let mut bytes = [0; Message::BYTES_MAX];
            let message = match recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
                // Nothing, or the engine has ended: its bell says that.
                Err(_) | Ok((0, _)) => return,
                Ok((len, _)) => Message::decode(&bytes[..len]),
            };
            asked.count(now);
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
                _ => continue,
            };
            let (bytes, len) = answer.encode();
            // An engine that reads no answers asks again.
            let _ = send(&self.socket, &bytes[..len], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    fn stations(&self, peer: SocketAddr) -> Stations {
        let (own, mac) = self.own;
        Stations { own: (own.ip(), mac), peer: self.neighbours.lock().known(peer.ip()) }
    }

    /// Readable when the engine has asked.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
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
        let mut questions = Questions {
            nic: Arc::new(nic.clone()),
            socket,
            name: [1; 16],
            own: (own, nic.mac),
            neighbours: Arc::clone(&neighbours),
            has_keys: false,
        };
        let (now, mut asked) = (Instant::now(), Asked::default());
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
            questions.answer(now, &mut asked);
            engine.receive().unwrap()
        };
        assert!(
            matches!(ask(reach, now), Some(Heard::Reached(at, Reach::NotYet)) if at == peer),
            "no MAC address"
        );
        assert!(matches!(ask(key, now), Some(Heard::Keys(7, Err(Reach::NotYet)))));
        assert!(ask(Message::Named([0; 16]), now).is_none());
        neighbours.lock().learn(peer.ip(), [2; 6]);
        assert!(matches!(ask(reach, now), Some(Heard::Reached(_, Reach::Sealed))));
        assert!(matches!(ask(key, now), Some(Heard::Keys(7, Ok(_)))));
        let answered = (0..2 * QUESTIONS_PER_S).take_while(|_| ask(reach, now).is_some()).count();
        assert_eq!(answered, QUESTIONS_PER_S as usize - 5);
        let later = asked.next_at(now).unwrap();
        assert_eq!(later, now + Duration::from_secs(1));
        assert!(asked.next_at(later).is_none());
        questions.answer(later, &mut asked);
        assert!(engine.receive().unwrap().is_some(), "the last question waited");
        assert_eq!(nic.engines.1.load(Ordering::Relaxed), 0);
        drop(questions);
        assert_eq!(nic.engines.1.load(Ordering::Relaxed), 1);
    }
}
