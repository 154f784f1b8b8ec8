//! Traces over several hosts (`vnet trace --follow`): the messages exchanged by the hosts' control parts.
//!
//! Each host queries the next one over the link that the frame would take (`vnet::link::inquiry`), and adds the answer to its
//! own. Messages are JSON, padded with spaces to the maximum length of the answer.
//!
//! Limits: a question's hop count starts at [`HOPS`]; a host forwards a peer's question to at most [`FAN_OUT`] links; links
//! rate-limit questions and answers; an answer is at most as long as the question and omits copies that do not fit. Text from
//! other hosts is truncated, stripped of control characters and only displayed.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::api::{Hop, HopCopy, Trace};
use super::desired::Target;
use super::engine::{Engine, EngineError, Listed};
use vnet::frame::{NetworkId, PortId};
use vnet::link::inquiry::Inbox;
use vnet::wire::ethernet::Mac;

/// Maximum number of hops behind the first host; relayed frames have the same limit.
pub const HOPS: u8 = vnet::wire::native::HOPS_MAX;
/// Maximum number of links to which a peer's question is forwarded.
pub const FAN_OUT: usize = 4;
/// Maximum number of links to which a local user's question is sent.
pub const FAN_OUT_OWN: usize = 64;
/// Maximum length of a text accepted from another host, in characters.
const WORDS_MAX: usize = 200;
/// Maximum number of copies accepted from another host.
const COPIES_MAX: usize = 64;

/// The question: how would this host forward the frame?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Random id, so that only hosts that received the question can answer it.
    pub id: u64,
    /// Network id.
    pub network: NetworkId,
    /// Source MAC address.
    pub src: Mac,
    /// Destination MAC address.
    pub dst: Mac,
    /// Hops that the question may still take, including the receiver.
    pub hops: u8,
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The question's id.
    pub id: u64,
    /// How this host would forward the frame.
    pub hop: Hop,
}

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// A question.
    Question(Question),
    /// An answer.
    Answer(Answer),
    /// Our own question echoed: the peer's version does not support traces.
    Echo {
        /// The question's id.
        id: u64,
    },
}

impl Said {
    /// Parses a message; `None` if it is malformed.
    pub fn read(answer: bool, text: &[u8]) -> Option<Said> {
        if !answer {
            return serde_json::from_slice(text).ok().map(Said::Question);
        }
        if let Ok(Answer { id, mut hop }) = serde_json::from_slice(text) {
            clean(&mut hop, HOPS);
            return Some(Said::Answer(Answer { id, hop }));
        }
        let Question { id, .. } = serde_json::from_slice(text).ok()?;
        Some(Said::Echo { id })
    }
}

/// Makes text from a peer safe to display.
fn clean(hop: &mut Hop, depth: u8) {
    let words = |text: &mut String| {
        *text = text.chars().filter(|c| !c.is_control()).take(WORDS_MAX).collect();
    };
    [&mut hop.host, &mut hop.from, &mut hop.why].into_iter().chain(&mut hop.drop).for_each(words);
    hop.more = hop.more.saturating_add(hop.copies.len().saturating_sub(COPIES_MAX));
    hop.copies.truncate(COPIES_MAX);
    for copy in &mut hop.copies {
        [&mut copy.to].into_iter().chain(&mut copy.state).chain(&mut copy.silent).for_each(words);
        match &mut copy.next {
            Some(next) if depth > 1 => clean(next, depth - 1),
            next => *next = None,
        }
    }
}

impl Question {
    /// The question's text, with room for an answer of `len` bytes; `None` if `len` is too small for the question itself.
    pub fn text(&self, len: usize) -> Option<Vec<u8>> {
        let mut text = serde_json::to_vec(self).ok()?;
        let fits = text.len() <= len;
        text.resize(len, b' ');
        fits.then_some(text)
    }
}

impl Answer {
    /// The answer's text in at most `len` bytes. Nested answers are dropped first, then copies; `None` if even the rest does not
    /// fit.
    pub fn text(mut self, len: usize) -> Option<Vec<u8>> {
        loop {
            let text = serde_json::to_vec(&self).ok()?;
            if text.len() <= len {
                return Some(text);
            }
            // Omit the farthest hops first: a copy is worth more than the hops behind it.
            let next = self.hop.copies.iter_mut().rev().find_map(|copy| copy.next.take());
            if next.is_none() {
                self.hop.copies.pop()?;
                self.hop.more += 1;
            }
        }
    }
}

impl Engine {
    /// Questions and answers received from other hosts.
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Sends a question to the host behind a link. An answer, if any, arrives at [`Engine::inbox`].
    ///
    /// # Errors
    /// The link is unknown or has no inquiries, or sending fails.
    pub fn ask(&self, link: &str, question: &Question) -> io::Result<()> {
        let live = self.links.get(link).ok_or(io::ErrorKind::NotFound)?;
        let text = question.text(live.link.inquiry_text()?);
        let text = text.ok_or_else(|| io::Error::other("the path's MTU is too small for a question"))?;
        self.core.courier().send(&live.link, false, &text)
    }

    /// A link's port, which identifies the link in [`Engine::inbox`].
    pub fn link_port(&self, link: &str) -> Option<PortId> {
        self.links.get(link).map(|live| live.port)
    }

    /// Answers the host behind the link at `port`, in at most `len` bytes.
    ///
    /// # Errors
    /// The link no longer exists, no answer fits, or sending fails.
    pub fn answer(&self, port: PortId, len: usize, answer: Answer) -> io::Result<()> {
        let live = self.links.values().find(|live| live.port == port).ok_or(io::ErrorKind::NotFound)?;
        let len = len.min(live.link.inquiry_text()?);
        let text = answer.text(len).ok_or_else(|| io::Error::other("the answer does not fit"))?;
        self.core.courier().send(&live.link, true, &text)
    }

    /// How this host would forward the frame that the host behind `port` asks about.
    ///
    /// # Errors
    /// The link no longer exists.
    pub fn trace_for(&self, port: PortId, question: &Question) -> Result<Trace, EngineError> {
        let found = self.links.iter().find(|(_, live)| live.port == port).map(|(name, _)| name);
        let name = found.ok_or_else(|| EngineError::NotFound("such link".into(), Listed::Links))?;
        let Question { network, src, dst, .. } = *question;
        self.trace(network, src, dst, Some(&Target::Link(name.clone())))
    }

    /// The part of a trace that may be disclosed to other hosts.
    pub fn hop(&self, trace: Trace) -> Hop {
        let copy = |copy: super::api::TracedCopy| HopCopy {
            to: copy.to,
            state: (copy.state != "up").then_some(copy.state),
            next: copy.next,
            silent: copy.silent,
        };
        Hop {
            host: self.current.host.spec.name.clone(),
            from: trace.from,
            why: trace.why,
            copies: trace.copies.into_iter().map(copy).collect(),
            drop: trace.drop,
            more: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn question() -> Question {
        let (src, dst) = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
        Question { id: u64::MAX, network: NetworkId::DEFAULT, src, dst, hops: HOPS }
    }

    fn hop(depth: usize, copies: usize, text: &str) -> Hop {
        let copy = |index| HopCopy {
            to: format!("link h{index}{text}"),
            next: (depth > 1).then(|| hop(depth - 1, copies, text).into()),
            ..HopCopy::default()
        };
        let copies = (0..copies).map(copy).collect();
        Hop { host: text.into(), from: text.into(), why: text.into(), copies, drop: None, more: 0 }
    }

    fn depth(hop: &Hop) -> usize {
        1 + hop.copies.iter().filter_map(|copy| copy.next.as_deref()).map(depth).max().unwrap_or(0)
    }

    #[test]
    fn questions_and_answers_round_trip() {
        let text = question().text(600).unwrap();
        assert_eq!(text.len(), 600);
        assert_eq!(Said::read(false, &text), Some(Said::Question(question())));
        assert_eq!(Said::read(true, &text), Some(Said::Echo { id: u64::MAX }));
        assert_eq!(question().text(20), None);
        let answer = Answer { id: 7, hop: hop(3, 1, "x") };
        let text = answer.clone().text(600).unwrap();
        assert_eq!(Said::read(true, &text), Some(Said::Answer(answer)));
        assert_eq!(Said::read(false, &text), None);
    }

    #[test]
    fn texts_of_peers_are_truncated_and_cleaned() {
        let nasty = format!("\u{1b}[2J\n{}", "x".repeat(500));
        let text = serde_json::to_vec(&Answer { id: 1, hop: hop(9, 1, &nasty) }).unwrap();
        let Some(Said::Answer(answer)) = Said::read(true, &text) else { panic!("an answer") };
        assert_eq!(depth(&answer.hop), usize::from(HOPS));
        assert_eq!(answer.hop.why.len(), WORDS_MAX);
        assert!(!answer.hop.copies[0].to.chars().any(char::is_control));
        let mut many = hop(1, 200, "");
        clean(&mut many, HOPS);
        assert_eq!((many.copies.len(), many.more), (COPIES_MAX, 200 - COPIES_MAX));
    }

    proptest! {
        /// An answer of any size can be shortened to any of these lengths.
        #[test]
        fn answers_fit(depth in 1usize..4, copies in 0usize..6, len in 200usize..1400) {
            let whole = Answer { id: 1, hop: hop(depth, copies, "some words") };
            let text = whole.text(len).unwrap();
            prop_assert!(text.len() <= len);
            let Some(Said::Answer(read)) = Said::read(true, &text) else { panic!("an answer") };
            prop_assert_eq!(read.hop.copies.len() + read.hop.more, copies);
        }

        #[test]
        fn strangers_do_no_harm(text in prop::collection::vec(any::<u8>(), 0..300), answer: bool) {
            let _ = Said::read(answer, &text);
        }
    }
}
