//! How operations end: completions, deadlines, dead peers.

use std::net::SocketAddr;

use super::super::channel::{Assembled, Channel, Form, Reports, Source, What};
use super::super::endpoint::{Completion, Kind, Peer};
use super::super::status::Status;
use super::super::window::Timeout;
use super::super::wire::Body;
use super::{Engine, Purpose};

/// Interval at which the timers are checked: half the shortest timer, and where a path loses packets half the timeout of tails.
const LOOK_NS: u64 = 500_000;
const LOOK_LOSSY_NS: u64 = 125_000;
/// Interval at which the deadlines of operations are checked.
const DEADLINES_NS: u64 = 50_000_000;
/// Number of idle channels that a full table closes at once, so that looking for them costs little for each new channel.
const EVICTED: usize = 64;

impl Engine {
    /// Ends an operation and queues its completion.
    pub(super) fn complete_op(&mut self, id: u32, status: Status, len: u64) {
        let Some(op) = self.ops.remove(id) else { return };
        if let Form::Read { .. } = op.form {
            // The memory belongs to the application again, so late bytes must not find the pull.
            if let Some(pull) = op.pull {
                self.remove_pull(pull);
            }
        } else if !op.is_eager {
            // Otherwise the target has reported the end itself.
            let unknown = matches!(status, Status::TimedOut | Status::Cancelled).then_some(status);
            self.stop_serving(op.channel, Source::Offer(id), unknown);
        }
        let mut peer = None;
        if let Some(own) = self.channels.get_mut(op.channel) {
            peer = Some(Peer { address: own.address, endpoint: op.to });
            own.uses -= 1;
            own.fetching -= u32::from(op.is_fetching);
            let flow = own.flow(op.to);
            flow.writes_offered -= u32::from(op.is_offered_write() && op.sent > 0);
            if status == Status::Success && op.is_seen() {
                flow.not_ready_since = None;
            }
            self.make_ready(op.channel);
        }
        let is_reported = match op.reports {
            Reports::Any => true,
            Reports::Failure | Reports::LateFailure => status != Status::Success,
            Reports::Nothing => false,
        };
        if let Some(peer) = peer.filter(|_| is_reported) {
            let kind = match op.form {
                Form::Message { .. } => Kind::Send,
                Form::Write { .. } | Form::Placed { .. } => Kind::Write,
                Form::Read { .. } => Kind::Read,
                Form::Atomic { .. } => Kind::Atomic,
            };
            let (context, tag, data) = (op.context, None, None);
            let (offset, is_released, is_late) = (0, false, op.reports == Reports::LateFailure);
            let completion = Completion {
                kind,
                status,
                context,
                len,
                tag,
                data,
                peer,
                offset,
                is_released,
                is_late,
                buffer: None,
            };
            self.report(op.endpoint, completion);
        }
        if let Some(bytes) = op.owned {
            self.recycle(bytes);
        }
    }

    /// Closes a channel: everything on it ends with `status`.
    pub(super) fn fail_channel(&mut self, number: u32, status: Status) {
        if self.channels.get(number).is_none() {
            return;
        }
        self.counters.failed_channels += 1;
        let pulls =
            self.pulls.numbers(|pull| pull.channel == number && !matches!(pull.purpose, Purpose::Read(_)));
        for id in pulls {
            let Some(pull) = self.remove_pull(id) else { continue };
            match pull.purpose {
                Purpose::Message(endpoint, mut completion) => {
                    completion.status = status;
                    self.report(endpoint, *completion);
                }
                // Arrivals may wait behind it whose writes are successes at their origin already.
                Purpose::Write { endpoint, place: Some(place), .. } => {
                    self.write_ended(number, endpoint, place, None);
                }
                _ => {}
            }
        }
        for id in self.ops.numbers(|op| op.channel == number) {
            self.complete_op(id, status, 0);
        }
        if let Some(assembly) = self.take_assembly(number)
            && let Assembled::Posted(_, mut completion) = assembly.target
        {
            completion.status = status;
            self.report(assembly.to, *completion);
        }
        self.endpoints.iter_mut().flatten().for_each(|endpoint| endpoint.forget_offers(number));
        self.remove_channel(number);
    }

    fn remove_channel(&mut self, number: u32) {
        if let Some(channel) = self.channels.remove(number) {
            self.kept_bytes -= channel.kept_bytes();
            self.addresses.remove(&channel.address);
            self.closed += 1;
        }
    }

    /// Closes a channel on which nothing is under way, and tells the peer.
    fn dismiss(&mut self, number: u32) {
        let Some(channel) = self.channels.get(number) else { return };
        if channel.peer.is_some() {
            self.resets.push_back((channel.address, channel.session));
        }
        self.remove_channel(number);
    }

    /// Makes room for new channels: closes those that have been idle for the longest time. Channels of peers that have proved
    /// nothing go first, so that forged handshakes only displace each other.
    pub(super) fn evict(&mut self) {
        let rank =
            |channel: &Channel| (!channel.is_unproven(), channel.heard_at.unwrap_or(channel.opened_at));
        let mut idle: Vec<(bool, u64, u32)> = vec![];
        for number in self.channels.numbers(Channel::is_idle) {
            let Some((is_proven, since)) = self.channels.get(number).map(rank) else { continue };
            idle.push((is_proven, since, number));
        }
        idle.sort_unstable();
        idle.iter().take(EVICTED).for_each(|(_, _, number)| self.dismiss(*number));
    }

    /// Checks all timers. The caller should call it often, at the latest at `wake_at`.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        let every = if self.is_lossy { LOOK_LOSSY_NS } else { LOOK_NS };
        if now.saturating_sub(self.looked_at) < every {
            return;
        }
        self.looked_at = now;
        self.is_lossy = self.channels.iter().any(|channel| channel.window.is_lossy(now));
        for number in self.channels.numbers(|_| true) {
            self.look_at_channel(now, number);
        }
        if now.saturating_sub(self.deadlines_at) >= DEADLINES_NS {
            self.deadlines_at = now;
            for id in self.ops.numbers(|op| op.deadline <= now) {
                self.complete_op(id, Status::TimedOut, 0);
            }
        }
    }

    /// Addresses of peers that have left HELLO unanswered for `hello` ns, or the packets of an open channel for `silence` ns.
    pub fn silent(&self, now: u64, hello: u64, silence: u64) -> impl Iterator<Item = SocketAddr> {
        let is_silent = move |channel: &&Channel| match channel.peer {
            None => now.saturating_sub(channel.opened_at) >= hello,
            Some(_) => channel.local.is_none() && channel.window.is_silent(now, silence),
        };
        self.channels.iter().filter(is_silent).map(|channel| channel.address)
    }

    /// Whether the peer at `address` has proven itself on an open channel, and is not silent there.
    pub fn hears(&self, now: u64, address: SocketAddr, silence: u64) -> bool {
        let channel = self.addresses.get(&address).and_then(|number| self.channels.get(*number));
        channel.is_some_and(|own| {
            own.peer.is_some() && !own.is_unproven() && !own.window.is_silent(now, silence)
        })
    }

    /// Whether there is a channel to `address`, open or not.
    pub fn has_channel(&self, address: SocketAddr) -> bool {
        self.addresses.contains_key(&address)
    }

    fn look_at_channel(&mut self, now: u64, number: u32) {
        let dead_after = self.config.dead_after_ns;
        let Some(channel) = self.channels.get_mut(number) else { return };
        if channel.peer.is_none() {
            if now.saturating_sub(channel.opened_at) >= dead_after {
                self.fail_channel(number, Status::Unreachable);
            } else if now >= channel.hello_at {
                self.make_ready(number);
            }
            return;
        }
        let has_had_time = now.saturating_sub(channel.opened_at) >= dead_after;
        if has_had_time && channel.is_unproven() && channel.is_idle() {
            return self.dismiss(number);
        }
        let mut is_ready =
            channel.flows.iter().any(|flow| flow.paused_until != 0 && now >= flow.paused_until);
        match channel.window.tick(now, dead_after) {
            Timeout::Nothing => {}
            Timeout::Resend => is_ready = true,
            Timeout::Dead => return self.fail_channel(number, Status::Unreachable),
        }
        let is_quiet = now.saturating_sub(channel.last_sent_at) >= self.config.keepalive_ns;
        if is_quiet {
            let ops = &self.ops;
            channel.flows.iter_mut().for_each(|flow| flow.sent.retain(|id| ops.get(*id).is_some()));
        }
        if is_quiet && channel.window.is_empty() && channel.control.is_empty() && channel.has_work() {
            channel.last_sent_at = now;
            self.control(number, What::Control(Body::Noop, 0));
        }
        if is_ready {
            self.make_ready(number);
        }
        self.give_up_on_endpoints(now, number);
    }

    /// Ends messages whose endpoint was not ready for too long.
    fn give_up_on_endpoints(&mut self, now: u64, number: u32) {
        let patience = match self.config.not_ready_ns {
            0 => return,
            patience => patience,
        };
        let Some(channel) = self.channels.get_mut(number) else { return };
        let mut ended = vec![];
        for flow in &mut channel.flows {
            let is_over = flow.not_ready_since.is_some_and(|since| now.saturating_sub(since) >= patience);
            // During a pause no message is in flight that the endpoint might still accept.
            if is_over && now < flow.paused_until {
                flow.not_ready_since = None;
                ended.extend(flow.waiting());
            }
        }
        for id in ended {
            if self.ops.get(id).is_some_and(|op| op.is_seen() && op.seq.is_some()) {
                self.complete_op(id, Status::NotReady, 0);
            }
        }
    }

    /// Latest time at which `tick` or `depart` has to be called again; it may have passed. `None`: only after the next packet or
    /// operation.
    pub fn wake_at(&self, now: u64) -> Option<u64> {
        let mut wake: Option<u64> = None;
        let mut at = |time: u64| wake = Some(wake.map_or(time, |wake| wake.min(time)));
        if !self.ready.is_empty() || !self.short.is_empty() || !self.resets.is_empty() {
            at(now);
        }
        if !self.limited.is_empty() {
            at(self.limited_until);
        }
        for channel in self.channels.iter() {
            if channel.peer.is_none() {
                at(channel.hello_at);
                continue;
            }
            channel.arrivals.due().into_iter().chain(channel.window.deadline()).for_each(&mut at);
            if channel.has_work() {
                at(channel.last_sent_at + self.config.keepalive_ns);
                let pauses = channel.flows.iter().map(|flow| flow.paused_until).filter(|until| *until > now);
                pauses.for_each(&mut at);
            }
        }
        if self.ops.len() > 0 {
            at(now + DEADLINES_NS);
        }
        wake
    }
}
