//! Entries of the queues between a process and the daemon's engine: 16 words of 64 bits in the host's byte order.
//!
//! docs/interconnect.md has the words of each kind. Decoding accepts every value of fields that a kind does not use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::proto::{
    Access, Change, Completion, Datatype, EndpointCounters, Key, Kind, Match, Peer, PostError, Seen,
    ShareSettings, Status,
};

/// Words of an entry.
pub const WORDS: usize = 16;
/// An entry.
pub type Entry = [u64; WORDS];

/// Bytes in memory that the process has registered with the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    /// The process's number of the memory.
    pub memory: u32,
    /// Offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Kind of operation to post, with its parameters at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// A message, optionally with a tag.
    Message(Option<u64>),
    /// A write into registered memory at this offset.
    Write(Key, u64),
    /// A read from registered memory at this offset.
    Read(Key, u64),
    /// An atomic operation.
    Atomic {
        /// Key of the region.
        key: Key,
        /// Offset of the first value.
        at: u64,
        /// Function applied to each value.
        change: Change,
        /// Type of the values.
        datatype: Datatype,
        /// Number of values.
        count: u16,
        /// Numbers to compare with.
        compare: Extent,
        /// Place for what was there before.
        found: Option<Extent>,
    },
}

/// A completion without anything but its result.
pub(super) fn ended(kind: Kind, status: Status, context: u64, peer: Peer) -> Completion {
    Completion {
        kind,
        status,
        context,
        len: 0,
        tag: None,
        data: None,
        peer,
        offset: 0,
        is_released: true,
        is_late: false,
        buffer: None,
    }
}

/// What a process asks of the daemon's engine. A request with a ticket is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are those of the engine's calls")]
pub enum Submission {
    /// Opens the endpoint with this number, or with the first free one.
    Open { ticket: u64, number: Option<u16> },
    /// Closes an endpoint.
    Close { ticket: u64, endpoint: u16 },
    /// Registers memory for peers.
    Register { ticket: u64, endpoint: u16, extent: Extent, base: u64, access: Access, key: Option<Key> },
    /// Deregisters memory.
    Deregister { ticket: u64, key: Key },
    /// Sets the datagram size for peers at this address.
    Route { address: SocketAddr, bytes: u64 },
    /// Posts an operation.
    Post { endpoint: u16, peer: Peer, task: Task, extent: Extent, data: Option<u64>, context: u64 },
    /// Posts a buffer.
    Receive { endpoint: u16, matching: Match, extent: Extent, context: u64, several: Option<u64> },
    /// Withdraws a buffer.
    Cancel { ticket: u64, endpoint: u16, context: u64 },
    /// Looks for an unexpected message.
    Peek { ticket: u64, endpoint: u16, matching: Match, claim: Option<u64> },
    /// Receives or discards a claimed message.
    Claimed { ticket: u64, endpoint: u16, claim: u64, extent: Option<Extent>, context: u64 },
    /// Asks whether packets to the peer at this address go to a process of the daemon without the network.
    Way { ticket: u64, peer: SocketAddr },
    /// Sets an endpoint's share of what the process sends.
    Share { ticket: u64, endpoint: u16, share: ShareSettings },
    /// Asks for an endpoint's counters.
    Count { ticket: u64, endpoint: u16 },
}

/// What the daemon's engine tells a process.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// A completion of this endpoint.
    Completed(u16, Completion),
    /// The answer to the request with this ticket.
    Answered(u64, Answer),
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The number of an endpoint, a key, or 1 for yes and 0 for no.
    Done(u64),
    /// The message that was looked for.
    Seen(Seen),
    /// The counters of an endpoint.
    Counted(EndpointCounters),
    /// The engine refused the request.
    Refused(PostError),
}

const GIVEN: u64 = 1;
const DATA: u64 = 2;
const TAG: u64 = 4;
const FROM: u64 = 8;
const V6: u64 = 16;
const READ: u64 = 32;
const WRITE: u64 = 64;
const FOUND: u64 = 128;
const RELEASED: u64 = 256;
const LATE: u64 = 512;

const ERRORS: [PostError; 7] = [
    PostError::Busy,
    PostError::NoEndpoint,
    PostError::Taken,
    PostError::NoRegion,
    PostError::UnknownKey,
    PostError::BadAtomic,
    PostError::BadShare,
];
const KINDS: [Kind; 6] = [Kind::Send, Kind::Write, Kind::Read, Kind::Receive, Kind::Arrival, Kind::Atomic];

/// An entry under construction or being read. Word 0: kind (8 bits), flags (24), endpoint (16), details (16).
#[derive(Clone, Copy)]
struct Words(Entry);

impl Words {
    fn new(kind: u8, endpoint: u16, second: u64) -> Self {
        let mut words = [0; WORDS];
        (words[0], words[1]) = (u64::from(kind) | u64::from(endpoint) << 32, second);
        Self(words)
    }

    fn kind(&self) -> u8 {
        self.0[0] as u8
    }

    fn endpoint(&self) -> u16 {
        (self.0[0] >> 32) as u16
    }

    fn detail(&self) -> u8 {
        (self.0[0] >> 48) as u8
    }

    fn set_detail(mut self, detail: u8) -> Self {
        self.0[0] |= u64::from(detail) << 48;
        self
    }

    fn flag(mut self, flag: u64, is_set: bool) -> Self {
        self.0[0] |= if is_set { flag << 8 } else { 0 };
        self
    }

    fn has(&self, flag: u64) -> bool {
        self.0[0] >> 8 & flag != 0
    }

    fn put(mut self, place: usize, word: u64) -> Self {
        self.0[place] = word;
        self
    }

    fn option(self, flag: u64, place: usize, word: Option<u64>) -> Self {
        self.flag(flag, word.is_some()).put(place, word.unwrap_or(0))
    }

    fn optional(&self, flag: u64, place: usize) -> Option<u64> {
        self.has(flag).then_some(self.0[place])
    }

    /// Words 2 to 4.
    fn extent(self, extent: Extent) -> Self {
        self.put(2, extent.memory.into()).put(3, extent.offset).put(4, extent.len)
    }

    fn its_extent(&self) -> Extent {
        Extent { memory: self.0[2] as u32, offset: self.0[3], len: self.0[4] }
    }

    /// Words 5 to 7.
    fn peer(self, peer: Peer) -> Self {
        let (ip, scope) = match peer.address {
            SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
            SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
        };
        let (bits, port) = (u128::from(ip), u64::from(peer.address.port()));
        self.flag(V6, peer.address.is_ipv6())
            .put(5, (bits >> 64) as u64)
            .put(6, bits as u64)
            .put(7, port | u64::from(peer.endpoint) << 16 | u64::from(scope) << 32)
    }

    fn its_peer(&self) -> Peer {
        let (bits, last) = (u128::from(self.0[5]) << 64 | u128::from(self.0[6]), self.0[7]);
        let address = if self.has(V6) {
            SocketAddrV6::new(Ipv6Addr::from(bits), last as u16, 0, (last >> 32) as u32).into()
        } else {
            SocketAddr::new(IpAddr::V4(Ipv4Addr::from(bits as u32)), last as u16)
        };
        Peer { address, endpoint: (last >> 16) as u16 }
    }

    /// Words 5 to 7, 11 and 12.
    fn matching(self, matching: &Match) -> Self {
        let (tag, ignored) = matching.tag.unzip();
        let words = self.option(TAG, 11, tag).put(12, ignored.unwrap_or(0));
        matching.from.map_or(words, |from| words.peer(from).flag(FROM, true))
    }

    fn its_matching(&self) -> Match {
        let tag = self.optional(TAG, 11).map(|tag| (tag, self.0[12]));
        Match { tag, from: self.has(FROM).then(|| self.its_peer()) }
    }

    /// Words 8, 9 and 11 to 15.
    fn task(self, task: &Task) -> Self {
        match *task {
            Task::Message(tag) => self.set_detail(0).option(TAG, 11, tag),
            Task::Write(key, at) => self.set_detail(1).put(8, key).put(9, at),
            Task::Read(key, at) => self.set_detail(2).put(8, key).put(9, at),
            Task::Atomic { key, at, change, datatype, count, compare, found } => {
                let codes = u64::from(change as u8) | u64::from(datatype as u8) << 8 | u64::from(count) << 16;
                let place = found.unwrap_or_default();
                // The lengths are at most `ATOMIC_BYTES_MAX`, but a process may claim anything.
                let lens = (compare.len & 0xffff) << 32 | (place.len & 0xffff) << 48;
                self.set_detail(3)
                    .flag(FOUND, found.is_some())
                    .put(8, key)
                    .put(9, at)
                    .put(12, codes | lens)
                    .put(13, u64::from(compare.memory) | u64::from(place.memory) << 32)
                    .put(14, compare.offset)
                    .put(15, place.offset)
            }
        }
    }

    fn its_task(&self) -> Option<Task> {
        let [key, at, codes, memories] = [8, 9, 12, 13].map(|place| self.0[place]);
        Some(match self.detail() {
            0 => Task::Message(self.optional(TAG, 11)),
            1 => Task::Write(key, at),
            2 => Task::Read(key, at),
            3 => {
                let found = Extent { memory: (memories >> 32) as u32, offset: self.0[15], len: codes >> 48 };
                Task::Atomic {
                    key,
                    at,
                    change: Change::from_number(codes as u8)?,
                    datatype: Datatype::from_number((codes >> 8) as u8)?,
                    count: (codes >> 16) as u16,
                    compare: Extent {
                        memory: memories as u32,
                        offset: self.0[14],
                        len: codes >> 32 & 0xffff,
                    },
                    found: self.has(FOUND).then_some(found),
                }
            }
            _ => return None,
        })
    }
}

impl Submission {
    /// Encodes the submission.
    pub fn encode(&self) -> Entry {
        let words = match *self {
            Self::Open { ticket, number } => {
                Words::new(1, number.unwrap_or(0), ticket).flag(GIVEN, number.is_some())
            }
            Self::Close { ticket, endpoint } => Words::new(2, endpoint, ticket),
            Self::Register { ticket, endpoint, extent, base, access, key } => Words::new(3, endpoint, ticket)
                .extent(extent)
                .option(GIVEN, 8, key)
                .put(9, base)
                .flag(READ, access.read)
                .flag(WRITE, access.write),
            Self::Deregister { ticket, key } => Words::new(4, 0, ticket).put(8, key),
            Self::Route { address, bytes } => Words::new(5, 0, bytes).peer(Peer { address, endpoint: 0 }),
            Self::Post { endpoint, peer, ref task, extent, data, context } => {
                Words::new(6, endpoint, context).extent(extent).peer(peer).task(task).option(DATA, 10, data)
            }
            Self::Receive { endpoint, ref matching, extent, context, several } => {
                Words::new(7, endpoint, context).extent(extent).matching(matching).option(GIVEN, 8, several)
            }
            Self::Cancel { ticket, endpoint, context } => Words::new(8, endpoint, ticket).put(8, context),
            Self::Peek { ticket, endpoint, ref matching, claim } => {
                Words::new(9, endpoint, ticket).matching(matching).option(GIVEN, 8, claim)
            }
            Self::Claimed { ticket, endpoint, claim, extent, context } => Words::new(10, endpoint, ticket)
                .extent(extent.unwrap_or_default())
                .flag(GIVEN, extent.is_some())
                .put(8, claim)
                .put(9, context),
            Self::Share { ticket, endpoint, share } => {
                Words::new(11, endpoint, ticket).put(8, share.weight.into()).put(9, share.rate)
            }
            Self::Way { ticket, peer: address } => {
                Words::new(12, 0, ticket).peer(Peer { address, endpoint: 0 })
            }
            Self::Count { ticket, endpoint } => Words::new(13, endpoint, ticket),
        };
        words.0
    }

    /// The bytes in registered memory that the submission names.
    pub(super) fn extents(&self) -> impl Iterator<Item = Extent> {
        let (first, task) = match *self {
            Self::Register { extent, .. } | Self::Receive { extent, .. } => (Some(extent), None),
            Self::Post { extent, task, .. } => (Some(extent), Some(task)),
            Self::Claimed { extent, .. } => (extent, None),
            _ => (None, None),
        };
        let (compare, found) = match task {
            Some(Task::Atomic { compare, found, .. }) => (Some(compare), found),
            _ => (None, None),
        };
        [first, compare, found].into_iter().flatten().filter(|extent| extent.len > 0)
    }

    /// Decodes a submission from a private copy. Returns `None` if there is no such kind.
    pub fn decode(entry: &Entry) -> Option<Self> {
        let words = Words(*entry);
        let (endpoint, second) = (words.endpoint(), entry[1]);
        let (ticket, context) = (second, second);
        Some(match words.kind() {
            1 => Self::Open { ticket, number: words.has(GIVEN).then_some(endpoint) },
            2 => Self::Close { ticket, endpoint },
            3 => Self::Register {
                ticket,
                endpoint,
                extent: words.its_extent(),
                base: entry[9],
                access: Access { read: words.has(READ), write: words.has(WRITE) },
                key: words.optional(GIVEN, 8),
            },
            4 => Self::Deregister { ticket, key: entry[8] },
            5 => Self::Route { address: words.its_peer().address, bytes: second },
            6 => Self::Post {
                endpoint,
                peer: words.its_peer(),
                task: words.its_task()?,
                extent: words.its_extent(),
                data: words.optional(DATA, 10),
                context,
            },
            7 => Self::Receive {
                endpoint,
                matching: words.its_matching(),
                extent: words.its_extent(),
                context,
                several: words.optional(GIVEN, 8),
            },
            8 => Self::Cancel { ticket, endpoint, context: entry[8] },
            9 => {
                let (matching, claim) = (words.its_matching(), words.optional(GIVEN, 8));
                Self::Peek { ticket, endpoint, matching, claim }
            }
            10 => Self::Claimed {
                ticket,
                endpoint,
                claim: entry[8],
                extent: words.has(GIVEN).then(|| words.its_extent()),
                context: entry[9],
            },
            11 => {
                // No weight is that high: the engine refuses it.
                let weight = u32::try_from(entry[8]).unwrap_or(u32::MAX);
                Self::Share { ticket, endpoint, share: ShareSettings { weight, rate: entry[9] } }
            }
            12 => Self::Way { ticket, peer: words.its_peer().address },
            13 => Self::Count { ticket, endpoint },
            _ => return None,
        })
    }
}

impl Event {
    /// Encodes the event.
    pub fn encode(&self) -> Entry {
        let words = match *self {
            Self::Completed(endpoint, ref completion) => {
                let Completion { kind, status, context, len, tag, data, peer, offset, .. } = *completion;
                Words::new(1, endpoint, context)
                    .set_detail(KINDS.iter().position(|known| *known == kind).unwrap_or(0) as u8)
                    .flag(RELEASED, completion.is_released)
                    .flag(LATE, completion.is_late)
                    .peer(peer)
                    .put(2, status as u64)
                    .put(3, offset)
                    .put(4, len)
                    .option(DATA, 10, data)
                    .option(TAG, 11, tag)
            }
            Self::Answered(ticket, Answer::Done(value)) => Words::new(2, 0, ticket).put(2, value),
            Self::Answered(ticket, Answer::Seen(seen)) => Words::new(3, 0, ticket)
                .peer(seen.from)
                .put(4, seen.len)
                .option(DATA, 10, seen.data)
                .option(TAG, 11, seen.tag),
            Self::Answered(ticket, Answer::Refused(error)) => {
                let number = ERRORS.iter().position(|known| *known == error).unwrap_or(0);
                Words::new(4, 0, ticket).put(2, number as u64)
            }
            Self::Answered(ticket, Answer::Counted(EndpointCounters { packets, bytes, held_back })) => {
                Words::new(5, 0, ticket).put(2, packets).put(3, bytes).put(4, held_back)
            }
        };
        words.0
    }

    /// Decodes an event. Returns `None` if it is malformed.
    pub fn decode(entry: &Entry) -> Option<Self> {
        let words = Words(*entry);
        let (second, peer, len) = (entry[1], words.its_peer(), entry[4]);
        let (data, tag) = (words.optional(DATA, 10), words.optional(TAG, 11));
        let number = usize::try_from(entry[2]).ok();
        Some(match words.kind() {
            1 => {
                let completion = Completion {
                    kind: *KINDS.get(usize::from(words.detail()))?,
                    status: Status::from_number(u8::try_from(entry[2]).ok()?)?,
                    context: second,
                    len,
                    tag,
                    data,
                    peer,
                    offset: entry[3],
                    is_released: words.has(RELEASED),
                    is_late: words.has(LATE),
                    buffer: None,
                };
                Self::Completed(words.endpoint(), completion)
            }
            2 => Self::Answered(second, Answer::Done(entry[2])),
            3 => Self::Answered(second, Answer::Seen(Seen { from: peer, tag, data, len })),
            4 => Self::Answered(second, Answer::Refused(*ERRORS.get(number?)?)),
            5 => {
                let counters = EndpointCounters { packets: entry[2], bytes: entry[3], held_back: entry[4] };
                Self::Answered(second, Answer::Counted(counters))
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { memory: 7, offset: 1 << 40, len: u64::MAX };

    fn peers() -> [Peer; 2] {
        ["10.77.1.1:7000", "[fe80::1%3]:9"]
            .map(|address| Peer { address: address.parse().unwrap(), endpoint: 1023 })
    }

    #[test]
    fn submissions_are_read_as_they_are_written() {
        let access = Access { read: true, write: false };
        let small = Extent { memory: u32::MAX, offset: 3, len: 240 };
        let atomic = |found| Task::Atomic {
            key: 1,
            at: 2,
            change: Change::Sum,
            datatype: Datatype::U64,
            count: 3,
            compare: small,
            found,
        };
        let mut all = vec![
            Submission::Open { ticket: 1, number: None },
            Submission::Open { ticket: 1, number: Some(0) },
            Submission::Close { ticket: 2, endpoint: 3 },
            Submission::Register { ticket: 1, endpoint: 2, extent: EXTENT, base: 3, access, key: None },
            Submission::Register { ticket: 1, endpoint: 2, extent: EXTENT, base: 3, access, key: Some(0) },
            Submission::Deregister { ticket: 5, key: 6 },
            Submission::Cancel { ticket: 1, endpoint: 2, context: 3 },
            Submission::Claimed { ticket: 1, endpoint: 2, claim: 3, extent: Some(EXTENT), context: 4 },
            Submission::Claimed { ticket: 1, endpoint: 2, claim: 3, extent: None, context: 4 },
            Submission::Share { ticket: 1, endpoint: 2, share: ShareSettings { weight: 3, rate: u64::MAX } },
            Submission::Share { ticket: 1, endpoint: 2, share: ShareSettings { weight: u32::MAX, rate: 0 } },
            Submission::Count { ticket: 1, endpoint: u16::MAX },
        ];
        for peer in peers() {
            all.push(Submission::Way { ticket: 9, peer: peer.address });
            all.push(Submission::Route { address: peer.address, bytes: 1392 });
            let tasks = [Task::Message(None), Task::Message(Some(0)), Task::Write(8, 9), Task::Read(8, 9)];
            for task in tasks.into_iter().chain([atomic(None), atomic(Some(small))]) {
                for data in [None, Some(0)] {
                    all.push(Submission::Post { endpoint: 1, peer, task, extent: EXTENT, data, context: 2 });
                }
            }
            for (tag, from) in [(None, Some(peer)), (Some((1, 2)), None), (Some((0, 0)), Some(peer))] {
                let matching = Match { tag, from };
                let (endpoint, extent, context) = (1, EXTENT, 2);
                all.push(Submission::Receive { endpoint, matching, extent, context, several: Some(0) });
                all.push(Submission::Receive { endpoint, matching, extent, context, several: None });
                all.push(Submission::Peek { ticket: 1, endpoint, matching, claim: Some(3) });
            }
        }
        for submission in all {
            assert_eq!(Submission::decode(&submission.encode()), Some(submission));
        }
        assert_eq!(Submission::decode(&[0; WORDS]), None);
    }

    #[test]
    fn events_are_read_as_they_are_written() {
        for (kind, peer) in KINDS.into_iter().zip(peers().into_iter().cycle()) {
            let completion = Completion {
                kind,
                status: Status::Truncated,
                context: 1,
                len: 2,
                tag: Some(0),
                data: Some(3),
                peer,
                offset: 4,
                is_released: true,
                is_late: false,
                buffer: None,
            };
            let Some(Event::Completed(9, read)) = Event::decode(&Event::Completed(9, completion).encode())
            else {
                panic!("{kind:?}");
            };
            assert_eq!(format!("{read:?}"), format!("{completion:?}"));
        }
        let seen = Seen { from: peers()[1], tag: None, data: Some(1), len: 2 };
        let counted = EndpointCounters { packets: 1, bytes: u64::MAX, held_back: 2 };
        let answers = [Answer::Done(u64::MAX), Answer::Seen(seen), Answer::Counted(counted)];
        for answer in answers.into_iter().chain(ERRORS.map(Answer::Refused)) {
            let read = Event::decode(&Event::Answered(5, answer).encode());
            assert!(matches!(read, Some(Event::Answered(5, read)) if read == answer));
        }
        assert!(Event::decode(&[0; WORDS]).is_none());
    }
}
