//! The HTTP/JSON API under `/v1`: one thin function per request, which queries or changes the engine.
//!
//! Answers are the types of `vnet_control::api`; refusals are `{"errors": [LINE, ...]}`. The engine runs on a blocking thread, so
//! that a slow change delays neither signals nor other connections. Each handler is registered together with its OpenAPI
//! description, so the document is always complete.

#![allow(unused_qualifications, reason = "utoipa writes qualified names")]

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Extension, FromRef, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Router, middleware};
use serde::Deserialize;
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use vnet::frame::NetworkId;
use vnet_control::api;
use vnet_control::config;
use vnet_control::console::Script;
use vnet_control::desired::Target;
use vnet_control::engine::Engine;
use vnet_control::events::Asker;
use vnet_control::follow::{FAN_OUT_OWN, HOPS};
use vnet_control::language::Dialect;
use vnet_control::settings::openapi as schema;
use vnet_control::station::{Station, TraceRequest};

use crate::events::Hub;
use crate::follow::{self, Followers};
use crate::gate::{self, Token};
use crate::paced::{self, Pace};
use crate::rdma_engine::RdmaEngine;
use crate::shared::{BODY_MAX, Refused, Shared, ask, change, json, refusal, with_engine};
use crate::{capture, events, metrics, script, timeline};

/// State of the handlers.
#[derive(Clone)]
pub struct App {
    pub shared: Shared,
    pub events: Hub,
    /// Traces that wait for other hosts' answers.
    pub followers: Arc<Followers>,
    /// Token required for changes over TCP; without a token, changes over TCP are refused.
    pub token: Option<Arc<Token>>,
    pub rdma: RdmaEngine,
    pub pace: Pace,
}

impl FromRef<App> for Pace {
    fn from_ref(app: &App) -> Pace {
        app.pace.clone()
    }
}

impl FromRef<App> for Shared {
    fn from_ref(app: &App) -> Shared {
        app.shared.clone()
    }
}

impl FromRef<App> for RdmaEngine {
    fn from_ref(app: &App) -> RdmaEngine {
        app.rdma.clone()
    }
}

impl FromRef<App> for Hub {
    fn from_ref(app: &App) -> Hub {
        app.events.clone()
    }
}

impl FromRef<App> for Arc<Followers> {
    fn from_ref(app: &App) -> Arc<Followers> {
        app.followers.clone()
    }
}

#[derive(OpenApi)]
#[openapi(info(
    title = "vnet",
    description = "Queries and changes a running vnetd. Root and vnetd's own user may do everything on the control socket. \
                   Over TCP, anybody may read, and changes need `Authorization: Bearer TOKEN` with the token of [control] token_file."
))]
struct Head;

/// All handlers with their descriptions.
fn described() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(status))
        .routes(routes!(stats))
        .routes(routes!(networks))
        .routes(routes!(overlay))
        .routes(routes!(learned))
        .routes(routes!(flows))
        .routes(routes!(interfaces, add_interface))
        .routes(routes!(remove_interface, change_interface))
        .routes(routes!(timeline::record))
        .routes(routes!(links, add_link))
        .routes(routes!(remove_link))
        .routes(routes!(list_routes, add_route))
        .routes(routes!(remove_route))
        .routes(routes!(move_routes))
        .routes(routes!(apply))
        .routes(routes!(save))
        .routes(routes!(trace, follow_trace))
        .routes(routes!(capture::capture))
        .routes(routes!(run_console))
        .routes(routes!(events::stream))
        .routes(routes!(metrics::text))
        .routes(routes!(openapi))
}

pub fn document() -> utoipa::openapi::OpenApi {
    described().into_openapi()
}

/// The router. Requests must carry their [`gate::Caller`] as an extension.
pub fn router(app: App) -> Router {
    routes(app.token.clone()).with_state(app)
}

/// The requests of the API, for a host still to be named.
pub fn routes(token: Option<Arc<Token>>) -> Router<App> {
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
        .layer(middleware::from_fn_with_state(token, gate::allow))
}

type Answer = Result<Response, Refused>;
type Body = Result<Bytes, BytesRejection>;
/// The requester's identity, set by [`gate::allow`].
type By = Extension<Asker>;

/// Overview of the host
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = api::Status)))]
async fn status(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::status).await
}

/// Counters of every port, drops and discards by reason, and the frame balance
#[utoipa::path(get, path = "/v1/stats", responses((status = 200, body = api::Stats)))]
async fn stats(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::stats).await
}

/// Networks
#[utoipa::path(get, path = "/v1/networks", responses((status = 200, body = Vec<api::Network>)))]
async fn networks(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::networks).await
}

/// Known MAC addresses, learned and configured
#[utoipa::path(get, path = "/v1/learned",
    responses((status = 200, body = Vec<api::Learned>), (status = 503, body = api::Refusal)))]
async fn learned(State(pace): State<Pace>, State(shared): State<Shared>, Extension(by): By) -> Response {
    paced::ask(by, pace, shared, Engine::learned).await
}

/// Flows that the kernel forwards by itself: the 1000 that have carried most bytes
#[utoipa::path(get, path = "/v1/flows", responses((status = 200, body = Vec<api::KernelFlow>)))]
async fn flows(State(shared): State<Shared>) -> Response {
    ask(shared, Engine::flows).await
}

/// The distributed overlay: its store, the other hosts, alarms
#[utoipa::path(get, path = "/v1/overlay", responses((status = 200, body = api::Overlay), (status = 404, body = api::Refusal)))]
async fn overlay(State(shared): State<Shared>) -> Answer {
    let none = "this host is in no overlay; see [overlay] in the configuration";
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
#[utoipa::path(get, path = "/v1/routes",
    responses((status = 200, body = Vec<api::Route>), (status = 503, body = api::Refusal)))]
async fn list_routes(State(pace): State<Pace>, State(shared): State<Shared>, Extension(by): By) -> Response {
    paced::ask(by, pace, shared, Engine::routes).await
}

/// Adds an interface
#[utoipa::path(post, path = "/v1/interfaces", request_body = schema::NewInterface,
    responses((status = 201, body = api::Interface), (status = "4XX", body = api::Refusal)))]
async fn add_interface(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::interface_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        let name = item.spec.name.clone();
        engine.add_interface(item)?;
        Ok(engine.interfaces().into_iter().find(|made| made.name == name))
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Adds a link
#[utoipa::path(post, path = "/v1/links", request_body = schema::NewLink,
    responses((status = 201, body = api::Link), (status = "4XX", body = api::Refusal)))]
async fn add_link(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::link_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        let name = item.spec.name.clone();
        engine.add_link(item)?;
        // The new link is not the last one: computed links follow those of the file and of commands.
        Ok(engine.links().into_iter().find(|made| made.name == name))
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Adds a route; its index counts from 1 and is never reused
#[utoipa::path(post, path = "/v1/routes", request_body = schema::NewRoute,
    responses((status = 201, body = api::Route), (status = "4XX", body = api::Refusal)))]
async fn add_route(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let item = config::route_from_json(&body?)?;
    let made = change(shared, by, |engine| {
        let index = engine.add_route(item)?;
        Ok(engine.routes().into_iter().find(|made| made.index == index))
    });
    Ok(json(StatusCode::CREATED, &made.await?))
}

/// Removes an interface; no route may refer to it
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

/// Changes settings of an interface while it stays open
///
/// The body has some of `mode`, `rate_low`, `rate_high`, `window_us`, `interrupts`, `receive_density_low`,
/// `receive_density_high`, `early_bytes`, `storm_limit`, `port_security`, `address_security`, `direct`, `weight`, `rate_limit`,
/// `frame_limit`, `learning_limit`.
#[utoipa::path(patch, path = "/v1/interfaces/{name}", params(("name" = String, Path)),
    request_body = schema::ChangedInterface,
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

/// Removes a link; no route may refer to it
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

/// Makes all routes to an address lead elsewhere, from one frame to the next: for a machine that has moved
///
/// Answers the changed routes, which have new indices.
#[utoipa::path(patch, path = "/v1/routes", request_body = api::RouteMove,
    responses((status = 200, body = Vec<api::Route>), (status = "4XX", body = api::Refusal)))]
async fn move_routes(State(shared): State<Shared>, Extension(by): By, body: Body) -> Answer {
    let wanted: Result<api::RouteMove, _> = serde_json::from_slice(&body?);
    let api::RouteMove { dst, to, network } = wanted.map_err(|error| Refused::Request(error.to_string()))?;
    let to = to.parse::<Target>().map_err(Refused::Request)?;
    let moved = change(shared, by, move |engine| {
        let moved = engine.move_routes(network, dst, &to)?;
        Ok(engine.routes().into_iter().filter(|route| moved.contains(&route.index)).collect::<Vec<_>>())
    });
    Ok(json(StatusCode::OK, &moved.await?))
}

/// Query parameters of `POST /v1/apply`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ApplyQuery {
    /// Report the changes without making them.
    #[serde(default)]
    dry_run: bool,
    /// File name for error messages.
    #[serde(default = "request")]
    name: String,
}

fn request() -> String {
    "request".into()
}

/// Query parameters of `GET` and `POST /v1/trace`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct TraceQuery {
    /// Source: a MAC address, an IP address that an interface lists or another host publishes, or an interface's name.
    src: String,
    /// Destination, in the same forms as `src`.
    dst: String,
    /// Network id; default: that of an interface named as `src` or `dst`, else 1.
    network: Option<NetworkId>,
    /// Where the frame enters: `interface NAME` or `link NAME`. Default: the interface named as `src`, else the port where the
    /// source address was learned or is configured.
    from: Option<String>,
}

/// Shows how a frame would be forwarded, and which rule or entry decides
#[utoipa::path(get, path = "/v1/trace", params(TraceQuery),
    responses((status = 200, body = api::Trace), (status = "4XX", body = api::Refusal)))]
async fn trace(State(shared): State<Shared>, query: Result<Query<TraceQuery>, QueryRejection>) -> Answer {
    Ok(json(StatusCode::OK, &traced(shared, query).await?))
}

/// Shows how a frame would be forwarded over several hosts: also queries each host behind a link that the frame would take
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
    let [src, dst] = [src, dst].map(|station| station.parse::<Station>().map_err(Refused::Request));
    let request = TraceRequest { network, src: src?, dst: dst?, from };
    with_engine(shared, move |engine| Ok(engine.trace_between(&request)?)).await
}

/// Makes the host match a configuration (TOML); touches only what differs
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
        let mut warnings: Vec<_> = configuration.warnings.iter().map(ToString::to_string).collect();
        if !dry_run {
            warnings.extend(engine.absent_in(&plan));
        }
        Ok(api::Applied { dry_run, changes: plan.changes(), warnings })
    });
    Ok(json(StatusCode::OK, &applied.await?))
}

/// Returns the running state as a configuration file (TOML), without computed links; not by GET: it contains passwords
#[utoipa::path(post, path = "/v1/save",
    responses((status = 200, body = String, content_type = "text/plain"), (status = "4XX", body = api::Refusal)))]
async fn save(State(shared): State<Shared>) -> Answer {
    Ok(with_engine(shared, |engine| Ok(engine.saved())).await?.into_response())
}

/// Syntax of the lines in `POST /v1/console`.
#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ConsoleDialect {
    Console,
    Links,
    Routes,
}

/// Query parameters of `POST /v1/console`.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ConsoleQuery {
    /// `links` and `routes` accept VNET/P's files of these names. Default: `console`.
    #[param(inline)]
    dialect: Option<ConsoleDialect>,
}

/// Executes lines of the control language in order, as fast as the client reads their answers
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
    let script = Script::new(dialect, body?.to_vec());
    script::run(shared, by, script).await
}

/// The OpenAPI document
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, body = serde_json::Value)))]
async fn openapi() -> Response {
    json(StatusCode::OK, &document())
}

#[cfg(test)]
#[path = "handlers_tests.rs"]
pub mod tests;
