//! `vnet events`: follows `GET /v1/events` and prints a line for each event.

use std::time::{SystemTime, UNIX_EPOCH};

use hyper::Method;
use vnet_control::events::Event;

use crate::capture::clock;
use crate::client::{Client, Ended};
use crate::output::{Failure, print};

/// Prints events until Ctrl-C, or until `count` events were printed.
pub fn run(client: &Client<'_>, count: Option<u64>, json: bool) -> Result<(), Failure> {
    let (mut lines, mut left, mut result) = (Lines::default(), count, Ok(()));
    let ended = client.stream(Method::GET, "/v1/events", |bytes| {
        for data in lines.take(bytes) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            result = print(&if json { format!("{data}\n") } else { text(&clock(now), &data) });
            left = left.map(|left| left - 1);
            if result.is_err() || left == Some(0) {
                return false;
            }
        }
        true
    })?;
    result?;
    match ended {
        Ended::Server => Err(Failure::Lines(vec!["vnetd ended the events; see its log".into()])),
        Ended::Taker | Ended::Signal => Ok(()),
    }
}

/// Splits a stream of server-sent events into the data of each event.
#[derive(Default)]
struct Lines {
    /// Bytes of an incomplete line.
    pending: Vec<u8>,
}

impl Lines {
    /// The data of the events that `bytes` complete. vnetd writes the data of an event on one line.
    fn take(&mut self, bytes: &[u8]) -> Vec<String> {
        self.pending.extend_from_slice(bytes);
        let end = self.pending.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole: Vec<u8> = self.pending.drain(..end).collect();
        let lines = whole.split(|byte| *byte == b'\n');
        let data = lines.filter_map(|line| line.strip_prefix(b"data:"));
        data.map(|data| String::from_utf8_lossy(data.trim_ascii()).into_owned()).collect()
    }
}

/// The lines of an event; the unchanged `data` if its kind is unknown, as from a newer vnetd.
fn text(clock: &str, data: &str) -> String {
    let Ok(event) = serde_json::from_str::<Event>(data) else { return format!("{clock} {data}\n") };
    match event {
        Event::Configuration { who, changes, changes_total } => {
            let shown = changes.len();
            let mut text: String =
                changes.iter().map(|change| format!("{clock} configuration {change} (by {who})\n")).collect();
            if changes_total > shown {
                text +=
                    &format!("{clock} configuration and {} more changes (by {who})\n", changes_total - shown);
            }
            text
        }
        Event::State { object, name, state, reason, path } => {
            let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
            let kernel =
                path.filter(|path| path == "kernel").map_or("", |_| ", known flows pass in the kernel");
            format!("{clock} state         {object} {name} is {state}{reason}{kernel}\n")
        }
        Event::Moved { network, mac, from, to, frozen } => {
            let frozen = if frozen { "; it moved too often and stays there for a while" } else { "" };
            format!("{clock} moved         {mac} in network {network}: from {from} to {to}{frozen}\n")
        }
        Event::Threads { before, now } => {
            format!("{clock} threads       {before} -> {now} threads run the dispatchers\n")
        }
        Event::Lagged { missed } => {
            format!("{clock} lagged        {missed} events were missed: this reader was too slow\n")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_whatever_the_read_sizes() {
        let stream = b"event: state\ndata: {\"a\":1}\n\n:\n\nevent: moved\ndata: {\"b\":2}\n\n";
        for size in 1..stream.len() {
            let mut lines = Lines::default();
            let found: Vec<_> = stream.chunks(size).flat_map(|piece| lines.take(piece)).collect();
            assert_eq!(found, ["{\"a\":1}", "{\"b\":2}"], "pieces of {size}");
        }
    }

    #[test]
    fn each_event_is_a_line() {
        for (data, want) in [
            (
                r#"{"event":"configuration","who":"SIGHUP","changes":[{"action":"add","object":"link","name":"h2",
                    "detail":"native"}],"changes_total":300}"#,
                "T configuration + link h2: native (by SIGHUP)\nT configuration and 299 more changes (by SIGHUP)\n",
            ),
            (
                r#"{"event":"state","object":"link","name":"h2","state":"down","reason":"silent"}"#,
                "T state         link h2 is down: silent\n",
            ),
            (
                r#"{"event":"state","object":"interface","name":"c1","state":"up","path":"kernel"}"#,
                "T state         interface c1 is up, known flows pass in the kernel\n",
            ),
            (
                r#"{"event":"moved","network":1,"mac":"52:54:00:00:00:01","from":"link h2","to":"link h3","frozen":false}"#,
                "T moved         52:54:00:00:00:01 in network 1: from link h2 to link h3\n",
            ),
            (
                r#"{"event":"threads","before":1,"now":3}"#,
                "T threads       1 -> 3 threads run the dispatchers\n",
            ),
            (
                r#"{"event":"lagged","missed":3}"#,
                "T lagged        3 events were missed: this reader was too slow\n",
            ),
            (r#"{"event":"new"}"#, "T {\"event\":\"new\"}\n"),
        ] {
            assert_eq!(text("T", data), want);
        }
    }
}
