//! Traces over several hosts: queries the hosts behind links, and answers their queries. `vnet_control::follow` defines the
//! message format.
//!
//! One task receives the messages that arrive over links. It hands an answer to the request that waits for it (by link and
//! question number), and spawns a task for each question, at most [`ANSWERING_MAX`] at a time, because a question may have to be
//! forwarded to further hosts first.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use vnet::frame::PortId;
use vnet::link::inquiry::{Inbox, Inquiry};
use vnet_control::api::{Hop, Trace, TracedCopy};
use vnet_control::follow::{Answer, FAN_OUT, HOPS, Question, Said};

use crate::shared::{Refused, Shared, with_engine};

/// Maximum number of questions of other hosts answered concurrently.
const ANSWERING_MAX: usize = 16;
/// Timeout per remaining hop. Hosts farther away have fewer hops left and wait less, so that their answers reach the hosts nearer
/// to the requester in time.
const WAIT_PER_HOP: Duration = Duration::from_millis(150);
/// Transmissions of a question, spread evenly over the timeout, because datagrams can be lost.
const TRIES: u32 = 3;

/// Port of the link, and number of the question.
type Key = (PortId, u64);
/// The other host's answer, or the reason why there is none.
type Outcome = Result<Hop, String>;

/// Requests that wait for an answer.
#[derive(Default)]
pub struct Followers(Mutex<HashMap<Key, oneshot::Sender<Outcome>>>);

impl Followers {
    fn expect(&self, key: Key) -> oneshot::Receiver<Outcome> {
        let (sender, receiver) = oneshot::channel();
        self.0.lock().insert(key, sender);
        receiver
    }

    fn settle(&self, key: Key, result: Outcome) {
        let waiting = self.0.lock().remove(&key);
        if let Some(waiting) = waiting {
            // The requester may have given up.
            let _ = waiting.send(result);
        }
    }
}

/// Receives questions and answers until vnetd stops.
pub async fn serve(shared: Shared, followers: Arc<Followers>, inbox: Arc<Inbox>) {
    if let Err(error) = take_in(shared, followers, inbox).await {
        tracing::error!("traces over links stopped working: {error}");
    }
}

async fn take_in(shared: Shared, followers: Arc<Followers>, inbox: Arc<Inbox>) -> io::Result<()> {
    // SAFETY: the inbox owns one descriptor and never replaces it, and `bell` owns the inbox until it is dropped.
    let bell = unsafe { AsyncFd::register_with_interest(inbox, Interest::READABLE)? };
    let answering = Arc::new(Semaphore::new(ANSWERING_MAX));
    loop {
        let mut ready = bell.readable().await?;
        // Clear before reading: messages that arrive later set the readiness again.
        ready.clear_ready();
        for Inquiry { link, answer, text } in bell.get_ref().take() {
            match Said::read(answer, &text) {
                Some(Said::Question(question)) => {
                    let Ok(permit) = answering.clone().try_acquire_owned() else { continue };
                    let (shared, followers) = (shared.clone(), followers.clone());
                    tokio::spawn(async move {
                        // A question that cannot be answered stays unanswered; the other host times out.
                        let _ = reply(shared, &followers, link, question, text.len()).await;
                        drop(permit);
                    });
                }
                Some(Said::Answer(Answer { id, hop })) => followers.settle((link, id), Ok(hop)),
                Some(Said::Echo { id }) => {
                    followers.settle((link, id), Err("its version does not answer traces".into()));
                }
                None => {}
            }
        }
    }
}

/// Answers one question.
async fn reply(
    shared: Shared,
    followers: &Followers,
    link: PortId,
    question: Question,
    len: usize,
) -> Result<(), Refused> {
    let Question { id, hops, .. } = question;
    let mut trace = {
        let question = question.clone();
        with_engine(shared.clone(), move |engine| Ok(engine.trace_for(link, &question)?)).await?
    };
    follow(&shared, followers, &mut trace, hops.min(HOPS) - u8::from(hops > 0), FAN_OUT).await;
    with_engine(shared, move |engine| {
        let hop = engine.hop(trace);
        Ok(engine.answer(link, len, Answer { id, hop })?)
    })
    .await
}

/// A traced copy whose next host is being queried.
struct Asked<'a> {
    copy: &'a mut TracedCopy,
    link: String,
    key: Key,
    receiver: oneshot::Receiver<Outcome>,
}

impl Asked<'_> {
    fn is_open(&self) -> bool {
        self.copy.next.is_none() && self.copy.silent.is_none()
    }

    fn close(&mut self, result: Outcome) {
        match result {
            Ok(hop) => self.copy.next = Some(hop.into()),
            Err(why) => self.copy.silent = Some(why),
        }
    }
}

/// Queries the hosts behind the links that copies of a traced frame take: at most `fan_out` links, at most `hops`
/// hosts away. Adds their answers to the copies.
pub async fn follow(shared: &Shared, followers: &Followers, trace: &mut Trace, hops: u8, fan_out: usize) {
    let Trace { network, src, dst, .. } = *trace;
    let question = Question { id: random(), network, src, dst, hops };
    let mut asked = vec![];
    let links = trace.copies.iter_mut().filter_map(|copy| {
        let link = copy.to.strip_prefix("link ")?.to_string();
        Some((copy, link))
    });
    for (copy, link) in links.take(if hops == 0 { 0 } else { fan_out }) {
        let name = link.clone();
        let port = with_engine(shared.clone(), move |engine| Ok(engine.link_port(&name))).await;
        if let Ok(Some(port)) = port {
            let key = (port, question.id);
            asked.push(Asked { copy, link, key, receiver: followers.expect(key) });
        }
    }
    let wait = WAIT_PER_HOP * u32::from(hops);
    let started = Instant::now();
    for attempt in 1..=TRIES {
        for asked in asked.iter_mut().filter(|asked| asked.is_open()) {
            let (link, question) = (asked.link.clone(), question.clone());
            let sent = with_engine(shared.clone(), move |engine| Ok(engine.ask(&link, &question)?)).await;
            if let Err(error) = sent {
                asked.close(Err(error.to_string()));
            }
        }
        let until = started + wait * attempt / TRIES;
        for asked in asked.iter_mut().filter(|asked| asked.is_open()) {
            if let Ok(Ok(result)) = timeout_at(until, &mut asked.receiver).await {
                asked.close(result);
            }
        }
    }
    for asked in asked.iter_mut().filter(|asked| asked.is_open()) {
        followers.settle(asked.key, Err(String::new()));
        asked.close(Err("no answer came".into()));
    }
}

/// An unguessable question number: the standard library seeds its hasher randomly.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
