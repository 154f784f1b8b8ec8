//! The maps of translations: what vnetd tells the programs about conversations that need no tunnel, and what they tell it
//! (programs/translate.h).
//!
//! - *conversations*: from this host's guests to hosts that take translated packets. Programs add them and count their frames; a full map
//!   (LRU) evicts the one used least recently. Packets of those with a lease leave translated.
//! - *wanted*: a queue of conversations with many frames.
//! - *translations*: other hosts' indices, and the conversation that each stands for. Programs note when a packet with it arrives. Index 0
//!   of a host is for proofs; there programs count the host's packets that could not be restored.

use std::net::Ipv4Addr;

use aya::maps::{HashMap, MapData, MapError, Queue};
use parking_lot::Mutex;

use super::shared::{
    ConversationKey, Index, TranslatedValue, TranslationKey, TranslationValue, Wanted, WantedValue,
};
use crate::wire::translation::{Conversation, Transport};

/// What programs have noted of an index's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// CLOCK_MONOTONIC time of the last one, in nanoseconds; 0: none yet.
    pub seen_ns: u64,
    /// Of index 0: number of the host's packets so far that could not be restored, such as those with an unknown index.
    pub lost: u64,
}

struct Maps {
    conversations: HashMap<MapData, ConversationKey, TranslatedValue>,
    translations: HashMap<MapData, TranslationKey, TranslationValue>,
    wanted: Queue<MapData, WantedValue>,
}

/// The maps of translations.
pub struct TranslationMaps(Mutex<Maps>);

impl TranslationMaps {
    pub(super) fn new(
        conversations: HashMap<MapData, ConversationKey, TranslatedValue>,
        translations: HashMap<MapData, TranslationKey, TranslationValue>,
        wanted: Queue<MapData, WantedValue>,
    ) -> TranslationMaps {
        TranslationMaps(Mutex::new(Maps { conversations, translations, wanted }))
    }

    /// Pops the next conversation with many frames from the programs' queue; `None` if the queue is empty.
    ///
    /// # Errors
    /// The kernel refuses to pop from the queue.
    pub fn next_wanted(&self) -> Result<Option<Wanted>, MapError> {
        match self.0.lock().wanted.pop(0) {
            Ok(value) => Ok(value.wanted()),
            Err(MapError::ElementNotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Installs a lease: programs translate frames of `conversation` to `remote` until `until_ns` (CLOCK_MONOTONIC). Returns false if the
    /// kernel has no memory.
    pub fn lease(&self, conversation: &Conversation, index: u16, remote: Ipv4Addr, until_ns: u64) -> bool {
        let mut maps = self.0.lock();
        let key = ConversationKey::new(conversation);
        let frames = maps.conversations.get(&key, 0).map_or(0, |now| now.frames);
        let (remote, index) = (remote.to_bits(), index.to_be());
        let value = TranslatedValue { until_ns, frames, remote, index, zero: [0; 3] };
        maps.conversations.insert(key, value, 0).is_ok()
    }

    /// Number of the conversation's frames to `remote`, which may start anew; `None` if programs know none.
    pub fn frames(&self, conversation: &Conversation, remote: Ipv4Addr) -> Option<u32> {
        let value = self.0.lock().conversations.get(&ConversationKey::new(conversation), 0).ok()?;
        (value.remote == remote.to_bits()).then_some(value.frames)
    }

    /// Ends the lease of a conversation to `remote`.
    pub fn end(&self, conversation: &Conversation, remote: Ipv4Addr) {
        let mut maps = self.0.lock();
        let key = ConversationKey::new(conversation);
        // The programs may have forgotten it.
        let now = maps.conversations.get(&key, 0).ok().filter(|now| now.remote == remote.to_bits());
        if let Some(now) = now {
            // Programs keep counting its frames.
            let _ = maps.conversations.insert(key, TranslatedValue { until_ns: 0, ..now }, 0);
        }
    }

    /// Installs an index: programs restore its packets as those of `conversation`. Returns false if the map is full.
    pub fn insert(&self, index: Index, conversation: &Conversation) -> bool {
        let value = TranslationValue { is: ConversationKey::new(conversation), seen_ns: 0, lost: 0 };
        self.0.lock().translations.insert(TranslationKey::new(index), value, 0).is_ok()
    }

    /// Makes programs note a host's proofs. Returns what they have noted; `None` if the map is full.
    pub fn expect_proof(&self, remote: Ipv4Addr, transport: Transport) -> Option<Seen> {
        let index = Index { remote, index: 0, transport };
        self.seen(index).or_else(|| {
            let (key, value) = (TranslationKey::new(index), TranslationValue::default());
            self.0.lock().translations.insert(key, value, 0).ok()?;
            Some(Seen::default())
        })
    }

    /// What programs have noted of an index's packets; `None` if they do not know it.
    pub fn seen(&self, index: Index) -> Option<Seen> {
        let value = self.0.lock().translations.get(&TranslationKey::new(index), 0).ok()?;
        Some(Seen { seen_ns: value.seen_ns, lost: value.lost })
    }

    /// Forgets an index.
    pub fn remove(&self, index: Index) {
        // Absent if the map was full.
        let _ = self.0.lock().translations.remove(&TranslationKey::new(index));
    }

    /// All installed indices, also those of an earlier vnetd.
    pub fn indices(&self) -> Vec<Index> {
        self.0.lock().translations.keys().flatten().filter_map(|key| key.index()).collect()
    }
}
