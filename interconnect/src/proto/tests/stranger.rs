//! A peer that speaks the wire format packet by packet, so that it can break the rules that an engine obeys.

use std::net::SocketAddr;

use crate::proto::wire::{Body, Header, Hello};
use crate::proto::{Completion, Config, Engine, Match, Peer, Receive, Span};

/// An engine with endpoint 0, and its application's memory.
pub struct Victim {
    pub engine: Engine,
    pub memory: Vec<u8>,
    pub now: u64,
}

/// The stranger's side of its channel to the victim.
pub struct Stranger {
    pub address: SocketAddr,
    /// Session number that the victim gave the channel.
    session: u32,
    number: u32,
}

pub fn hello(epoch: u64) -> Hello {
    Hello { epoch, channel: 1, session: 9, window: 1 << 20, datagram: 1472 }
}

/// The address of stranger number `n`.
pub fn address(n: u32) -> SocketAddr {
    SocketAddr::from((std::net::Ipv4Addr::from(0x0a01_0000 + n), 7000))
}

fn encoded(session: u32, number: u32, flags: u8, body: Body) -> Vec<u8> {
    let header = Header { flags, failures: 0, session, number, ack: 0xffff_f000, map: None, body };
    header.encode().as_bytes().to_vec()
}

impl Victim {
    pub fn new(config: Config) -> Self {
        let mut engine = Engine::new(config, 1, [1; 32]);
        engine.open(Some(0)).unwrap();
        Self { engine, memory: vec![b'.'; 1 << 20], now: 1 }
    }

    pub fn span(&mut self, len: usize) -> Span {
        assert!(len <= self.memory.len());
        // SAFETY: the memory lives as long as the victim and is never resized; tests look at it only between calls of the engine.
        unsafe { Span::new(self.memory.as_mut_ptr(), len) }
    }

    /// Posts a buffer of 64 bytes for a message without a tag.
    pub fn receive(&mut self, context: u64) {
        let span = self.span(64);
        let receive = Receive { matching: Match::default(), span, context, several: None };
        self.engine.post_receive(0, &receive).unwrap();
    }

    pub fn take(&mut self, from: SocketAddr, packet: &[u8]) {
        self.now += 1000;
        self.engine.receive(self.now, from, packet, false);
    }

    /// Sends a handshake from this address.
    pub fn greet(&mut self, from: SocketAddr, hello: Hello) {
        self.greet_with(from, hello, 0);
    }

    /// The same, with flags that say what the sender can do.
    pub fn greet_with(&mut self, from: SocketAddr, hello: Hello, flags: u8) {
        self.take(from, &encoded(0, 0, flags, Body::Hello(hello)));
    }

    /// What the engine sends now.
    pub fn sent(&mut self) -> Vec<(SocketAddr, Header)> {
        self.now += 1000;
        self.engine.tick(self.now);
        let now = self.now;
        let departures = std::iter::from_fn(|| self.engine.depart(now));
        departures.map(|packet| (packet.to, Header::decode(packet.header.as_bytes()).unwrap().0)).collect()
    }

    pub fn poll(&mut self) -> Option<Completion> {
        self.engine.poll(0)
    }
}

impl Stranger {
    /// Opens a channel to the victim.
    pub fn meet(victim: &mut Victim, n: u32) -> Self {
        Self::meet_with(victim, n, 0)
    }

    /// The same, with flags that say what the stranger can do.
    pub fn meet_with(victim: &mut Victim, n: u32, flags: u8) -> Self {
        let address = address(n);
        victim.greet_with(address, hello(5), flags);
        let welcomed = victim.sent().into_iter().find_map(|(to, header)| match header.body {
            Body::Welcome(welcome) if to == address => Some(welcome.session),
            _ => None,
        });
        Self { address, session: welcomed.expect("a welcome"), number: 0xffff_f000 }
    }

    pub fn peer(&self) -> Peer {
        Peer { address: self.address, endpoint: 0 }
    }

    /// Sends the next packet in order.
    pub fn send(&mut self, victim: &mut Victim, flags: u8, body: Body, payload: &[u8]) {
        let number = self.number;
        self.number = self.number.wrapping_add(1);
        self.send_as(victim, number, flags, body, payload);
    }

    /// Sends a packet that is `ahead` of the next one in order.
    pub fn send_ahead(&self, victim: &mut Victim, ahead: u32, flags: u8, body: Body, payload: &[u8]) {
        self.send_as(victim, self.number.wrapping_add(ahead), flags, body, payload);
    }

    fn send_as(&self, victim: &mut Victim, number: u32, flags: u8, body: Body, payload: &[u8]) {
        let mut packet = encoded(self.session, number, flags, body);
        packet.extend_from_slice(payload);
        victim.take(self.address, &packet);
    }
}
