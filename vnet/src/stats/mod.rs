//! Counters of ports: no frame is lost silently. Dispatchers' histograms are in `dispatch/dispatcher_stats.rs`.
//!
//! Every port counts frames in and out, copies, and each drop under exactly one reason. Over all ports, `in + copies = out +
//! drops` holds whenever the dispatchers are between two batches. Links also count datagrams: one that brings no part of a
//! frame into the core is discarded under one reason, outside that sum.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

macro_rules! reasons {
    ($(#[$outer:meta])* $name:ident { $($variant:ident = $text:literal, $doc:literal;)* }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(usize)]
        pub enum $name { $(#[doc = $doc] $variant,)* }

        impl $name {
            /// All reasons in the order of their counters.
            pub const ALL: &[$name] = &[$($name::$variant),*];
            /// Number of reasons.
            pub const COUNT: usize = Self::ALL.len();

            /// Stable name in statistics and metrics.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// One-sentence description.
            pub fn help(self) -> &'static str {
                match self { $($name::$variant => $doc,)* }
            }
        }
    };
}

reasons! {
    /// Reason for a drop. Each dropped frame counts under exactly one, at the port that its description names.
    DropReason {
        BadChain = "bad_chain", "Malformed descriptor chain from the guest (at the ingress port).";
        TooShort = "too_short", "Shorter than an Ethernet header (at the ingress port).";
        TooLong = "too_long", "Longer than the largest frame (at the ingress port).";
        BadOffload = "bad_offload", "Offload metadata contradicts the frame (at the ingress port).";
        BadSource = "bad_source", "Source MAC is a group address or violates port security (at the ingress port).";
        BadAddress = "bad_address", "Source IP address violates address security (at the ingress port).";
        WrongNetwork = "wrong_network", "The port does not carry the frame's network (at the ingress port).";
        Sideband = "sideband", "Frame of the guest for vnetd itself that is too long or too many (at the ingress port).";
        StormLimit = "storm_limit", "Flooded frame above the port's storm limit (at the ingress port).";
        NoRoute = "no_route", "No rule or address matches, and there is nowhere to flood (at the ingress port).";
        Hairpin = "hairpin", "The only destination is the ingress port, or split horizon forbids it (at the ingress port).";
        Reassembly = "reassembly", "Fragments missing at the reassembly timeout or memory limit (at the ingress link).";
        Incomplete = "incomplete", "Fragment of an IP datagram of which the TAP's full queue has lost another (at the ingress port).";
        HopLimit = "hop_limit", "Hop limit reached (at the egress link), or the frame came on a link without hop counts and no rule leads it to another link (at the ingress port).";
        PortGone = "port_gone", "The destination port was removed or stopped meanwhile (at the ingress port).";
        NotReady = "not_ready", "No guest, driver or device is connected (at the destination).";
        NoBuffer = "no_buffer", "The guest's ring was full, or a socket buffer or device queue of the host (at the destination).";
        MtuExceeded = "mtu_exceeded", "Larger than the MTU or the encapsulation allows (at the destination).";
        Unsegmentable = "unsegmentable", "A super-frame whose headers do not allow segmentation for this receiver (at the destination).";
        SendFailed = "send_failed", "The host's network stack refused the datagram (at the destination).";
        NoAddress = "no_address", "The link has no remote configured and has not heard from the other host yet (at the destination).";
        NoKey = "no_key", "The sealed link has no session key yet (at the destination).";
    }
}

impl DropReason {
    /// The drop reason for a frame that the kernel refused with the error `errno`.
    pub(crate) fn of_refusal(errno: i32) -> DropReason {
        match errno {
            // A full socket buffer, a full device queue, or the kernel is out of memory.
            libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => DropReason::NoBuffer,
            libc::EMSGSIZE => DropReason::MtuExceeded,
            _ => DropReason::SendFailed,
        }
    }
}

reasons! {
    /// Reason to discard a datagram on a link.
    DiscardReason {
        UnknownSource = "unknown_source", "Source address is no link's remote.";
        Truncated = "truncated", "Shorter than its header claims, or larger than any datagram of a vnet host.";
        BadVersion = "bad_version", "Unknown version or type in the native header.";
        BadHeader = "bad_header", "Fields of the native header contradict each other or the payload.";
        Stale = "stale", "Duplicate, or a fragment of a frame that is complete or timed out.";
        SealRequired = "seal_required", "Clear text on a sealed link, or a sealed datagram on a clear-text link.";
        WrongEpoch = "wrong_epoch", "Sealed with an unknown or expired key epoch.";
        Forged = "forged", "Authentication failed: wrong key, or changed in transit.";
        Replayed = "replayed", "Sealed datagram seen before, or older than the replay window.";
        UnknownIndex = "unknown_index", "Translated packet with an index that this host does not know.";
        NotAsked = "not_asked", "Destination MAC not subscribed on this local network.";
        MemoryLimit = "memory_limit", "Fragment refused: reassembly memory is full.";
        Overflow = "overflow", "The kernel dropped it before vnetd received it: the socket's receive buffer was full, or a checksum was wrong.";
    }
}

/// A counter shared by threads.
#[derive(Default, Debug)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        if n != 0 {
            self.0.fetch_add(n, Relaxed);
        }
    }

    /// Current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Optimistic interrupts of one interface (VNET/P+ section IV.A).
#[derive(Default, Debug)]
pub struct InterruptStats {
    /// Early interrupts: notifications before frames were copied. Part of [`PortStats::notifications`].
    pub early: Counter,
    /// Part of `early` sent when data arrived, before it was received.
    pub early_at_arrival: Counter,
    /// Part of `early_at_arrival` after which no frame came for the guest: the prediction was wrong.
    pub early_mispredicted: Counter,
    /// Early interrupts suppressed because the guest had notifications off.
    pub early_discarded: Counter,
    /// Premature early interrupts: the guest looked before its frames arrived and went back to waiting, so it had to be
    /// notified again.
    pub early_premature: Counter,
    /// Notifications at or after the end of coalescing. Part of [`PortStats::notifications`].
    pub coalesced_injected: Counter,
    /// Ends of coalescing without a notification because of the receive density.
    pub coalesced_withheld: Counter,
}

/// Zero-copy transmit of guest memory (VNET/P+ section IV.B), in messages.
#[derive(Default, Debug)]
pub struct ZeroCopyStats {
    /// Messages passed to the kernel for zero-copy transmit.
    pub sent: Counter,
    /// Part of `sent` that the kernel copied after all, because the device requires it.
    pub copied: Counter,
    /// Messages sent with a copy: the kernel's memory accounting was exhausted, or the message had too many segments.
    pub fallen_back: Counter,
}

/// How long a [`LastSender`] or [`LastStranger`] is remembered, in seconds, so that a mistake that has been corrected is no longer
/// reported.
const REMEMBERED_S: u64 = 600;

/// Sender of the last frame that was dropped for one kind of mistake. A counter alone does not identify the sender.
#[derive(Default, Debug)]
pub struct LastSender {
    /// Source MAC in the upper 48 bits, ingress port in the lower 16.
    who: AtomicU64,
    /// Frame length in bytes in the upper 32 bits, time in seconds of the system's monotonic clock in the lower 32.
    what: AtomicU64,
}

/// The contents of a [`LastSender`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Source MAC of the frame.
    pub mac: [u8; 6],
    /// Number of its ingress port.
    pub port: u16,
    /// Length of the frame in bytes.
    pub len: usize,
}

impl LastSender {
    /// Notes a dropped frame.
    #[cold]
    pub fn note(&self, Sent { mac: [a, b, c, d, e, f], port, len }: Sent) {
        let [high, low] = port.to_be_bytes();
        self.who.store(u64::from_be_bytes([a, b, c, d, e, f, high, low]), Relaxed);
        let len = u64::from(u32::try_from(len).unwrap_or(u32::MAX));
        self.what.store(len << 32 | seconds(), Relaxed);
    }

    /// The last frame noted within ten minutes. When two frames are noted at once, the result may mix fields of both.
    pub fn lately(&self) -> Option<Sent> {
        self.lately_at(seconds())
    }

    fn lately_at(&self, now_s: u64) -> Option<Sent> {
        let [a, b, c, d, e, f, high, low] = self.who.load(Relaxed).to_be_bytes();
        let what = self.what.load(Relaxed);
        let age_s = now_s.saturating_sub(what & u64::from(u32::MAX));
        let port = u16::from_be_bytes([high, low]);
        let len = (what >> 32) as usize;
        (what != 0 && age_s < REMEMBERED_S).then_some(Sent { mac: [a, b, c, d, e, f], port, len })
    }
}

/// The source of datagrams that is no link's remote, as the log told it last: about once a second, so a lock does no harm.
#[derive(Default, Debug)]
pub struct LastStranger(Mutex<Option<(SocketAddr, u64)>>, AtomicBool);

impl LastStranger {
    /// Reports no further strangers: vnetd is stopping, and without its links every peer is one.
    pub fn silence(&self) {
        self.1.store(true, Relaxed);
    }

    /// True after [`LastStranger::silence`].
    pub fn is_silent(&self) -> bool {
        self.1.load(Relaxed)
    }

    /// Notes a source.
    #[cold]
    pub fn note(&self, source: SocketAddr) {
        *self.0.lock() = Some((source, seconds()));
    }

    /// The last source noted within ten minutes, and the seconds since then.
    pub fn lately(&self) -> Option<(SocketAddr, u64)> {
        let (source, at_s) = (*self.0.lock())?;
        let age_s = seconds().saturating_sub(at_s);
        (age_s < REMEMBERED_S).then_some((source, age_s))
    }
}

/// Seconds of the monotonic clock, at least 1, as of the last timer tick.
fn seconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    u64::try_from(now.tv_sec).unwrap_or(0).clamp(1, u64::from(u32::MAX))
}

/// One port's counters.
#[derive(Default, Debug)]
pub struct PortStats {
    /// Frames received from this port, refused ones included.
    pub in_frames: Counter,
    /// Bytes of these frames.
    pub in_bytes: Counter,
    /// Frames delivered to this port: to the guest's ring, the device, or the host's network stack.
    pub out_frames: Counter,
    /// Bytes of these frames.
    pub out_bytes: Counter,
    /// Extra frames: destinations beyond the first of a frame received here, and segments beyond the first of a super-frame
    /// segmented here.
    pub copies: Counter,
    /// ARP and ND requests from this port that the host answered (suppression); each reply replaces its request.
    pub answers: Counter,
    /// Notifications sent to the guest (interrupts).
    pub notifications: Counter,
    /// Notifications received from the guest.
    pub kicks: Counter,
    /// Optimistic interrupts; all zero where they are off.
    pub interrupts: InterruptStats,
    /// Zero-copy transmit on this link.
    pub zero_copy: ZeroCopyStats,
    /// Frames received in place: straight into a guest's buffers.
    pub direct_in_place: Counter,
    /// Messages received in place on a wrong guess of their layout, and then copied out.
    pub direct_copied_out: Counter,
    /// Direct ports that the other host announced and this host refused.
    pub direct_refused: Counter,
    /// Conversations to translate that the other host offered and this host refused.
    pub translations_refused: Counter,
    /// Datagrams received for this link.
    pub in_datagrams: Counter,
    /// Datagrams sent on this link.
    pub out_datagrams: Counter,
    /// Sender of the last frame that was larger than this interface's MTU.
    pub last_oversize: LastSender,
    /// Sender of the last frame from this interface that port security refused.
    pub last_bad_source: LastSender,
    /// Source of the last datagrams that no link took.
    pub last_stranger: LastStranger,
    drops: [Counter; DropReason::COUNT],
    discards: [Counter; DiscardReason::COUNT],
}

impl PortStats {
    /// Counts `n` dropped frames.
    #[inline]
    pub fn drop_frames(&self, reason: DropReason, n: u64) {
        self.drops[reason as usize].add(n);
    }

    /// Counts one frame of `bytes` bytes refused on entry, both as received and as dropped.
    #[cold]
    pub fn refuse(&self, reason: DropReason, bytes: u64) {
        self.in_frames.add(1);
        self.in_bytes.add(bytes);
        self.drops[reason as usize].add(1);
    }

    /// Counts `n` discarded datagrams.
    #[cold]
    pub fn discard(&self, reason: DiscardReason, n: u64) {
        self.discards[reason as usize].add(n);
    }

    /// Counts `n` delivered frames of `bytes` bytes in total.
    #[inline]
    pub fn delivered(&self, n: u64, bytes: u64) {
        self.out_frames.add(n);
        self.out_bytes.add(bytes);
    }

    /// All counters with their names: those of the fields, `drop.REASON` and `discard.REASON`.
    fn named(&self) -> impl Iterator<Item = (String, &Counter)> {
        macro_rules! counters {
            ($($($field:ident).+),* $(,)?) => {
                [$((concat!($(".", stringify!($field)),+), &self.$($field).+)),*]
            };
        }
        let fields = counters![
            in_frames,
            in_bytes,
            out_frames,
            out_bytes,
            copies,
            answers,
            notifications,
            kicks,
            interrupts.early,
            interrupts.early_at_arrival,
            interrupts.early_mispredicted,
            interrupts.early_discarded,
            interrupts.early_premature,
            interrupts.coalesced_injected,
            interrupts.coalesced_withheld,
            zero_copy.sent,
            zero_copy.copied,
            zero_copy.fallen_back,
            direct_in_place,
            direct_copied_out,
            direct_refused,
            translations_refused,
            in_datagrams,
            out_datagrams,
        ];
        let fields = fields.into_iter().map(|(name, counter)| (name[1..].to_owned(), counter));
        let drops = DropReason::ALL.iter().zip(&self.drops);
        let drops = drops.map(|(reason, counter)| (format!("drop.{}", reason.name()), counter));
        let discards = DiscardReason::ALL.iter().zip(&self.discards);
        let discards = discards.map(|(reason, counter)| (format!("discard.{}", reason.name()), counter));
        fields.chain(drops).chain(discards)
    }

    /// All counters that are not zero, by name.
    pub fn read(&self) -> BTreeMap<String, u64> {
        self.named().map(|(name, counter)| (name, counter.get())).filter(|(_, count)| *count != 0).collect()
    }

    /// Adds what another process has counted for this port ([`PortStats::read`]).
    ///
    /// # Errors
    /// The name of a counter that does not exist here; nothing is added.
    pub fn resume(&self, counts: &BTreeMap<String, u64>) -> Result<(), String> {
        let counters: BTreeMap<_, _> = self.named().collect();
        if let Some(unknown) = counts.keys().find(|name| !counters.contains_key(*name)) {
            return Err(unknown.clone());
        }
        counters.into_iter().for_each(|(name, counter)| counter.add(counts.get(&name).copied().unwrap_or(0)));
        Ok(())
    }

    /// Frames dropped for `reason`.
    pub fn drops(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize].get()
    }

    /// Frames dropped for any reason.
    pub fn drops_total(&self) -> u64 {
        self.drops.iter().map(Counter::get).sum()
    }

    /// Datagrams discarded for `reason`.
    pub fn discards(&self, reason: DiscardReason) -> u64 {
        self.discards[reason as usize].get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_goes_on_with_the_counters() {
        let (before, after) = (PortStats::default(), PortStats::default());
        before.delivered(3, 300);
        before.drop_frames(DropReason::NoRoute, 2);
        before.discard(DiscardReason::Stale, 1);
        before.interrupts.early.add(7);
        let counts = before.read();
        let names: Vec<_> = counts.keys().map(String::as_str).collect();
        assert_eq!(names, ["discard.stale", "drop.no_route", "interrupts.early", "out_bytes", "out_frames"]);
        after.delivered(1, 60);
        after.resume(&counts).unwrap();
        assert_eq!(after.read()["out_frames"], 4);
        assert_eq!((after.drops(DropReason::NoRoute), after.discards(DiscardReason::Stale)), (2, 1));
        let unknown = BTreeMap::from([("out_frames".to_owned(), 1), ("drop.of_the_future".to_owned(), 1)]);
        assert_eq!(after.resume(&unknown), Err("drop.of_the_future".to_owned()));
        assert_eq!(after.out_frames.get(), 4, "nothing was added");
    }

    #[test]
    fn the_last_sender_is_remembered_for_a_while() {
        let last = LastSender::default();
        assert_eq!(last.lately(), None);
        let sent = Sent { mac: [2, 0, 0, 0, 0, 9], port: 0xabcd, len: 9014 };
        last.note(sent);
        assert_eq!(last.lately(), Some(sent));
        assert_eq!(last.lately_at(seconds() + REMEMBERED_S + 1), None);
    }
}
