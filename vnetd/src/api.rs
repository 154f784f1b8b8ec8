//! The HTTP/JSON API under `/v1`: one thin function a request, each of which asks the engine or changes it.
//!
//! Answers are the types of `vnet::control::api`; whatever is refused comes as `{"errors": [LINE, ...]}`. The engine is
//! used on a thread of its own, so that a change that takes long holds up neither signals nor other connections.

use std::sync::{MutexGuard, PoisonError};

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde::{Deserialize, Serialize};
use vnet::control::api;
use vnet::control::config::{self, ConfigError};
use vnet::control::desired::Target;
use vnet::control::engine::{Engine, EngineError};
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;

use crate::Shared;
use crate::socket::Guarded;

/// Largest request body in bytes (DESIGN.md section 10).
const BODY_MAX: usize = 1 << 20;

/// Answers requests for ever.
pub async fn serve(listener: Guarded, shared: Shared) {
    let routes = Router::new()
        .route("/v1/status", get(async |State(shared)| ask(shared, Engine::status).await))
        .route("/v1/stats", get(async |State(shared)| ask(shared, Engine::stats).await))
        .route("/v1/networks", get(async |State(shared)| ask(shared, Engine::networks).await))
        .route("/v1/learned", get(async |State(shared)| ask(shared, Engine::learned).await))
        .route(
            "/v1/interfaces",
            get(async |State(shared)| ask(shared, Engine::interfaces).await).post(add_interface),
        )
        .route("/v1/interfaces/{name}", delete(remove_interface))
        .route("/v1/links", get(async |State(shared)| ask(shared, Engine::links).await).post(add_link))
        .route("/v1/links/{name}", delete(remove_link))
        .route("/v1/routes", get(async |State(shared)| ask(shared, Engine::routes).await).post(add_route))
        .route("/v1/routes/{index}", delete(remove_route))
        .route("/v1/apply", post(apply))
        .route("/v1/trace", get(trace))
        .fallback(async || refusal(StatusCode::NOT_FOUND, "there is nothing at this path; see /v1/status"))
        .method_not_allowed_fallback(async || {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "this path does not know this method")
        })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(shared);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!("the control API has ended: {error}");
    }
}

/// The engine. A poisoned lock says nothing here: a panic ends the whole process (`panic = "abort"`).
pub fn lock(shared: &Shared) -> MutexGuard<'_, Option<Engine>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request is refused.
enum Refused {
    Engine(EngineError),
    Request(String),
}

impl From<EngineError> for Refused {
    fn from(error: EngineError) -> Refused {
        Refused::Engine(error)
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
        match self {
            Refused::Request(text) => refusal(StatusCode::BAD_REQUEST, &text),
            Refused::Engine(error) => {
                let status = match error {
                    EngineError::Invalid(_) => StatusCode::BAD_REQUEST,
                    EngineError::NotFound(_) | EngineError::UnknownSource(_) => StatusCode::NOT_FOUND,
                    _ => StatusCode::CONFLICT,
                };
                refusal(status, &error.to_string())
            }
        }
    }
}

fn refusal(status: StatusCode, text: &str) -> Response {
    json(status, &api::Refusal { errors: text.lines().map(String::from).collect() })
}

fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).expect("the API's types are all JSON");
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Uses the engine away from the thread that serves connections.
async fn with_engine<T: Send + 'static>(
    shared: Shared,
    task: impl FnOnce(&mut Engine) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    let stopping = || Refused::Request("vnetd is stopping".into());
    let done = tokio::task::spawn_blocking(move || match lock(&shared).as_mut() {
        Some(engine) => task(engine),
        None => Err(stopping()),
    });
    done.await.unwrap_or_else(|_| Err(stopping()))
}

async fn ask<T: Serialize + Send + 'static>(
    shared: Shared,
    question: impl FnOnce(&Engine) -> T + Send + 'static,
) -> Response {
    match with_engine(shared, |engine| Ok(question(engine))).await {
        Ok(answer) => json(StatusCode::OK, &answer),
        Err(refused) => refused.into_response(),
    }
}

type Answer = Result<Response, Refused>;
type Body = Result<Bytes, BytesRejection>;

async fn add_interface(State(shared): State<Shared>, body: Body) -> Answer {
    let item = config::interface_from_json(&body?)?;
    let made = with_engine(shared, |engine| {
        engine.add_interface(item)?;
        Ok(engine.interfaces().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

async fn add_link(State(shared): State<Shared>, body: Body) -> Answer {
    let item = config::link_from_json(&body?)?;
    let made = with_engine(shared, |engine| {
        engine.add_link(item)?;
        Ok(engine.links().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

async fn add_route(State(shared): State<Shared>, body: Body) -> Answer {
    let item = config::route_from_json(&body?)?;
    let made = with_engine(shared, |engine| {
        engine.add_route(item)?;
        Ok(engine.routes().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

async fn remove_interface(State(shared): State<Shared>, name: Result<Path<String>, PathRejection>) -> Answer {
    let Path(name) = name?;
    with_engine(shared, move |engine| Ok(engine.remove_interface(&name)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn remove_link(State(shared): State<Shared>, name: Result<Path<String>, PathRejection>) -> Answer {
    let Path(name) = name?;
    with_engine(shared, move |engine| Ok(engine.remove_link(&name)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn remove_route(State(shared): State<Shared>, index: Result<Path<String>, PathRejection>) -> Answer {
    let Path(index) = index?;
    let index = index.parse().map_err(|_| {
        Refused::Request("a route is removed by its index; see them with 'route list'".to_string())
    })?;
    with_engine(shared, move |engine| Ok(engine.remove_route(index)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What `POST /v1/apply` may be asked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplyQuery {
    /// Only say what would be done.
    #[serde(default)]
    dry_run: bool,
    /// The configuration's name in messages.
    #[serde(default = "request")]
    name: String,
}

fn request() -> String {
    "request".into()
}

/// What `GET /v1/trace` may be asked.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TraceQuery {
    src: Mac,
    dst: Mac,
    #[serde(default)]
    network: NetworkId,
    from: Option<String>,
}

async fn trace(State(shared): State<Shared>, query: Result<Query<TraceQuery>, QueryRejection>) -> Answer {
    let Query(TraceQuery { src, dst, network, from }) = query?;
    let from = from.map(|from| from.parse::<Target>()).transpose().map_err(Refused::Request)?;
    let traced = with_engine(shared, move |engine| Ok(engine.trace(network, src, dst, from.as_ref())?));
    Ok(json(StatusCode::OK, &traced.await?))
}

async fn apply(
    State(shared): State<Shared>,
    query: Result<Query<ApplyQuery>, QueryRejection>,
    body: Body,
) -> Answer {
    const NAME_CHARS_MAX: usize = 256;
    let Query(ApplyQuery { dry_run, name }) = query?;
    let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
    let body = body?;
    let text = str::from_utf8(&body).map_err(|_| Refused::Request(format!("{name}: is not UTF-8 text")))?;
    let configuration = config::parse(&name, text)?;
    let applied = with_engine(shared, move |engine| {
        let desired = configuration.desired;
        let plan = if dry_run { engine.plan(&desired)? } else { engine.apply(desired)? };
        let warnings = configuration.warnings.iter().map(ToString::to_string).collect();
        Ok(api::Applied { dry_run, changes: plan.changes(), warnings })
    });
    Ok(json(StatusCode::OK, &applied.await?))
}
