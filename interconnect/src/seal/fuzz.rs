//! Sealing with hostile peers and a hostile daemon, for the fuzz target.

use std::net::SocketAddr;

use super::parts::{Parts, Put};
use super::session::Session;
use super::wire::{Control, HEADER, Head};
use super::{Sealing, Way};
use crate::meeting::{Keys, Message, Question, Reach, Role};
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

/// Packets in parts over a network that loses, repeats, reorders and changes them by `script`, four bytes for each step. No changed packet
/// opens, none opens twice, and afterwards a packet opens again.
pub fn run_parts(script: &[u8]) {
    const MOST: usize = 4;
    const DATAGRAM: usize = 700;
    let from: SocketAddr = ([10, 0, 0, 2], 7000).into();
    let keys = Keys { epoch: 1, keys: std::array::from_fn(|at| at as u8) };
    let mut sealing = Session::new(&keys, Role::Opener, (5, 6), 0);
    let mut opening = Session::new(&keys, Role::Answerer, (6, 5), 0);
    let mut parts = Parts::new(MOST);
    let (mut sent, mut opened) = (Vec::<Vec<u8>>::new(), 0);
    for step in script.chunks_exact(4) {
        let [action, which, x, y] = step.try_into().expect("four bytes");
        if action % 4 == 0 || sent.is_empty() {
            let text = vec![y; 700 + usize::from(x) * 32];
            let mut bytes = vec![];
            sealing.seal_in_parts(&mut bytes, &text, Span::EMPTY, DATAGRAM);
            sent.extend(bytes.chunks(DATAGRAM).map(<[u8]>::to_vec));
            continue;
        }
        let at = sent.len() - 1 - usize::from(which) % sent.len();
        let mut datagram = sent[at].clone();
        match action % 4 {
            1 => {}
            2 => datagram[usize::from(x) % sent[at].len()] ^= y,
            _ => datagram.truncate(usize::from(x) * 3),
        }
        let Some(head) = Head::read(&datagram).filter(|head| head.last > 0) else { continue };
        let (rest, place) = (&datagram[HEADER..], parts.find(from, &head));
        let Some(place) = place.or_else(|| parts.begin(from, &head, rest.len())) else { continue };
        if let Put::Whole = parts.put(place, &head, rest)
            && let Ok(text) = opening.open(parts.take(place))
        {
            assert!(text.windows(2).all(|two| two[0] == two[1]) && text.len() >= 700);
            opened += 1;
        }
    }
    let packets = sent.iter().filter_map(|part| Head::read(part)).filter(|head| head.part == 0).count();
    assert!(opened <= packets);
    // Forged parts spoil at most the packets for which memory is kept.
    let opens = (0..=MOST).any(|_| {
        let mut bytes = vec![];
        sealing.seal_in_parts(&mut bytes, &[7; 3000], Span::EMPTY, DATAGRAM);
        let whole = bytes.chunks(DATAGRAM).find_map(|part| {
            let head = Head::read(part)?;
            let place = parts.find(from, &head).or_else(|| parts.begin(from, &head, part.len() - HEADER))?;
            matches!(parts.put(place, &head, &part[HEADER..]), Put::Whole).then_some(place)
        });
        whole.is_some_and(|place| opening.open(parts.take(place)).is_ok_and(|text| *text == [7; 3000]))
    });
    assert!(opens);
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
