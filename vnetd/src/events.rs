//! `GET /v1/events`: what happens, told to whoever listens, as server-sent events (WHATWG HTML, section 9.2).
//!
//! Events go through one bounded queue that all readers share. A reader that is more than [`EVENTS_KEPT`] behind is told how
//! many it has missed and goes on with the oldest that is left; nobody is waited for. States and moves are looked for only while
//! somebody listens.

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
use vnet_control::events::{Event, Sink, Watch};

use crate::Shared;
use crate::api::{App, refusal, with_engine};

/// Events that a slow reader may be behind; with 256 changes of some 200 bytes each they have 13 MB together at worst.
const EVENTS_KEPT: usize = 256;
/// Readers at a time.
const READERS_MAX: usize = 32;
/// How often states and moves are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Where events are given and taken.
#[derive(Clone)]
pub struct Hub {
    sender: broadcast::Sender<Arc<Event>>,
    readers: Arc<AtomicUsize>,
}

impl Hub {
    /// Nothing has happened yet.
    pub fn new() -> Hub {
        Hub { sender: broadcast::Sender::new(EVENTS_KEPT), readers: Arc::default() }
    }

    /// Takes the engine's events.
    pub fn sink(&self) -> Sink {
        let hub = self.clone();
        Box::new(move |event| hub.tell(event))
    }

    fn tell(&self, event: Event) {
        // Nobody listening is no failure.
        let _ = self.sender.send(Arc::new(event));
    }

    /// A place among the readers, when there is one.
    fn join(&self) -> Option<Reader> {
        let place = self.readers.fetch_update(Relaxed, Relaxed, |n| (n < READERS_MAX).then_some(n + 1));
        place.ok().map(|_| Reader { events: self.sender.subscribe(), readers: self.readers.clone() })
    }
}

/// One listener's end.
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
    /// The next event; none when vnetd stops.
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

/// What happens, as it happens: server-sent events of the kinds `configuration`, `state`, `moved` and `lagged`
#[utoipa::path(get, path = "/v1/events",
    responses((status = 200, body = Event, content_type = "text/event-stream"), (status = 503, body = api::Refusal)))]
pub async fn stream(State(app): State<App>) -> Response {
    let Some(reader) = app.events.join() else {
        let text = format!("{READERS_MAX} clients read the events already; close one of them");
        return refusal(StatusCode::SERVICE_UNAVAILABLE, &text);
    };
    Sse::new(reader.stream()).keep_alive(KeepAlive::default()).into_response()
}

/// Looks for states and moves for ever, while somebody listens.
pub async fn watch(shared: Shared, hub: Hub) {
    let mut watch = Watch::default();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if hub.readers.load(Relaxed) == 0 {
            // What has happened while nobody listened is not told later.
            watch = Watch::default();
            continue;
        }
        let looked = with_engine(shared.clone(), move |engine| {
            let events = watch.look(engine);
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
    async fn a_slow_reader_is_told_what_it_missed() {
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
