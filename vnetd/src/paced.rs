//! Rate limit of long lists over TCP.
//!
//! A list of 10^5 addresses takes tens of milliseconds of a processor, and anybody who reaches the port may request it. So TCP clients get
//! lists one after the other, and after each one the next waits [`SHARE`] times as long as it took. The control socket, which only root and
//! vnetd's user may open, has no such limit.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};
use vnet::threads::processor_time;
use vnet_control::engine::Engine;
use vnet_control::events::Asker;

use crate::shared::{self, Shared, json, refusal, with_engine};

/// Lists take at most a processor's time divided by this: they must not show in the 99th percentile of round trips.
const SHARE: u32 = 200;
/// Longest wait of a client; then it is refused.
const PATIENCE: Duration = Duration::from_secs(5);
const BUSY: &str = "lists of addresses and routes take at most 1/200 of a processor over TCP; try again later, or ask at the control socket";

/// Time from which the next list may be made; `None`: there was none yet.
#[derive(Clone, Default)]
pub struct Pace(Arc<Mutex<Option<Instant>>>);

/// Answers with a list that may be long.
pub async fn ask<T: Serialize + Send + 'static>(
    by: Asker,
    pace: Pace,
    shared: Shared,
    question: impl FnOnce(&Engine) -> T + Send + 'static,
) -> Response {
    if !matches!(by, Asker::Http(_)) {
        return shared::ask(shared, question).await;
    }
    let turn = async {
        let next = pace.0.lock_owned().await;
        if let Some(at) = *next {
            sleep_until(at).await;
        }
        next
    };
    let Ok(mut next) = timeout(PATIENCE, turn).await else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, BUSY);
    };
    // A task of its own: a client that disconnects meanwhile cancels this future, and must not escape the pause.
    let answered = tokio::spawn(async move {
        let timed = |engine: &mut Engine| {
            let start = processor_time();
            let list = question(engine);
            Ok((list, processor_time().saturating_sub(start)))
        };
        match with_engine(shared, timed).await {
            Ok((list, taken)) => {
                let start = processor_time();
                let answer = json(StatusCode::OK, &list);
                *next = Some(Instant::now() + (taken + processor_time().saturating_sub(start)) * SHARE);
                answer
            }
            Err(refused) => refused.into_response(),
        }
    });
    answered.await.unwrap_or_else(|_| refusal(StatusCode::SERVICE_UNAVAILABLE, "vnetd is stopping"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handlers::tests::app;

    async fn status(by: Asker, pace: &Pace, shared: &Shared) -> StatusCode {
        ask(by, pace.clone(), shared.clone(), Engine::routes).await.status()
    }

    #[tokio::test]
    async fn lists_over_tcp_wait_for_their_turn() {
        let (pace, shared) = (Pace::default(), app(None).shared);
        let remote = || Asker::Http("192.0.2.1:5000".parse().unwrap());
        assert_eq!(status(remote(), &pace, &shared).await, StatusCode::OK);
        let next = pace.0.lock().await.expect("the list is charged");
        assert_eq!(status(remote(), &pace, &shared).await, StatusCode::OK);
        assert!(Instant::now() >= next, "it waited");
        *pace.0.lock().await = Some(Instant::now() + Duration::from_secs(1_000));
        assert_eq!(status(remote(), &pace, &shared).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status(Asker::Unix { uid: 0, pid: None }, &pace, &shared).await, StatusCode::OK);
    }

    #[tokio::test]
    #[allow(clippy::await_holding_lock, reason = "the list must wait for the engine")]
    async fn a_client_that_disconnects_is_charged() {
        let (pace, shared) = (Pace::default(), app(None).shared);
        let remote = Asker::Http("192.0.2.1:5000".parse().unwrap());
        let engine = shared.lock();
        let asked = tokio::spawn(ask(remote, pace.clone(), shared.clone(), Engine::routes));
        // Until the list waits for the engine.
        while pace.0.try_lock().is_ok() {
            tokio::task::yield_now().await;
        }
        tokio::task::yield_now().await;
        asked.abort();
        assert!(asked.await.unwrap_err().is_cancelled());
        drop(engine);
        assert!(pace.0.lock().await.is_some());
    }
}
