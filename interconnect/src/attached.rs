//! What applications use: nodes and endpoints, whose engine runs in this process or in the daemon of the host.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use crate::ether::address::Bind;
use crate::meeting::Offer;
use crate::node::pages::Pages;
use crate::node::{Attachment, BounceCounters, Error, Options, RingCounters, StreamCounters};
use crate::proto::{
    Access, Completion, Counters, EndpointCounters, Key, Match, Outgoing, Peer, Receive, Seen, Shape,
    ShareSettings, Span,
};
use crate::seal::SealCounters;
use crate::{daemon, node};

/// A process on the network: a socket, the protocol's engine, and endpoints.
pub struct Node(Engine);

enum Engine {
    Process(node::Node),
    Daemon(daemon::Node),
}

/// An endpoint: the application posts operations on it and takes completions from it. Dropping it closes it.
pub struct Endpoint(Attached);

enum Attached {
    Process(node::Endpoint),
    Daemon(daemon::Endpoint),
}

impl Engine {
    /// The engine of the host's daemon, if that is offered, can be used and is to be had; otherwise that of the process.
    fn best(options: &Options) -> Result<Self, Error> {
        let can_use = matches!(options.bind, Bind::Udp(_)) && !options.own_memory;
        let meeting = options.meeting.as_deref().filter(|_| can_use);
        let offer = |name| [Offer::Vm, Offer::Daemon].into_iter().find(|offer| offer.is_seen(name));
        if let Some(offer) = meeting.and_then(offer) {
            match daemon::Node::open(options, offer == Offer::Vm) {
                Ok(node) => return Ok(Engine::Daemon(node)),
                Err(error) => eprintln!("vnet-rdma: {error}; the engine runs in this process"),
            }
        }
        node::Node::open(options).map(Engine::Process)
    }
}

impl Node {
    /// Opens a node: binds its socket, or has the daemon of the host do so, as `attachment` says.
    pub fn open(options: &Options) -> Result<Self, Error> {
        Ok(Self(match options.attachment.as_deref() {
            None | Some("auto") => Engine::best(options)?,
            Some("process" | "bounce") => Engine::Process(node::Node::open(options)?),
            Some("daemon") => Engine::Daemon(daemon::Node::open(options, false)?),
            Some("vm") => Engine::Daemon(daemon::Node::open(options, true)?),
            Some(other) => return Err(Error::Attachment(other.into())),
        }))
    }

    /// Address of the socket.
    pub fn address(&self) -> SocketAddr {
        match &self.0 {
            Engine::Process(node) => node.address(),
            Engine::Daemon(node) => node.address(),
        }
    }

    /// Returns the counters of this process's engine; `None`: the daemon runs it, whose metrics have packets only.
    pub fn counters(&self) -> Option<Counters> {
        match &self.0 {
            Engine::Process(node) => Some(node.counters()),
            Engine::Daemon(_) => None,
        }
    }

    /// Returns the counters of the rings to processes of this host.
    pub fn ring_counters(&self) -> RingCounters {
        match &self.0 {
            Engine::Process(node) => node.ring_counters(),
            Engine::Daemon(_) => RingCounters::default(),
        }
    }

    /// Returns the counters of the streams for large transfers.
    pub fn stream_counters(&self) -> StreamCounters {
        match &self.0 {
            Engine::Process(node) => node.stream_counters(),
            Engine::Daemon(_) => StreamCounters::default(),
        }
    }

    /// Returns the counters of the TCP connections that stand in for UDP.
    pub fn bounce_counters(&self) -> BounceCounters {
        match &self.0 {
            Engine::Process(node) => node.bounce_counters(),
            Engine::Daemon(_) => BounceCounters::default(),
        }
    }

    /// Returns the counters of sealing.
    pub fn seal_counters(&self) -> SealCounters {
        match &self.0 {
            Engine::Process(node) => node.seal_counters(),
            Engine::Daemon(_) => SealCounters::default(),
        }
    }

    /// Opens the endpoint with this number, or with the first free number.
    pub fn endpoint(&self, number: Option<u16>) -> Result<Endpoint, Error> {
        Ok(Endpoint(match &self.0 {
            Engine::Process(node) => Attached::Process(node.endpoint(number)?),
            Engine::Daemon(node) => Attached::Daemon(node.endpoint(number)?),
        }))
    }

    #[cfg(test)]
    pub(crate) fn process(&self) -> &node::Node {
        match &self.0 {
            Engine::Process(node) => node,
            Engine::Daemon(_) => panic!("the daemon runs the engine"),
        }
    }
}

/// Calls the same method of either kind of endpoint.
macro_rules! either {
    ($endpoint:expr, $own:ident => $call:expr) => {
        match &$endpoint.0 {
            Attached::Process($own) => $call,
            Attached::Daemon($own) => $call,
        }
    };
}

impl Endpoint {
    /// Number of the endpoint within the node.
    pub fn number(&self) -> u16 {
        either!(self, own => own.number())
    }

    /// Sets the endpoint's share of what its node sends, from now on. Endpoints that have something to send share that by `weight`, 1 to
    /// 100; an endpoint starts with 100. `rate` is the most that it sends in bytes per second, 0 is no limit. A read is sent by the endpoint that
    /// the peer has registered the memory with.
    ///
    /// # Errors
    /// There is no such weight ([`PostError::BadShare`](crate::PostError::BadShare)), or the daemon has ended the attachment.
    pub fn set_share(&self, weight: u32, rate: u64) -> Result<(), Error> {
        let share = ShareSettings { weight, rate };
        either!(self, own => own.set_share(share))
    }

    /// Counters of what the endpoint has sent, whoever runs its engine.
    ///
    /// # Errors
    /// The daemon, which runs the engine, is gone or does not answer.
    pub fn counters(&self) -> Result<EndpointCounters, Error> {
        match &self.0 {
            Attached::Process(own) => Ok(own.counters()),
            Attached::Daemon(own) => own.counters(),
        }
    }

    /// Registers memory that peers address by the returned key. Its first byte has the offset 0.
    pub fn register(&self, span: Span, access: Access) -> Result<Key, Error> {
        self.register_at(span, 0, access, None)
    }

    /// Registers memory whose first byte has the offset `base`, under `key` if one is given.
    pub fn register_at(&self, span: Span, base: u64, access: Access, key: Option<Key>) -> Result<Key, Error> {
        either!(self, own => own.register_at(span, base, access, key))
    }

    /// Allocates and registers memory.
    pub(crate) fn allocate(&self, len: usize, access: Access) -> Result<(Arc<Pages>, Key), Error> {
        let pages = match &self.0 {
            Attached::Process(_) => Pages::new(len),
            Attached::Daemon(_) => Pages::shared(len),
        };
        let pages = Arc::new(pages.map_err(Error::Memory)?);
        let key = either!(self, own => own.register_pages(&pages, access))?;
        Ok((pages, key))
    }

    /// Deregisters memory. When this call returns, no peer reads or writes the memory any more. The application must not write into a
    /// [`Region`](crate::Region) during the call.
    pub fn deregister(&self, key: Key) -> Result<(), Error> {
        either!(self, own => own.deregister(key))
    }

    /// Posts an operation, and sends as many packets as the window allows.
    pub fn post(&self, peer: Peer, out: &Outgoing) -> Result<(), Error> {
        either!(self, own => own.post(peer, out))
    }

    /// Posts a buffer for a message.
    pub fn post_receive(&self, receive: &Receive) -> Result<(), Error> {
        either!(self, own => own.post_receive(receive))
    }

    /// Sends a message.
    pub fn send(&self, peer: Peer, span: Span, tag: Option<u64>, context: u64) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Message { tag }, span, None, context))
    }

    /// Receives a message without a tag.
    pub fn receive(&self, span: Span, context: u64) -> Result<(), Error> {
        self.post_receive(&Receive { matching: Match::default(), span, context, several: None })
    }

    /// Writes into registered memory of a peer. With `data`, the peer gets a completion when all bytes have arrived.
    pub fn write(
        &self,
        peer: Peer,
        span: Span,
        (key, at): (Key, u64),
        data: Option<u64>,
        context: u64,
    ) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Write { key, at }, span, data, context))
    }

    /// Reads from registered memory of a peer.
    pub fn read(&self, peer: Peer, span: Span, (key, at): (Key, u64), context: u64) -> Result<(), Error> {
        self.post(peer, &plain(Shape::Read { key, at }, span, None, context))
    }

    /// How packets to a peer travel now. A channel to a process of this host begins on the network.
    pub fn attachment(&self, peer: Peer) -> Attachment {
        either!(self, own => own.attachment(peer))
    }

    /// Withdraws a posted buffer. Returns false if no posted buffer has this context, or if a message is being received into
    /// it.
    pub fn cancel(&self, context: u64) -> bool {
        either!(self, own => own.cancel(context))
    }

    /// Finds an unexpected message without receiving it; `claim` reserves it for `receive_claimed`.
    pub fn peek(&self, matching: &Match, claim: Option<u64>) -> Option<Seen> {
        either!(self, own => own.peek(matching, claim))
    }

    /// Receives the message reserved with `claim`, or discards it if there is no span. Returns false if no such message exists.
    pub fn receive_claimed(&self, claim: u64, span: Option<Span>, context: u64) -> bool {
        either!(self, own => own.receive_claimed(claim, span, context))
    }

    /// Makes progress, then takes one completion if there is any.
    pub fn poll(&self) -> Option<Completion> {
        either!(self, own => own.poll())
    }

    /// Like `poll`, but leaves the arrivals of peers' writes in the queue, so that peers which write with immediate data have to
    /// wait until the application takes them.
    pub fn poll_own(&self) -> Option<Completion> {
        either!(self, own => own.poll_own())
    }

    /// Takes one queued completion without making progress.
    pub fn take(&self) -> Option<Completion> {
        either!(self, own => own.take())
    }

    /// Waits for a completion: polls, then sleeps. Returns `None` if the time expires.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Completion> {
        either!(self, own => own.wait(timeout))
    }

    /// Returns a descriptor for `poll` or `epoll` that is readable when there may be completions to take. The application
    /// should take completions until there are none, call `pause` with a time of zero so that peers get their answers, and then
    /// wait. The descriptor stays open as long as the node.
    pub fn descriptor(&self) -> Result<RawFd, Error> {
        either!(self, own => own.descriptor())
    }

    /// Wakes a thread that sleeps on the endpoint's descriptor, or in `pause` or `wait`.
    pub fn wake(&self) {
        either!(self, own => own.wake());
    }

    /// Sleeps until there may be completions to take, or until the time expires.
    pub fn pause(&self, timeout: Duration) {
        either!(self, own => own.pause(timeout));
    }
}

fn plain(shape: Shape, span: Span, data: Option<u64>, context: u64) -> Outgoing {
    Outgoing { shape, span, data, context, is_buffered: false, is_quiet: false }
}
