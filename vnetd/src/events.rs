//! `GET /v1/events`: streams events as server-sent events (WHATWG HTML, section 9.2).
//!
//! All subscribers share one bounded queue. A subscriber that falls more than [`EVENTS_KEPT`] events behind gets a `lagged` event
//! with the number of missed events and continues with the oldest one left; it never blocks the sender. States and moves are
//! polled only while there are subscribers.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::unfold;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::broadcast::{self, Receiver};
use vnet_control::api;
use vnet_control::events::{Event, Sink};
use vnet_control::watch::Watch;

use crate::shared::{Shared, refusal, with_engine};

/// Size of the queue in events. In the worst case, with 256 changes of some 200 bytes in each event, the queue takes 13 MB.
const EVENTS_KEPT: usize = 256;
/// Maximum number of concurrent subscribers.
const READERS_MAX: usize = 32;
/// Polling interval of states and moves.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Distributes events to the subscribers.
#[derive(Clone)]
pub struct Hub {
    sender: broadcast::Sender<Arc<Event>>,
    readers: Arc<AtomicUsize>,
}

impl Hub {
    /// A hub without subscribers.
    pub fn new() -> Hub {
        Hub { sender: broadcast::Sender::new(EVENTS_KEPT), readers: Arc::default() }
    }

    /// A sink that publishes the engine's events to the subscribers.
    pub fn sink(&self) -> Sink {
        let hub = self.clone();
        Box::new(move |event| hub.tell(event))
    }

    fn tell(&self, event: Event) {
        // Sending fails only if there are no subscribers.
        let _ = self.sender.send(Arc::new(event));
    }

    /// Adds a subscriber, up to [`READERS_MAX`]; `None` at the limit.
    fn join(&self) -> Option<Reader> {
        let place = self.readers.fetch_update(Relaxed, Relaxed, |n| (n < READERS_MAX).then_some(n + 1));
        place.ok().map(|_| Reader { events: self.sender.subscribe(), readers: self.readers.clone() })
    }
}

/// A subscription; dropping it frees its slot.
struct Reader {
    events: Receiver<Arc<Event>>,
    readers: Arc<AtomicUsize>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.readers.fetch_sub(1, Relaxed);
    }
}

impl Reader {
    /// The next event; `None` when vnetd stops.
    async fn next(&mut self) -> Option<Arc<Event>> {
        match self.events.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(missed)) => Some(Arc::new(Event::Lagged { missed })),
            Err(RecvError::Closed) => None,
        }
    }

    fn stream(self) -> impl Stream<Item = Result<sse::Event, Infallible>> {
        unfold(self, async |mut reader| {
            let event = reader.next().await?;
            let data = serde_json::to_string(&*event).expect("events are JSON");
            Some((Ok(sse::Event::default().event(event.kind()).data(data)), reader))
        })
    }
}

/// Streams server-sent events of the kinds `configuration`, `state`, `moved`, `threads` and `lagged`
#[utoipa::path(get, path = "/v1/events",
    responses((status = 200, body = Event, content_type = "text/event-stream"), (status = 503, body = api::Refusal)))]
pub async fn stream(State(hub): State<Hub>) -> Response {
    let Some(reader) = hub.join() else {
        let text = format!("{READERS_MAX} clients are reading events already; close one of them");
        return refusal(StatusCode::SERVICE_UNAVAILABLE, &text);
    };
    Sse::new(reader.stream()).keep_alive(KeepAlive::default()).into_response()
}

/// Polls for state changes and MAC moves while there are subscribers.
pub async fn watch(shared: Shared, hub: Hub) {
    let mut watch = Watch::default();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if hub.readers.load(Relaxed) == 0 {
            // Forget the old states: a new subscriber gets no events for changes that happened while there was none.
            watch = Watch::default();
            continue;
        }
        let looked = with_engine(shared.clone(), move |engine| {
            let events = watch.poll(engine);
            Ok((watch, events))
        });
        let Ok((looked, events)) = looked.await else { return };
        watch = looked;
        events.into_iter().for_each(|event| hub.tell(event));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_slow_reader_learns_how_many_events_it_missed() {
        let hub = Hub::new();
        let mut reader = hub.join().unwrap();
        let event = |missed| Event::Lagged { missed: missed as u64 };
        (0..EVENTS_KEPT + 3).for_each(|i| hub.tell(event(1000 + i)));
        assert_eq!(*reader.next().await.unwrap(), event(3));
        for i in 3..EVENTS_KEPT + 3 {
            assert_eq!(*reader.next().await.unwrap(), event(1000 + i));
        }
    }

    #[test]
    fn readers_are_bounded() {
        let hub = Hub::new();
        let readers: Vec<_> = (0..READERS_MAX).map(|_| hub.join().unwrap()).collect();
        assert!(hub.join().is_none());
        drop(readers);
        assert!(hub.join().is_some());
    }
}
