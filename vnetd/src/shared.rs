//! Shared state of all handlers: access to the engine on blocking threads, and refusals.

use std::sync::Arc;

use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::Semaphore;
use vnet_control::api;
use vnet_control::config::ConfigError;
use vnet_control::engine::{Engine, EngineError};
use vnet_control::events::Asker;

/// The engine that requests and signals use; `None` once vnetd stops.
pub type Shared = Arc<Mutex<Option<Engine>>>;

/// Maximum length of a request body in bytes.
pub const BODY_MAX: usize = 1 << 20;

/// Reason why a request is refused: an error of the engine, or an invalid request.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("{0}")]
    Request(String),
}

impl From<std::io::Error> for Refused {
    fn from(error: std::io::Error) -> Refused {
        Refused::Request(error.to_string())
    }
}

impl From<String> for Refused {
    fn from(text: String) -> Refused {
        Refused::Request(text)
    }
}

impl From<ConfigError> for Refused {
    fn from(error: ConfigError) -> Refused {
        Refused::Engine(error.into())
    }
}

impl From<BytesRejection> for Refused {
    fn from(rejection: BytesRejection) -> Refused {
        Refused::Request(if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
            format!(
                "the request's body is larger than {BODY_MAX} bytes; use the configuration file and SIGHUP"
            )
        } else {
            rejection.body_text()
        })
    }
}

impl From<PathRejection> for Refused {
    fn from(rejection: PathRejection) -> Refused {
        Refused::Request(rejection.body_text())
    }
}

impl From<QueryRejection> for Refused {
    fn from(rejection: QueryRejection) -> Refused {
        Refused::Request(rejection.body_text())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let status = match &self {
            Refused::Request(_) | Refused::Engine(EngineError::Invalid(_)) => StatusCode::BAD_REQUEST,
            Refused::Engine(
                EngineError::NotFound(..)
                | EngineError::UnknownSource(_)
                | EngineError::UnknownAddress { .. }
                | EngineError::Guest { .. },
            ) => StatusCode::NOT_FOUND,
            Refused::Engine(_) => StatusCode::CONFLICT,
        };
        refusal(status, &self.to_string())
    }
}

/// An error answer, one entry per line of `text`.
pub fn refusal(status: StatusCode, text: &str) -> Response {
    json(status, &api::Refusal { errors: text.lines().map(String::from).collect() })
}

/// A JSON answer.
pub fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).expect("the API's types are all JSON");
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Maximum number of threads that use the engine concurrently; further requests wait without occupying a thread.
static ENGINE_THREADS: Semaphore = Semaphore::const_new(4);

/// Runs `task` with the engine on a blocking thread.
pub async fn with_engine<T: Send + 'static>(
    shared: Shared,
    task: impl FnOnce(&mut Engine) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    let stopping = || Refused::Request("vnetd is stopping".into());
    let Ok(permit) = ENGINE_THREADS.acquire().await else { return Err(stopping()) };
    let done = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        match shared.lock().as_mut() {
            Some(engine) => task(engine),
            None => Err(stopping()),
        }
    });
    done.await.unwrap_or_else(|_| Err(stopping()))
}

/// Queries the engine, and answers with the result as JSON.
pub async fn ask<T: Serialize + Send + 'static>(
    shared: Shared,
    question: impl FnOnce(&Engine) -> T + Send + 'static,
) -> Response {
    match with_engine(shared, |engine| Ok(question(engine))).await {
        Ok(answer) => json(StatusCode::OK, &answer),
        Err(refused) => refused.into_response(),
    }
}

/// Like [`with_engine`], for a change, which the engine logs with the name of `asker`.
pub async fn change<T: Send + 'static>(
    shared: Shared,
    asker: Asker,
    task: impl FnOnce(&mut Engine) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    with_engine(shared, |engine| engine.on_behalf(asker, task)).await
}
