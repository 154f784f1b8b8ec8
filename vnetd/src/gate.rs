//! Access control of the API: peers of the control socket may send any request; TCP clients may read, and need the token for
//! changes.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::StreamExt;
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use vnet_control::credentials::{TokenError, read_token};
use vnet_control::events::Asker;

use crate::shared::{BODY_MAX, refusal};

/// Timeout for a request's body.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Answers above this size need a permit of [`LARGE_ANSWERS`].
const LARGE_BYTES: u64 = 4 << 20;
/// Maximum number of concurrent large answers over TCP. A million routes or learned addresses are some 150 MB.
static LARGE_ANSWERS: Semaphore = Semaphore::const_new(4);

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
pub enum Caller {
    /// A process of this host; its user was checked at accept.
    Unix { uid: u32, pid: Option<i32> },
    /// A TCP peer, not authenticated.
    Tcp(SocketAddr),
}

/// The bearer token required for changes over TCP.
pub struct Token(Vec<u8>);

impl Token {
    /// Reads the token from a file that no other user can read.
    pub fn load(file: &Path) -> Result<Token, TokenError> {
        read_token(file).map(Token)
    }

    /// Compares in constant time for a given length, so that the time does not reveal the token.
    fn matches(&self, shown: &[u8]) -> bool {
        self.0.ct_eq(shown).into()
    }
}

/// Middleware: refuses unauthorized requests, and passes the requester's identity to the handlers.
pub async fn allow(State(token): State<Option<Arc<Token>>>, mut request: Request, next: Next) -> Response {
    let Some(caller) = request.extensions().get::<Caller>().copied() else {
        return refusal(StatusCode::FORBIDDEN, "the connection has no known peer");
    };
    let asker = match caller {
        Caller::Unix { uid, pid } => Asker::Unix { uid, pid },
        Caller::Tcp(peer) => Asker::Http(peer),
    };
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if matches!(caller, Caller::Tcp(_)) && !reads {
        let Some(token) = token else {
            let text = "changes over TCP are off; set [control] token_file, or use the control socket";
            return refusal(StatusCode::FORBIDDEN, text);
        };
        let header = request.headers().get(header::AUTHORIZATION);
        let shown = header.and_then(|value| bearer(value.as_bytes()));
        if !shown.is_some_and(|shown| token.matches(shown)) {
            tracing::warn!(who = %asker, "refused a change without the right token");
            let text = "changes over TCP need the header 'Authorization: Bearer TOKEN' with the token of [control] token_file";
            let mut answer = refusal(StatusCode::UNAUTHORIZED, text);
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return answer;
        }
    }
    request.extensions_mut().insert(asker);
    let answer = next.run(request).await;
    if matches!(caller, Caller::Tcp(_)) { bounded(answer) } else { answer }
}

/// Refuses a large answer while all [`LARGE_ANSWERS`] are in progress, to bound memory.
fn bounded(answer: Response) -> Response {
    if answer.body().size_hint().lower() <= LARGE_BYTES {
        return answer;
    }
    let Ok(place) = LARGE_ANSWERS.try_acquire() else {
        return refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many large answers in progress; try again later",
        );
    };
    let (parts, body) = answer.into_parts();
    // The stream owns the permit and releases it when it is sent or aborted.
    let held = body.into_data_stream().inspect(move |_| {
        let _ = &place;
    });
    Response::from_parts(parts, Body::from_stream(held))
}

/// The credentials after the scheme `Bearer`; the scheme ignores case (RFC 9110, section 11.1).
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = header.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| rest.trim_ascii())
}

/// Middleware: waits for the whole body, so that a slow client holds no engine thread; gives up after [`BODY_TIME`].
pub async fn whole_body(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match tokio::time::timeout(BODY_TIME, to_bytes(body, BODY_MAX)).await {
        Ok(Ok(body)) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Ok(Err(_)) => {
            let text = format!(
                "the request's body is larger than {BODY_MAX} bytes, or malformed; use the configuration file and SIGHUP"
            );
            refusal(StatusCode::BAD_REQUEST, &text)
        }
        Err(_) => {
            let text = format!("the request's body did not arrive within {} s", BODY_TIME.as_secs());
            refusal(StatusCode::REQUEST_TIMEOUT, &text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_the_whole_token_matches() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let good = "0123456789abcdef0123456789abcdef";
        std::fs::write(&file, good).unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        let token = Token::load(&file).ok().unwrap();
        assert!(token.matches(good.as_bytes()));
        assert!(
            !token.matches(b"")
                && !token.matches(&good.as_bytes()[1..])
                && !token.matches(good.to_uppercase().as_bytes())
        );
    }

    #[test]
    fn large_answers_are_bounded() {
        let large = || bounded(Response::new(Body::from(vec![0; LARGE_BYTES as usize + 1])));
        let sent: Vec<_> = (0..4).map(|_| large()).collect();
        assert!(sent.iter().all(|answer| answer.status() == StatusCode::OK));
        assert_eq!(large().status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(bounded(Response::new(Body::from("small"))).status(), StatusCode::OK);
        drop(sent);
        assert_eq!(large().status(), StatusCode::OK);
    }

    #[test]
    fn the_scheme_ignores_case() {
        assert_eq!(bearer(b"Bearer abc"), Some(&b"abc"[..]));
        assert_eq!(bearer(b"bEARER   abc "), Some(&b"abc"[..]));
        assert_eq!(bearer(b"Basic abc"), None);
        assert_eq!(bearer(b"Bearer"), None);
    }
}
