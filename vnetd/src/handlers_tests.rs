//! Tests of the API against its OpenAPI document, and of access control, with a real engine but without sockets.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request};
use parking_lot::Mutex;
use serde_json::Value;
use tower::ServiceExt;

use vnet_control::overlay::{Computed, PeerLink};

use super::*;
use crate::gate::Caller;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// The handlers' state, with the engine of a host without interfaces or links.
pub fn app(token: Option<Token>) -> App {
    let configuration = config::parse("f", "host.name = \"h1\"\nbridge.listen = \"127.0.0.1:0\"").unwrap();
    let mut engine = Engine::start(configuration.desired).unwrap();
    let events = Hub::new();
    engine.tell(events.sink());
    let (shared, followers) = (Arc::new(Mutex::new(Some(engine))), Arc::default());
    App {
        shared,
        events,
        followers,
        token: token.map(Arc::new),
        rdma: RdmaEngine::default(),
        pace: Pace::default(),
    }
}

fn token() -> Token {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    std::fs::write(&file, TOKEN).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    Token::load(&file).unwrap()
}

const LOCAL: Caller = Caller::Unix { uid: 0, pid: Some(1) };

fn remote() -> Caller {
    Caller::Tcp("192.0.2.1:5000".parse().unwrap())
}

/// Sends one request; returns the status, and the body unless it is an event stream.
async fn ask(
    app: &App,
    caller: Caller,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(path).extension(caller);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer =
        router(app.clone()).oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    let status = answer.status().as_u16();
    if answer.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream") {
        return (status, Value::Null);
    }
    let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

/// Method and path of each documented request.
fn documented() -> Vec<(String, String)> {
    let document = serde_json::to_value(document()).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let methods = |(path, item): (&String, &Value)| {
        let methods = item
            .as_object()
            .unwrap()
            .keys()
            .filter(|key| Method::from_bytes(key.to_uppercase().as_bytes()).is_ok());
        methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
    };
    paths
        .iter()
        .flat_map(methods)
        .filter(|(method, _)| ["GET", "POST", "PATCH", "DELETE"].contains(&method.as_str()))
        .collect()
}

#[tokio::test]
async fn the_answer_names_the_link_that_was_made() {
    let text = "host.name = \"h1\"\nbridge.listen = \"127.0.0.1:0\"\n\
                [overlay]\netcd = [\"http://127.0.0.1:1\"]\ntrusted = true";
    let mut engine = Engine::start(config::parse("f", text).unwrap().desired).unwrap();
    // Lists show links computed by the overlay last.
    let (name, remote) = ("h9".into(), "127.0.1.9:9000".parse().unwrap());
    let peer = PeerLink { name, remote, networks: vec![NetworkId::DEFAULT], spoke: false };
    engine.join(Computed { links: vec![peer], ..Computed::default() }).unwrap();
    let (shared, followers) = (Arc::new(Mutex::new(Some(engine))), Arc::default());
    let app = App {
        shared,
        events: Hub::new(),
        followers,
        token: None,
        rdma: RdmaEngine::default(),
        pace: Pace::default(),
    };
    let link = r#"{"name": "h2", "remote": "127.0.1.2:9000", "trusted": true}"#;
    let (status, made) = ask(&app, LOCAL, "POST", "/v1/links", &[], link).await;
    assert_eq!((status, &made["name"]), (201, &"h2".into()), "{made}");
    let say = async |line: &str| {
        let (_, answers) = ask(&app, LOCAL, "POST", "/v1/console", &[], line).await;
        answers[0]["lines"][0].as_str().unwrap_or_default().to_string()
    };
    assert_eq!(say("LINK ADD 127.0.1.3 9000 udp name=h3").await, "OK link 3");
    let refused = say("ROUTE ADD any any edge h9 any").await;
    assert!(refused.contains("links of the overlay come and go with their hosts"), "{refused}");
    // A configured link of the same name replaces the computed link and keeps its index.
    assert_eq!(say("LINK ADD 127.0.1.4 9000 udp name=h9").await, "OK link 1");
}

#[tokio::test]
async fn all_routes_of_a_moved_address_are_answered() {
    let app = app(None);
    for link in ["h2", "h3"] {
        let body =
            format!(r#"{{"name": "{link}", "remote": "127.0.1.{}:9000", "trusted": true}}"#, &link[1..]);
        assert_eq!(ask(&app, LOCAL, "POST", "/v1/links", &[], &body).await.0, 201);
    }
    for src in ["any", "52:54:00:00:00:09"] {
        let route = format!(r#"{{"src": "{src}", "dst": "52:54:00:00:00:01", "to": "link h2"}}"#);
        assert_eq!(ask(&app, LOCAL, "POST", "/v1/routes", &[], &route).await.0, 201);
    }
    let wanted = r#"{"dst": "52:54:00:00:00:01", "to": "link h3"}"#;
    let (status, moved) = ask(&app, LOCAL, "PATCH", "/v1/routes", &[], wanted).await;
    let moved = moved.as_array().unwrap();
    assert_eq!((status, moved.len()), (200, 2), "{moved:?}");
    assert!(moved.iter().all(|route| route["to"] == "link h3"), "{moved:?}");
    for (wrong, reason) in [
        (
            r#"{"dst": "52:54:00:00:00:02", "to": "link h3"}"#,
            "there is no route to 52:54:00:00:00:02 in network 1",
        ),
        (r#"{"dst": "52:54:00:00:00:01", "to": "h3"}"#, "write interface NAME or link NAME"),
        (r#"{"dst": "52:54:00:00:00:01", "to": "link h9"}"#, "h9"),
        (r#"{"dst": "52:54", "to": "link h3"}"#, "52:54"),
        (r#"{"dst": "52:54:00:00:00:01", "to": "link h3", "from": "any"}"#, "from"),
    ] {
        let (status, answer) = ask(&app, LOCAL, "PATCH", "/v1/routes", &[], wrong).await;
        let text = answer.to_string();
        assert!((400..500).contains(&status) && text.contains(reason), "{wrong}: {status} {text}");
    }
}

#[tokio::test]
async fn every_documented_request_exists() {
    let app = app(None);
    let documented = documented();
    assert!(documented.len() >= 18, "{documented:?}");
    for (method, path) in documented {
        let path = path.replace("{name}", "none").replace("{index}", "99");
        let (status, answer) = ask(&app, LOCAL, &method, &path, &[], "").await;
        let text = answer.to_string();
        assert!(status != 405 && !text.contains("nothing at this path"), "{method} {path}: {status} {text}");
        assert!(status < 500, "{method} {path}: {status} {text}");
    }
}

#[test]
fn every_request_is_documented() {
    // Routes registered without `routes!` would be missing from the document.
    let mut paths = vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
    let mut files = 0;
    while let Some(file) = paths.pop() {
        if file.is_dir() {
            paths.extend(std::fs::read_dir(&file).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let source = std::fs::read_to_string(&file).unwrap();
        let undocumented = [".route", "("].concat();
        assert!(!source.contains(&undocumented), "{} registers a route without routes!", file.display());
        files += 1;
    }
    assert!(files > 5);
}

/// The object schemas that a schema consists of: itself, or all parts of `allOf`, with references resolved.
fn parts<'a>(document: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return parts(document, &document["components"]["schemas"][name]);
    }
    match schema["allOf"].as_array() {
        Some(all) => all.iter().flat_map(|part| parts(document, part)).collect(),
        None => vec![schema],
    }
}

#[tokio::test]
async fn answers_match_their_schemas() {
    let app = app(None);
    let document = serde_json::to_value(document()).unwrap();
    let schema = |name: &str| -> (BTreeSet<String>, BTreeSet<String>) {
        let (mut properties, mut required) = (BTreeSet::new(), BTreeSet::new());
        for part in parts(&document, &document["components"]["schemas"][name]) {
            let object = part["properties"].as_object().unwrap_or_else(|| panic!("{name} is no object"));
            properties.extend(object.keys().cloned());
            let list = part["required"].as_array().into_iter().flatten();
            required.extend(list.map(|name| name.as_str().unwrap().to_owned()));
        }
        assert!(!required.is_empty(), "{name} requires nothing");
        (properties, required)
    };
    for (path, name) in [("/v1/status", "Status"), ("/v1/stats", "Stats"), ("/v1/networks", "Network")] {
        let (status, answer) = ask(&app, LOCAL, "GET", path, &[], "").await;
        assert_eq!(status, 200, "{path}");
        let answer = if let Value::Array(list) = &answer { &list[0] } else { &answer };
        let fields: BTreeSet<_> = answer.as_object().unwrap().keys().cloned().collect();
        let (properties, required) = schema(name);
        assert!(fields.is_subset(&properties), "{path}: {fields:?} {properties:?}");
        assert!(required.is_subset(&fields), "{path}: {fields:?} {required:?}");
    }
}

#[tokio::test]
async fn changes_over_tcp_need_the_token() {
    let link = r#"{"name": "h2", "remote": "127.0.0.2:9000", "trusted": true}"#;
    let right = ("authorization", "Bearer 0123456789abcdef0123456789abcdef");
    let wrong = ("authorization", "Bearer 0123456789abcdef0123456789abcdeg");
    let without = app(None);
    for (method, path) in documented() {
        let path = path.replace("{name}", "none").replace("{index}", "99");
        let (status, answer) = ask(&without, remote(), &method, &path, &[right], "").await;
        if method == "GET" {
            assert!(status < 500 && status != 401 && status != 403, "{method} {path}: {status} {answer}");
        } else {
            assert_eq!(status, 403, "{method} {path}: {answer}");
        }
    }
    let with = app(Some(token()));
    for headers in [&[][..], &[wrong], &[("authorization", "Basic eDp5")]] {
        assert_eq!(ask(&with, remote(), "POST", "/v1/links", headers, link).await.0, 401);
        assert_eq!(
            ask(&with, remote(), "POST", "/v1/console", headers, "LINK ADD 127.0.0.2 9000").await.0,
            401
        );
    }
    assert_eq!(ask(&with, LOCAL, "GET", "/v1/links", &[], "").await.1, serde_json::json!([]));
    assert_eq!(ask(&with, remote(), "POST", "/v1/links", &[right], link).await.0, 201);
    assert_eq!(ask(&with, remote(), "DELETE", "/v1/links/h2", &[], "").await.0, 401);
    assert_eq!(ask(&with, LOCAL, "DELETE", "/v1/links/h2", &[], "").await.0, 204);
}

#[tokio::test]
async fn a_request_without_a_known_peer_is_refused() {
    let request = Request::builder().uri("/v1/status").body(Body::empty()).unwrap();
    let answer = router(app(None)).oneshot(request).await.unwrap();
    assert_eq!(answer.status(), StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn the_api_executes_console_lines() {
    let app = app(None);
    let text = "LINK ADD 127.0.0.2 9000 udp\nNONSENSE\nLINKS?\n";
    let (status, answers) = ask(&app, LOCAL, "POST", "/v1/console", &[], text).await;
    assert_eq!(status, 200);
    assert_eq!(answers[0], serde_json::json!({"line": 1, "good": true, "lines": ["OK link 1"]}));
    assert_eq!(answers[1]["good"], serde_json::json!(false));
    assert_eq!(answers[2]["lines"][0], "1 127.0.0.2 9000 udp link1 vnet down");
    let (status, answers) = ask(&app, LOCAL, "POST", "/v1/console?dialect=links", &[], "DEL 1").await;
    assert_eq!((status, &answers[0]["lines"][0]), (200, &Value::from("OK link 1 removed")));
    assert_eq!(ask(&app, LOCAL, "POST", "/v1/console?dialect=latin", &[], "").await.0, 400);
}
