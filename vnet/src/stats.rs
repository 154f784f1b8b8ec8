//! Counters: nothing is lost silently.
//!
//! Every port counts frames in and out, copies made of them, and drops under exactly one reason each, so that over all
//! ports `in + copies = out + drops` holds whenever the dispatchers are between two batches. Links count datagrams beside
//! frames: one that carries no (part of a) frame into the core is discarded under one reason, and is not part of that sum.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub mod watch;

macro_rules! reasons {
    ($(#[$outer:meta])* $name:ident { $($variant:ident = $text:literal, $doc:literal;)* }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(usize)]
        pub enum $name { $(#[doc = $doc] $variant,)* }

        impl $name {
            /// All reasons, in the order of their counters.
            pub const ALL: &[$name] = &[$($name::$variant),*];
            /// How many there are.
            pub const COUNT: usize = Self::ALL.len();

            /// The reason's stable name in statistics and metrics.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// One sentence for people.
            pub fn help(self) -> &'static str {
                match self { $($name::$variant => $doc,)* }
            }
        }
    };
}

reasons! {
    /// Why a frame was not delivered. Each dropped frame is counted under exactly one, at the port named with it.
    DropReason {
        BadChain = "bad_chain", "The guest's descriptor chain was malformed (at the port it came from).";
        TooShort = "too_short", "Shorter than an Ethernet header (at the port it came from).";
        TooLong = "too_long", "Longer than the largest frame (at the port it came from).";
        BadOffload = "bad_offload", "Offload metadata that does not fit the frame (at the port it came from).";
        BadSource = "bad_source", "Source address not allowed here: a group address or against port security (at the port it came from).";
        WrongNetwork = "wrong_network", "The link does not carry the frame's network (at the port it came from).";
        StormLimit = "storm_limit", "More flooded frames than the port's limit allows (at the port it came from).";
        NoRoute = "no_route", "No rule, learned address or flooding applies (at the port it came from).";
        Hairpin = "hairpin", "The only way leads back to where it came from (at the port it came from).";
        Reassembly = "reassembly", "Fragments were missing when time or memory ran out (at the link it came from).";
        HopLimit = "hop_limit", "Relayed too often, or by a link that cannot count relays (at the link it was to leave by).";
        PortGone = "port_gone", "The destination was removed or stopped meanwhile (at the port it came from).";
        NotReady = "not_ready", "The destination has no guest, driver or device behind it at the moment (at the destination).";
        NoBuffer = "no_buffer", "The guest's ring, or the socket's buffer on a congested path, had no room (at the destination).";
        MtuExceeded = "mtu_exceeded", "Larger than the destination's MTU or encapsulation allows (at the destination).";
        Unsegmentable = "unsegmentable", "A super-frame whose headers do not allow cutting it for this receiver (at the destination).";
        SendFailed = "send_failed", "The host's network refused it (at the destination).";
        NoAddress = "no_address", "A link without remote whose other host has not been heard yet (at the destination).";
        NoKey = "no_key", "A sealed link has no key agreed with the other host (at the destination).";
    }
}

reasons! {
    /// Why a datagram on a link brought nothing into the core.
    DiscardReason {
        UnknownSource = "unknown_source", "From an address that no link has as its remote.";
        Truncated = "truncated", "Shorter than its header says, or larger than any datagram of ours.";
        BadVersion = "bad_version", "A native header with an unknown version or type.";
        BadHeader = "bad_header", "A native header whose fields contradict each other or the payload.";
        Stale = "stale", "A fragment of a frame that has ended already, or a duplicate.";
        SealRequired = "seal_required", "Clear text where sealing is required, or sealed where clear text is expected.";
        WrongEpoch = "wrong_epoch", "Sealed with a key that is not known, or not any more.";
        Forged = "forged", "Sealed, but not with the key of its epoch, or changed on the way.";
        Replayed = "replayed", "Sealed, but it came before, or so late that this cannot be told.";
        NotAsked = "not_asked", "On a local network: destination MAC not subscribed on this local network.";
        MemoryLimit = "memory_limit", "A fragment refused because reassembly memory is full.";
    }
}

/// A counter that many threads may add to.
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

    /// The value now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// What optimistic interrupts did on one interface (VNET/P+ section IV.A).
#[derive(Default, Debug)]
pub struct InterruptStats {
    /// Early interrupts: the guest was notified before its frames were moved. Part of [`PortStats::notifications`].
    pub early: Counter,
    /// Early interrupts that were not made, since the guest had notifications off.
    pub early_discarded: Counter,
    /// Early interrupts after which the guest waited still when it was checked: it came before its frames, found nothing, and
    /// had to be notified again.
    pub early_premature: Counter,
    /// Notifications at or after the end of coalescing. Part of [`PortStats::notifications`].
    pub coalesced_injected: Counter,
    /// Ends of coalescing at which the receive density spoke against a notification.
    pub coalesced_withheld: Counter,
}

/// Messages with guests' memory that were to be sent without copying it (VNET/P+ section IV.B).
#[derive(Default, Debug)]
pub struct ZeroCopyStats {
    /// Handed to the kernel without a copy.
    pub sent: Counter,
    /// Those of them that the kernel copied after all, as the device cannot do without.
    pub copied: Counter,
    /// Copied at once: no room in the kernel's accounting, or more pieces than a message takes.
    pub fallen_back: Counter,
}

/// One port's counters.
#[derive(Default, Debug)]
pub struct PortStats {
    /// Frames that entered the core here, refused ones included.
    pub in_frames: Counter,
    /// Their bytes.
    pub in_bytes: Counter,
    /// Frames delivered here: in the guest's ring, written to the device, or accepted by the host's network.
    pub out_frames: Counter,
    /// Their bytes.
    pub out_bytes: Counter,
    /// Copies made of frames that entered here and had more than one destination (destinations minus one), and segments
    /// cut from super-frames here beyond the first.
    pub copies: Counter,
    /// Frames delivered here that took the place of a question for a neighbour from here (ARP, ND): answered by the host.
    pub answers: Counter,
    /// Notifications given to the guest.
    pub notifications: Counter,
    /// Notifications got from the guest.
    pub kicks: Counter,
    /// What optimistic interrupts did, all zero where they are not used.
    pub interrupts: InterruptStats,
    /// What became of frames that were to be sent on this link without a copy.
    pub zero_copy: ZeroCopyStats,
    /// Frames that came by this link straight into a guest's buffers.
    pub direct_in_place: Counter,
    /// Messages that were received there and were not what they had been guessed to be: copied out again.
    pub direct_copied_out: Counter,
    /// Datagrams received for this link.
    pub in_datagrams: Counter,
    /// Datagrams sent on this link.
    pub out_datagrams: Counter,
    drops: [Counter; DropReason::COUNT],
    discards: [Counter; DiscardReason::COUNT],
}

impl PortStats {
    /// Counts `n` frames that were in the core and are not delivered.
    #[inline]
    pub fn drop_frames(&self, reason: DropReason, n: u64) {
        self.drops[reason as usize].add(n);
        if watch::is_on() && n != 0 {
            watch::note(self, reason, n, None);
        }
    }

    /// Counts one frame of `bytes` bytes that is refused as it enters: in and dropped at once.
    #[cold]
    pub fn refuse(&self, reason: DropReason, bytes: u64) {
        self.in_frames.add(1);
        self.in_bytes.add(bytes);
        self.drops[reason as usize].add(1);
        if watch::is_on() {
            watch::note(self, reason, 1, Some(bytes));
        }
    }

    /// Counts datagrams that brought nothing into the core.
    #[cold]
    pub fn discard(&self, reason: DiscardReason, n: u64) {
        self.discards[reason as usize].add(n);
    }

    /// Counts `n` delivered frames of `bytes` bytes together.
    #[inline]
    pub fn delivered(&self, n: u64, bytes: u64) {
        self.out_frames.add(n);
        self.out_bytes.add(bytes);
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
