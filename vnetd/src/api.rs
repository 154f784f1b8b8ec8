//! The HTTP/JSON API under `/v1`: one thin function a request, each of which asks the engine or changes it.
//!
//! Answers are the types of `vnet_control::api`; whatever is refused comes as `{"errors": [LINE, ...]}`. The engine is
//! used on a thread of its own, so that a change that takes long holds up neither signals nor other connections. Requests
//! are registered with the description that they are documented by, so that the OpenAPI document cannot miss one.

#![allow(unused_qualifications, reason = "utoipa writes qualified names")]

use std::sync::{Arc, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Extension, FromRef, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vnet::frame::NetworkId;
use vnet::wire::ethernet::Mac;
use vnet_control::config::{self, ConfigError};
use vnet_control::console;
use vnet_control::desired::Target;
use vnet_control::engine::{Engine, EngineError};
use vnet_control::events::Asker;
use vnet_control::follow::{FAN_OUT_OWN, HOPS};
use vnet_control::language::Dialect;
use vnet_control::{api, requests};

use crate::Shared;
use crate::events::Hub;
use crate::follow::{self, Followers};
use crate::gate::{self, Token};
use crate::{capture, events, metrics};

/// Largest request body in bytes (DESIGN.md section 10).
pub const BODY_MAX: usize = 1 << 20;

/// What requests act on.
#[derive(Clone)]
pub struct App {
    pub shared: Shared,
    pub events: Hub,
    /// Who waits for other hosts' answers.
    pub followers: Arc<Followers>,
    /// What changes by TCP have to show; without it there are none.
    pub token: Option<Arc<Token>>,
}

impl FromRef<App> for Shared {
    fn from_ref(app: &App) -> Shared {
        app.shared.clone()
    }
}

impl FromRef<App> for Arc<Followers> {
    fn from_ref(app: &App) -> Arc<Followers> {
        app.followers.clone()
    }
}

/// The document's head.
#[derive(OpenApi)]
#[openapi(info(
    title = "vnet",
    description = "Asks and changes a running vnetd. On the control socket everything is allowed to root and vnetd's user; by \
                   TCP reading is free, and changes need `Authorization: Bearer TOKEN` with the token of [control] token_file."
))]
struct Head;

/// All requests with their descriptions.
fn described() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(status))
        .routes(routes!(stats))
        .routes(routes!(networks))
        .routes(routes!(overlay))
        .routes(routes!(learned))
        .routes(routes!(interfaces, add_interface))
        .routes(routes!(remove_interface, change_interface))
        .routes(routes!(links, add_link))
        .routes(routes!(remove_link))
        .routes(routes!(list_routes, add_route))
        .routes(routes!(remove_route))
        .routes(routes!(apply))
        .routes(routes!(trace, follow_trace))
        .routes(routes!(capture::capture))
        .routes(routes!(run_console))
        .routes(routes!(events::stream))
        .routes(routes!(metrics::text))
        .routes(routes!(openapi))
}

/// The OpenAPI document.
pub fn document() -> utoipa::openapi::OpenApi {
    described().into_openapi()
}

/// Answers requests that carry their [`gate::Caller`] as an extension.
pub fn router(app: App) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .fallback(async || {
            refusal(StatusCode::NOT_FOUND, "there is nothing at this path; see /v1/openapi.json")
        })
        .method_not_allowed_fallback(async || {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "this path does not know this method")
        })
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(middleware::from_fn(gate::whole_body))
        .layer(middleware::from_fn_with_state(app.clone(), gate::allow))
        .with_state(app)
}

/// The engine. A poisoned lock says nothing here: a panic ends the whole process (`main.rs`).
pub fn lock(shared: &Shared) -> MutexGuard<'_, Option<Engine>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request is refused.
pub enum Refused {
    /// The engine said no.
    Engine(EngineError),
    /// The request makes no sense.
    Request(String),
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refused::Engine(error) => error.fmt(f),
            Refused::Request(text) => f.write_str(text),
        }
    }
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

/// An answer that says no.
pub fn refusal(status: StatusCode, text: &str) -> Response {
    json(status, &api::Refusal { errors: text.lines().map(String::from).collect() })
}

fn json(status: StatusCode, body: &impl Serialize) -> Response {
    let body = serde_json::to_vec(body).expect("the API's types are all JSON");
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

/// Threads that wait for the engine at a time; further requests wait without one.
static PLACES: Semaphore = Semaphore::const_new(4);

/// Uses the engine away from the thread that serves connections.
pub async fn with_engine<T: Send + 'static>(
    shared: Shared,
    task: impl FnOnce(&mut Engine) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    let stopping = || Refused::Request("vnetd is stopping".into());
    let Ok(place) = PLACES.acquire().await else { return Err(stopping()) };
    let done = tokio::task::spawn_blocking(move || {
        let _place = place;
        match lock(&shared).as_mut() {
            Some(engine) => task(engine),
            None => Err(stopping()),
        }
    });
    done.await.unwrap_or_else(|_| Err(stopping()))
}

/// Uses the engine for somebody who may change it.
pub async fn change<T: Send + 'static>(
    shared: Shared,
    asker: Asker,
    task: impl FnOnce(&mut Engine) -> Result<T, Refused> + Send + 'static,
) -> Result<T, Refused> {
    with_engine(shared, |engine| engine.on_behalf(asker, task)).await
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
/// Who asks.
type By = Extension<Asker>;

/// The host at a glance
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = api::Status)))]
async fn status(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::status).await
}

/// Counters of every port, drops and discards by reason, and the balance of all frames
#[utoipa::path(get, path = "/v1/stats", responses((status = 200, body = api::Stats)))]
async fn stats(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::stats).await
}

/// Networks
#[utoipa::path(get, path = "/v1/networks", responses((status = 200, body = Vec<api::Network>)))]
async fn networks(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::networks).await
}

/// Known addresses, learned and configured
#[utoipa::path(get, path = "/v1/learned", responses((status = 200, body = Vec<api::Learned>)))]
async fn learned(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::learned).await
}

/// The distributed overlay: its store, the other hosts, alarms
#[utoipa::path(get, path = "/v1/overlay", responses((status = 200, body = api::Overlay), (status = 404, body = api::Refusal)))]
async fn overlay(State(shared): State<Shared>) -> Answer {
    let none = "this host takes part in no overlay; see [overlay] in the configuration";
    let shown = with_engine(shared, |engine| Ok(engine.overlay())).await?;
    Ok(shown.map_or_else(|| refusal(StatusCode::NOT_FOUND, none), |shown| json(StatusCode::OK, &shown)))
}

/// Interfaces
#[utoipa::path(get, path = "/v1/interfaces", responses((status = 200, body = Vec<api::Interface>)))]
async fn interfaces(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::interfaces).await
}

/// Links
#[utoipa::path(get, path = "/v1/links", responses((status = 200, body = Vec<api::Link>)))]
async fn links(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::links).await
}

/// Routes
#[utoipa::path(get, path = "/v1/routes", responses((status = 200, body = Vec<api::Route>)))]
async fn list_routes(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::routes).await
}

/// Adds an interface
#[utoipa::path(post, path = "/v1/interfaces", request_body = requests::NewInterface,
    responses((status = 201, body = api::Interface), (status = "4XX", body = api::Refusal)))]
async fn add_interface(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::interface_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        engine.add_interface(item)?;
        Ok(engine.interfaces().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Adds a link
#[utoipa::path(post, path = "/v1/links", request_body = requests::NewLink,
    responses((status = 201, body = api::Link), (status = "4XX", body = api::Refusal)))]
async fn add_link(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::link_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        engine.add_link(item)?;
        Ok(engine.links().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Adds a route; its index is counted from 1 and never used again
#[utoipa::path(post, path = "/v1/routes", request_body = requests::NewRoute,
    responses((status = 201, body = api::Route), (status = "4XX", body = api::Refusal)))]
async fn add_route(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::route_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        engine.add_route(item)?;
        Ok(engine.routes().pop())
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Removes an interface that no route names
#[utoipa::path(delete, path = "/v1/interfaces/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = api::Refusal)))]
async fn remove_interface(
    State(shared): State<Shared>,
    Extension(by): By,
    name: Result<Path<String>, PathRejection>,
) -> Answer {
    let Path(name) = name?;
    change(shared, by, move |engine| Ok(engine.remove_interface(&name)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Changes an interface while it is open: who drives it, how its guest is notified, its limits
///
/// The body has some of `mode`, `rate_low`, `rate_high`, `window_us`, `interrupts`, `receive_density_low`,
/// `receive_density_high`, `early_bytes`, `storm_limit`, `port_security`.
#[utoipa::path(patch, path = "/v1/interfaces/{name}", params(("name" = String, Path)),
    request_body = requests::ChangedInterface,
    responses((status = 200, body = api::Interface), (status = "4XX", body = api::Refusal)))]
async fn change_interface(
    State(shared): State<Shared>,
    Extension(by): By,
    name: Result<Path<String>, PathRejection>,
    body: Body,
) -> Answer {
    let (Path(name), body) = (name?, body?);
    let changed = change(shared, by, move |engine| {
        engine.change_interface(&name, |spec| config::change_from_json(&body, spec))?;
        Ok(engine.interfaces().into_iter().find(|interface| interface.name == name))
    });
    Ok(json(StatusCode::OK, &changed.await?))
}

/// Removes a link that no route names
#[utoipa::path(delete, path = "/v1/links/{name}", params(("name" = String, Path)),
    responses((status = 204), (status = "4XX", body = api::Refusal)))]
async fn remove_link(
    State(shared): State<Shared>,
    Extension(by): By,
    name: Result<Path<String>, PathRejection>,
) -> Answer {
    let Path(name) = name?;
    change(shared, by, move |engine| Ok(engine.remove_link(&name)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Removes a route
#[utoipa::path(delete, path = "/v1/routes/{index}", params(("index" = u32, Path)),
    responses((status = 204), (status = "4XX", body = api::Refusal)))]
async fn remove_route(
    State(shared): State<Shared>,
    Extension(by): By,
    index: Result<Path<String>, PathRejection>,
) -> Answer {
    let Path(index) = index?;
    let index = index.parse().map_err(|_| {
        Refused::Request("a route is removed by its index; see them with 'route list'".to_string())
    })?;
    change(shared, by, move |engine| Ok(engine.remove_route(index)?)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// What `POST /v1/apply` may be asked.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
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
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct TraceQuery {
    /// Source address.
    src: Mac,
    /// Destination address.
    dst: Mac,
    /// Network, 1 unless given.
    #[serde(default)]
    network: NetworkId,
    /// Where the frame comes from: `interface NAME` or `link NAME`; where `src` is known to be unless given.
    from: Option<String>,
}

/// What would become of a frame, and what decides
#[utoipa::path(get, path = "/v1/trace", params(TraceQuery),
    responses((status = 200, body = api::Trace), (status = "4XX", body = api::Refusal)))]
async fn trace(State(shared): State<Shared>, query: Result<Query<TraceQuery>, QueryRejection>) -> Answer {
    Ok(json(StatusCode::OK, &traced(shared, query).await?))
}

/// The same, with what the hosts behind links say: each is asked by the link that the frame would take
#[utoipa::path(post, path = "/v1/trace", params(TraceQuery),
    responses((status = 200, body = api::Trace), (status = "4XX", body = api::Refusal)))]
async fn follow_trace(
    State(shared): State<Shared>,
    State(followers): State<Arc<Followers>>,
    query: Result<Query<TraceQuery>, QueryRejection>,
) -> Answer {
    let mut traced = traced(shared.clone(), query).await?;
    follow::follow(&shared, &followers, &mut traced, HOPS, FAN_OUT_OWN).await;
    Ok(json(StatusCode::OK, &traced))
}

async fn traced(
    shared: Shared,
    query: Result<Query<TraceQuery>, QueryRejection>,
) -> Result<api::Trace, Refused> {
    let Query(TraceQuery { src, dst, network, from }) = query?;
    let from = from.map(|from| from.parse::<Target>()).transpose().map_err(Refused::Request)?;
    with_engine(shared, move |engine| Ok(engine.trace(network, src, dst, from.as_ref())?)).await
}

/// Makes the host be as a configuration (TOML) says; only what differs is touched
#[utoipa::path(post, path = "/v1/apply", params(ApplyQuery),
    request_body(content = String, content_type = "text/plain"),
    responses((status = 200, body = api::Applied), (status = "4XX", body = api::Refusal)))]
async fn apply(
    State(shared): State<Shared>,
    Extension(by): By,
    query: Result<Query<ApplyQuery>, QueryRejection>,
    body: Body,
) -> Answer {
    const NAME_CHARS_MAX: usize = 256;
    let Query(ApplyQuery { dry_run, name }) = query?;
    let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect();
    let body = body?;
    let text = str::from_utf8(&body).map_err(|_| Refused::Request(format!("{name}: is not UTF-8 text")))?;
    let configuration = config::parse(&name, text)?;
    let applied = change(shared, by, move |engine| {
        let desired = configuration.desired;
        let plan = if dry_run { engine.plan(&desired)? } else { engine.apply(desired)? };
        let warnings = configuration.warnings.iter().map(ToString::to_string).collect();
        Ok(api::Applied { dry_run, changes: plan.changes(), warnings })
    });
    Ok(json(StatusCode::OK, &applied.await?))
}

/// How the lines of `POST /v1/console` are read.
#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ConsoleDialect {
    Console,
    Links,
    Routes,
}

/// What `POST /v1/console` may be asked.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ConsoleQuery {
    /// `links` and `routes` read VNET/P's files of these names; `console` unless given.
    #[param(inline)]
    dialect: Option<ConsoleDialect>,
}

/// Carries out lines of the control language, one after the other
#[utoipa::path(post, path = "/v1/console", params(ConsoleQuery),
    request_body(content = String, content_type = "text/plain"),
    responses((status = 200, body = Vec<api::ConsoleAnswer>), (status = "4XX", body = api::Refusal)))]
async fn run_console(
    State(shared): State<Shared>,
    Extension(by): By,
    query: Result<Query<ConsoleQuery>, QueryRejection>,
    body: Body,
) -> Answer {
    let Query(ConsoleQuery { dialect }) = query?;
    let dialect = match dialect {
        None | Some(ConsoleDialect::Console) => Dialect::Console,
        Some(ConsoleDialect::Links) => Dialect::Links,
        Some(ConsoleDialect::Routes) => Dialect::Routes,
    };
    let body = body?;
    let answers = change(shared, by, move |engine| Ok(console::answers(engine, dialect, &body)));
    Ok(json(StatusCode::OK, &answers.await?))
}

/// This document
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, body = serde_json::Value)))]
async fn openapi() -> Response {
    json(StatusCode::OK, &document())
}

#[cfg(test)]
#[path = "api_tests.rs"]
pub mod tests;
