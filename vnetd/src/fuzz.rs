//! Fuzz entry point: any sequence of requests to the API, from any caller, against the engine of a host that reaches nobody.
//!
//! Input: records of a request's number, a byte that chooses caller and index, the body's length (16 bits in network byte order), and
//! the body. Requests that would open devices or sockets of this machine are left out, and those that wait for other hosts.

use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, LazyLock, Once};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, StatusCode};
use axum::response::Response;
use parking_lot::Mutex;
use serde_json::Value;
use tower::ServiceExt;
use vnet_control::config;
use vnet_control::engine::Engine;

use crate::events::Hub;
use crate::gate::{Caller, Token};
use crate::handlers::{App, document, routes};
use crate::paced::Pace;
use crate::rdma_engine::RdmaEngine;

/// Requests of one input; more only repeat what few show.
const REQUESTS_MAX: usize = 64;
/// Time for an answer: far more than any takes, so that one that never comes is found.
const ANSWER: Duration = Duration::from_secs(60);
const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// Host that sends no packet: its socket is bound to loopback.
const HOST: &str = "host.name = \"h1\"\nbridge.listen = \"127.0.0.1:0\"\ndispatch.kernel_path = \"off\"";

/// Method and path of every documented request; a path may have parameters in braces.
static REQUESTS: LazyLock<Vec<(Method, String)>> = LazyLock::new(|| {
    let document = serde_json::to_value(document()).expect("an OpenAPI document is JSON");
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().expect("it has paths") {
        for name in item.as_object().expect("paths have methods").keys() {
            match name.to_uppercase().parse() {
                // A trace that is followed waits for other hosts.
                Ok(Method::POST) if path == "/v1/trace" => {}
                Ok(method) if name.chars().all(char::is_lowercase) && name != "parameters" => {
                    found.push((method, path.clone()));
                }
                _ => {}
            }
        }
    }
    found
});

/// One record of the input.
struct Record<'a> {
    request: u8,
    choice: u8,
    body: &'a [u8],
}

impl<'a> Record<'a> {
    fn next(data: &mut &'a [u8]) -> Option<Record<'a>> {
        let ([request, choice, len @ ..], rest) = data.split_first_chunk::<4>()?;
        let (body, rest) = rest.split_at(usize::from(u16::from_be_bytes(*len)).min(rest.len()));
        *data = rest;
        Some(Record { request: *request, choice: *choice, body })
    }

    fn caller(&self) -> Caller {
        match self.choice & 3 {
            0 | 1 => Caller::Unix { uid: 0, pid: Some(1) },
            2 => Caller::Unix { uid: 1000, pid: None },
            _ => Caller::Tcp("192.0.2.1:5000".parse().expect("it is an address")),
        }
    }

    /// The request, or `None` if it must not be made here.
    fn request(&self) -> Option<Request<Body>> {
        let (method, path) = &REQUESTS[usize::from(self.request) % REQUESTS.len()];
        if opens_something(path, self.body) {
            return None;
        }
        // Parameters, and the query up to the body's first line end, are the input's own.
        let index = (self.choice >> 4).to_string();
        let name = if self.choice & 8 == 0 { "h2" } else { "a" };
        let mut path = path.replace("{index}", &index).replace("{name}", name);
        let mut body = self.body;
        if self.choice & 4 != 0 {
            let end = body.iter().position(|byte| *byte == b'\n').unwrap_or(body.len());
            let (query, rest) = body.split_at(end);
            path = format!("{path}?{}", String::from_utf8_lossy(query));
            body = rest.get(1..).unwrap_or_default();
        }
        let request = Request::builder().method(method).uri(path).extension(self.caller());
        let request = request.header("authorization", format!("Bearer {TOKEN}"));
        request.body(Body::from(body.to_vec())).ok()
    }
}

/// Whether a request would open a device, a socket or a file of this machine.
fn opens_something(path: &str, body: &[u8]) -> bool {
    let text = String::from_utf8_lossy(body);
    match path {
        "/v1/interfaces" => true,
        "/v1/apply" => text.contains("interface") || text.contains("identity") || text.contains("overlay"),
        "/v1/console" => text.to_uppercase().contains("INTERFACE"),
        _ => false,
    }
}

fn app() -> App {
    let configuration = config::parse("f", HOST).expect("it is valid");
    let mut engine = Engine::start(configuration.desired).expect("a host");
    let events = Hub::new();
    engine.tell(events.sink());
    let (shared, followers) = (Arc::new(Mutex::new(Some(engine))), Arc::default());
    App {
        shared,
        events,
        followers,
        token: Some(TOKEN_FILE.clone()),
        rdma: RdmaEngine::default(),
        pace: Pace::default(),
    }
}

/// Built once: describing the requests takes longer than answering them.
static ROUTES: LazyLock<Router<App>> = LazyLock::new(|| routes(Some(TOKEN_FILE.clone())));

static TOKEN_FILE: LazyLock<Arc<Token>> = LazyLock::new(|| {
    let path = std::env::temp_dir().join(format!("vnet-fuzz-token-{}", std::process::id()));
    std::fs::write(&path, TOKEN).expect("a file");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    let token = Token::load(&path).expect("a token");
    std::fs::remove_file(&path).expect("it is there");
    Arc::new(token)
});

/// Leaves this machine's network, so that no request reaches anybody. Without the right to do so, the loopback address has to do.
fn alone() {
    static ALONE: Once = Once::new();
    ALONE.call_once(|| {
        // SAFETY: unshare takes flags and touches no memory of this process.
        let _ = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    });
}

/// Sends the requests of `data` one after the other.
///
/// Invariants: no panic; each request is answered; no answer says that the server failed; JSON is JSON; a refusal has reasons of one
/// line each; in the end all lists can still be read.
pub fn requests(mut data: &[u8]) {
    alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let app = app();
        let router = ROUTES.clone().with_state(app.clone());
        for _ in 0..REQUESTS_MAX {
            let Some(record) = Record::next(&mut data) else { break };
            if let Some(request) = record.request() {
                check(answer(&router, request).await).await;
            }
        }
        for path in ["/v1/status", "/v1/stats", "/v1/interfaces", "/v1/links", "/v1/routes", "/v1/learned"] {
            let caller = Caller::Unix { uid: 0, pid: Some(1) };
            let request = Request::builder().uri(path).extension(caller).body(Body::empty());
            let answer = answer(&router, request.expect("it is a request")).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            check(answer).await;
        }
        drop(app.shared.lock().take());
    });
    // Waits for the runtime's threads: the leak detector would report those that are still ending.
    runtime.shutdown_timeout(ANSWER);
}

async fn answer(router: &Router, request: Request<Body>) -> Response {
    let answer = tokio::time::timeout(ANSWER, router.clone().oneshot(request)).await;
    answer.expect("an answer").expect("the router never fails")
}

/// Reads an answer, unless it lasts as long as its client wants it to.
async fn check(answer: Response) {
    let status = answer.status();
    assert!(status.as_u16() < 500, "{status}");
    let kind = answer.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind != "application/json" {
        assert!(status.is_success(), "{status}: a refusal is JSON, not {kind:?}");
        return;
    }
    let body = tokio::time::timeout(ANSWER, to_bytes(answer.into_body(), usize::MAX)).await;
    let body = body.expect("the answer ends").expect("a whole answer");
    let value: Value = serde_json::from_slice(&body).expect("JSON");
    if !status.is_success() {
        let errors = value["errors"].as_array().expect("a refusal has reasons");
        assert!(!errors.is_empty());
        for error in errors {
            assert_eq!(error.as_str().expect("a reason is text").lines().count(), 1, "{error:?}");
        }
    }
}
