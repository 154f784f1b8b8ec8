//! Following a frame from host to host (`vnet trace --follow`): what controls say to each other.
//!
//! Each host asks the next one over the very link that the frame would take (`link/inquiry.rs`), and hands the answer back with
//! what it knows itself. Texts are JSON, padded with spaces to the length that the answer may have.
//!
//! Bounds: a question counts its hops down from [`HOPS`]; a host asks at most [`FAN_OUT`] links onward for a peer's question;
//! links meter what they take; an answer has the question's length at most, and leaves copies out that do not fit. What other
//! hosts say is data for people: it is cut, cleaned of control characters and shown, and changes nothing.

use std::io;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::api::{Hop, HopCopy, Trace};
use super::desired::Target;
use super::engine::{Engine, EngineError};
use vnet::frame::{NetworkId, PortId};
use vnet::link::inquiry::Inbox;
use vnet::wire::ethernet::Mac;

/// Hosts after the first that a trace is followed to: as many as relays may pass a frame on.
pub const HOPS: u8 = vnet::wire::native::HOPS_MAX;
/// Links that a host asks onward for one question of a peer.
pub const FAN_OUT: usize = 4;
/// Links that a host asks for its own user.
pub const FAN_OUT_OWN: usize = 64;
/// Characters of any text that another host sent.
const WORDS_MAX: usize = 200;
/// Copies shown of what another host sent.
const COPIES_MAX: usize = 64;

/// What would become of this frame at your host?
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// Names the question; chosen at random, so that nobody answers in another's place.
    pub id: u64,
    /// The frame's network.
    pub network: NetworkId,
    /// Its source address.
    pub src: Mac,
    /// Its destination address.
    pub dst: Mac,
    /// Hosts that may be asked, the one that gets this included.
    pub hops: u8,
}

/// This.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The question's.
    pub id: u64,
    /// What would become of the frame.
    pub hop: Hop,
}

/// What another control said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It asks.
    Question(Question),
    /// It answers.
    Answer(Answer),
    /// It sent a question of ours back as it was: it does not know what that is.
    Echo {
        /// The question's id.
        id: u64,
    },
}

impl Said {
    /// Reads what came by a link. `None` when it is nothing of the kind.
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

/// Makes a stranger's text fit to be shown.
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
    /// The text of a question that may be answered in `len` bytes. `None` when not even the question fits.
    pub fn text(&self, len: usize) -> Option<Vec<u8>> {
        let mut text = serde_json::to_vec(self).ok()?;
        let fits = text.len() <= len;
        text.resize(len, b' ');
        fits.then_some(text)
    }
}

impl Answer {
    /// The text of the answer in at most `len` bytes: what does not fit is left out, later copies first. `None` when nothing fits.
    pub fn text(mut self, len: usize) -> Option<Vec<u8>> {
        loop {
            let text = serde_json::to_vec(&self).ok()?;
            if text.len() <= len {
                return Some(text);
            }
            // The farthest hops go first: a copy says more than what is behind it.
            let next = self.hop.copies.iter_mut().rev().find_map(|copy| copy.next.take());
            if next.is_none() {
                self.hop.copies.pop()?;
                self.hop.more += 1;
            }
        }
    }
}

impl Engine {
    /// Where questions and answers of other hosts come in.
    pub fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Asks the host behind a link. The answer comes in by [`Engine::inbox`], or never.
    ///
    /// # Errors
    /// There is no such link, it carries no questions, or the kernel refuses.
    pub fn ask(&self, link: &str, question: &Question) -> io::Result<()> {
        let live = self.links.get(link).ok_or(io::ErrorKind::NotFound)?;
        let text = question.text(live.link.inquiry_text());
        let text = text.ok_or_else(|| io::Error::other("the path's MTU is too small for a question"))?;
        self.core.courier().send(&live.link, false, &text)
    }

    /// The port of a link, by which [`Engine::inbox`] names it.
    pub fn link_port(&self, link: &str) -> Option<PortId> {
        self.links.get(link).map(|live| live.port)
    }

    /// Answers the host behind the link at `port`, in at most `len` bytes.
    ///
    /// # Errors
    /// The link is gone, nothing fits, or the kernel refuses.
    pub fn answer(&self, port: PortId, len: usize, answer: Answer) -> io::Result<()> {
        let live = self.links.values().find(|live| live.port == port).ok_or(io::ErrorKind::NotFound)?;
        let len = len.min(live.link.inquiry_text());
        let text = answer.text(len).ok_or_else(|| io::Error::other("the answer does not fit"))?;
        self.core.courier().send(&live.link, true, &text)
    }

    /// What would become here of the frame that the host behind the link at `port` asks about.
    ///
    /// # Errors
    /// The link is gone.
    pub fn trace_for(&self, port: PortId, question: &Question) -> Result<Trace, EngineError> {
        let found = self.links.iter().find(|(_, live)| live.port == port).map(|(name, _)| name);
        let name = found.ok_or_else(|| EngineError::NotFound("such link".into()))?;
        let Question { network, src, dst, .. } = *question;
        self.trace(network, src, dst, Some(&Target::Link(name.clone())))
    }

    /// What other hosts may know of a trace.
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
    fn questions_and_answers_are_read_as_they_were_written() {
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
    fn what_others_say_is_cut_and_cleaned() {
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
        /// An answer fits whatever there is to say, as far as anything fits.
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
