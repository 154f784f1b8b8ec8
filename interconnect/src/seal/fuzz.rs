//! Sealing with hostile peers and a hostile daemon, for the fuzz target.

use std::net::SocketAddr;

use super::wire::{Control, HEADER};
use super::{Sealing, Way};
use crate::meeting::{Keys, Message, Question, Reach};
use crate::proto::Span;

const MS: u64 = 1_000_000;
const REACHES: [Reach; 7] = [
    Reach::Clear,
    Reach::Sealed,
    Reach::NotYet,
    Reach::Stream,
    Reach::Router,
    Reach::AllClear,
    Reach::SomeSealed,
];
const TEXT: &[u8] = b"\x15 in clear text";

/// Runs `script`: steps of a kind, a number, and for packets their length and bytes. What a node sends to a peer that was once said to be behind a
/// sealed link, and not since to be clear, is never in clear text. A node at an Ethernet device gets the same steps: after an answer that does not
/// permit frames, none leaves or is taken.
pub fn run(script: &[u8]) {
    let peers: [SocketAddr; 3] =
        ["10.0.0.2:1", "10.0.0.3:2", "[fd00::1]:3"].map(|text| text.parse().unwrap());
    let mut sealing = Sealing::new(([10, 0, 0, 1], 7000).into(), false, [7; 32]);
    let mut frames = Frames { sealing: Sealing::of_frames(peers[0], false, [8; 32]), is_refused: false };
    let (mut rest, mut now, mut tickets) = (script, MS, vec![]);
    sealing.connected();
    frames.sealing.connected();
    while let [kind, number, more @ ..] = rest {
        rest = more;
        let peer = peers[usize::from(*number) % peers.len()];
        match kind % 8 {
            0 | 1 => {
                let len = rest.first().map_or(0, |len| usize::from(*len)).min(rest.len().saturating_sub(1));
                let (packet, more) = rest.get(1..).unwrap_or_default().split_at(len);
                rest = more;
                let mut packet = packet.to_vec();
                frames.exchange(now, peer, &mut packet);
                if let Some(arrived) = sealing.arrive(now, peer, &mut packet) {
                    assert!(arrived.len() <= len);
                }
            }
            2 => {
                let is_sealed = sealing.is_sealed(peer);
                match sealing.depart(now, peer, TEXT, Span::EMPTY) {
                    Way::Clear => assert!(!is_sealed),
                    Way::Sealed(session) => {
                        let mut packet = vec![];
                        session.seal(&mut packet, TEXT, Span::EMPTY);
                        assert!(packet.len() > HEADER + TEXT.len() && !contains(&packet));
                    }
                    Way::Held => {}
                }
            }
            3 => {
                let reach = REACHES[usize::from(*number / 3) % REACHES.len()];
                sealing.reached(now, peer, reach);
                frames.reached(now, peer, reach);
            }
            4 => {
                let keys = Keys { epoch: number & 3, keys: [*number; 64] };
                let ticket = tickets.pop().unwrap_or(u32::from(*number));
                sealing.keys(now, ticket, if *number < 200 { Ok(keys) } else { Err(Reach::NotYet) });
            }
            5 => now += u64::from(*number) * MS * if *kind & 64 == 0 { 1 } else { 60_000 },
            6 if *number < 8 => {
                [&mut sealing, &mut frames.sealing].into_iter().for_each(Sealing::disconnected)
            }
            6 => [&mut sealing, &mut frames.sealing].into_iter().for_each(Sealing::connected),
            _ => {
                frames.drain();
                while let Some(ask) = sealing.next_ask() {
                    if let Message::Key(request) = ask {
                        tickets.push(request.ticket);
                    }
                }
                while let Some((to, packet)) = sealing.next_packet() {
                    assert!(peers.contains(&to));
                    assert!(!contains(&packet) || !sealing.is_sealed(to));
                    let control = Control::decode(&packet);
                    assert!(control.is_none_or(|control| control.encode() == packet));
                }
                while sealing.next_ready().is_some() || sealing.next_note().is_some() {}
            }
        }
    }
}

/// A node at an Ethernet device.
struct Frames {
    sealing: Sealing,
    /// The last answer that decides does not permit frames.
    is_refused: bool,
}

impl Frames {
    /// Sends a packet, and takes one.
    fn exchange(&mut self, now: u64, peer: SocketAddr, packet: &mut [u8]) {
        let leaves = matches!(self.sealing.depart(now, peer, TEXT, Span::EMPTY), Way::Clear);
        let arrives = self.sealing.arrive(now, peer, packet).is_some();
        assert!(!self.is_refused || !leaves && !arrives);
    }

    fn reached(&mut self, now: u64, peer: SocketAddr, reach: Reach) {
        self.sealing.reached(now, peer, reach);
        if reach != Reach::NotYet {
            self.is_refused = reach != Reach::AllClear;
        }
    }

    fn drain(&mut self) {
        while let Some(ask) = self.sealing.next_ask() {
            assert_eq!(ask, Message::Reach(Question::ANY));
        }
        assert!(self.sealing.next_packet().is_none() && self.sealing.next_ready().is_none());
        while self.sealing.next_note().is_some() {}
    }
}

fn contains(packet: &[u8]) -> bool {
    packet.windows(TEXT.len()).any(|window| window == TEXT)
}
