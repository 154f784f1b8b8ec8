//! `POST /v1/console`: executes the request's lines and streams their answers.
//!
//! A short script is answered at once. Of a long one, more lines are executed when the client has read the answers so far: 8 kB
//! of `ROUTES?` lines request gigabytes of a full table, but take the memory of one listing. When the client disconnects, its
//! script ends.

use std::io;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::Stream;
use futures_util::stream::try_unfold;
use vnet_control::api::ConsoleAnswer;
use vnet_control::console::Script;
use vnet_control::events::Asker;

use crate::shared::{Refused, Shared, change, json};

/// Executes `script` for `asker`.
pub async fn run(shared: Shared, asker: Asker, script: Script) -> Result<Response, Refused> {
    let (script, answers) = piece(shared.clone(), asker.clone(), script).await?;
    if script.is_done() {
        return Ok(json(StatusCode::OK, &answers));
    }
    let head = [(header::CONTENT_TYPE, "application/json")];
    Ok((head, Body::from_stream(stream(shared, asker, script, answers))).into_response())
}

/// Executes the next lines on a blocking thread; returns their answers and the rest of the script.
async fn piece(
    shared: Shared,
    asker: Asker,
    mut script: Script,
) -> Result<(Script, Vec<ConsoleAnswer>), Refused> {
    let done = change(shared, asker, move |engine| {
        let answers = script.next(engine);
        Ok((script, answers))
    });
    done.await
}

/// The JSON list of all answers as a stream: `first`, then those of the rest of `script`.
fn stream(
    shared: Shared,
    asker: Asker,
    script: Script,
    first: Vec<ConsoleAnswer>,
) -> impl Stream<Item = io::Result<Bytes>> {
    // The separator before the next answer; `None` after the end of the list.
    let begin = Some((script, Some(first), '['));
    try_unfold(begin, move |state| {
        let (shared, asker) = (shared.clone(), asker.clone());
        async move {
            let Some((script, ready, mut separator)) = state else { return Ok(None) };
            let (script, answers) = match ready {
                Some(answers) => (script, answers),
                None => {
                    piece(shared, asker, script).await.map_err(|why| io::Error::other(why.to_string()))?
                }
            };
            let mut text = String::new();
            for answer in &answers {
                text.push(separator);
                text += &serde_json::to_string(answer)?;
                separator = ',';
            }
            if script.is_done() {
                text += if separator == '[' { "[]" } else { "]" };
                return Ok(Some((text.into(), None)));
            }
            Ok(Some((text.into(), Some((script, None, separator)))))
        }
    })
}

#[cfg(test)]
mod tests {
    use futures_util::{StreamExt, pin_mut};
    use serde_json::Value;

    use super::*;
    use crate::handlers::tests::app;
    use vnet_control::language::Dialect;

    #[tokio::test]
    async fn a_client_that_does_not_read_stops_the_script() {
        let shared = app(None).shared;
        let text = "HELP\n".repeat(1_000) + "\n".repeat(600).as_str() + "LINK ADD 127.0.0.2 9000\n";
        let script = Script::new(Dialect::Console, text.into_bytes());
        let asker = || Asker::Part("a test");
        let (script, first) = piece(shared.clone(), asker(), script).await.ok().unwrap();
        let pieces = stream(shared.clone(), asker(), script, first);
        pin_mut!(pieces);
        let links = || shared.lock().as_ref().unwrap().links().len();
        let (mut all, mut count) = (vec![], 0);
        while let Some(text) = pieces.next().await {
            let text = text.unwrap();
            assert!(text.len() < 4 * vnet_control::console::ANSWERS_AT_ONCE, "{} bytes at once", text.len());
            all.extend_from_slice(&text);
            count += 1;
            assert_eq!(links(), usize::from(all.ends_with(b"]")), "the last line waits for the reader");
        }
        assert!(count > 10, "{count} pieces");
        let answers: Vec<Value> = serde_json::from_slice(&all).unwrap();
        assert_eq!((answers.len(), &answers[1_000]["line"]), (1_001, &Value::from(1_601)));
    }
}
