//! Who may do what: the control socket's peers may do everything, clients by TCP may read, and change with the token.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use axum::body::{Body, HttpBody, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::StreamExt;
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;
use vnet_control::events::Asker;

use crate::api::{App, BODY_MAX, refusal};

/// Shortest and longest token in bytes: 128 bits as hexadecimal digits, and more than anybody needs.
const TOKEN_BYTES: std::ops::RangeInclusive<usize> = 32..=1024;
/// How long a request's body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(10);

/// An answer of more bytes is large.
const LARGE_BYTES: u64 = 4 << 20;
/// Large answers by TCP at a time: a million routes or learned addresses are some 150 MB.
static LARGE_ANSWERS: Semaphore = Semaphore::const_new(4);

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub enum Caller {
    /// A process of this host, whose user was checked.
    Unix { uid: u32, pid: Option<i32> },
    /// Anybody.
    Tcp(SocketAddr),
}

/// What changes by TCP have to show.
pub struct Token(Vec<u8>);

/// Why a token cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    #[error("cannot read [control] token_file '{file}': {error}")]
    Read { file: String, error: io::Error },
    #[error("[control] token_file '{0}' can be read by others; run 'chmod 600 {0}'")]
    Readable(String),
    #[error(
        "[control] token_file '{0}' holds no token: one line of {min} to {max} printable characters; make one with \
         'openssl rand -hex 32'",
        min = TOKEN_BYTES.start(),
        max = TOKEN_BYTES.end()
    )]
    Content(String),
}

impl Token {
    /// Reads the token from a file that nobody else can read.
    pub fn load(file: &Path) -> Result<Token, TokenError> {
        let name = || file.display().to_string();
        let read = |error| TokenError::Read { file: name(), error };
        let meta = std::fs::metadata(file).map_err(read)?;
        if meta.mode() & 0o077 != 0 {
            return Err(TokenError::Readable(name()));
        }
        if meta.len() > 4096 {
            return Err(TokenError::Content(name()));
        }
        let text = std::fs::read(file).map_err(read)?;
        let token = text.trim_ascii();
        if !TOKEN_BYTES.contains(&token.len()) || !token.iter().all(u8::is_ascii_graphic) {
            return Err(TokenError::Content(name()));
        }
        Ok(Token(token.to_vec()))
    }

    /// Compares in a time that says nothing about the token but its length.
    fn is(&self, shown: &[u8]) -> bool {
        self.0.ct_eq(shown).into()
    }
}

/// Lets a request through, or refuses it; those who may change something are named to the handlers.
pub async fn allow(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let Some(caller) = request.extensions().get::<Caller>().copied() else {
        return refusal(StatusCode::FORBIDDEN, "it is not known who asks");
    };
    let asker = match caller {
        Caller::Unix { uid, pid } => Asker::Unix { uid, pid },
        Caller::Tcp(peer) => Asker::Http(peer),
    };
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    if matches!(caller, Caller::Tcp(_)) && !reads {
        let Some(token) = &app.token else {
            let text = "changes by TCP are off; set [control] token_file, or use the control socket";
            return refusal(StatusCode::FORBIDDEN, text);
        };
        let header = request.headers().get(header::AUTHORIZATION);
        let shown = header.and_then(|value| bearer(value.as_bytes()));
        if !shown.is_some_and(|shown| token.is(shown)) {
            tracing::warn!(who = %asker, "refused a change without the right token");
            let text = "changes by TCP need the header 'Authorization: Bearer TOKEN' with the token of [control] token_file";
            let mut answer = refusal(StatusCode::UNAUTHORIZED, text);
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            return answer;
        }
    }
    request.extensions_mut().insert(asker);
    let answer = next.run(request).await;
    if matches!(caller, Caller::Tcp(_)) { bounded(answer) } else { answer }
}

/// Passes an answer on unless it is large and as many large ones are on their way as memory is meant for.
fn bounded(answer: Response) -> Response {
    if answer.body().size_hint().lower() <= LARGE_BYTES {
        return answer;
    }
    let Ok(place) = LARGE_ANSWERS.try_acquire() else {
        return refusal(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many large answers are on their way; try again later",
        );
    };
    let (parts, body) = answer.into_parts();
    // The place is held by the stream, and free again when that has been sent or given up.
    let held = body.into_data_stream().inspect(move |_| {
        let _ = &place;
    });
    Response::from_parts(parts, Body::from_stream(held))
}

/// What follows the scheme `Bearer`, which ignores case (RFC 9110, section 11.1).
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = header.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| rest.trim_ascii())
}

/// Passes requests on when they are here as a whole: a client that sends slowly holds up only itself, and not for long.
pub async fn whole_body(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match tokio::time::timeout(BODY_TIME, to_bytes(body, BODY_MAX)).await {
        Ok(Ok(body)) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Ok(Err(_)) => {
            let text = format!(
                "the request's body is larger than {BODY_MAX} bytes, or broken; use the configuration file and SIGHUP"
            );
            refusal(StatusCode::BAD_REQUEST, &text)
        }
        Err(_) => {
            let text = format!("the request's body did not come within {} s", BODY_TIME.as_secs());
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
    fn a_token_is_long_and_private() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        let load = |text: &str, mode| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            Token::load(&file).map_err(|error| error.to_string())
        };
        let good = "0123456789abcdef0123456789abcdef";
        let token = load(&format!("{good}\n"), 0o600).ok().unwrap();
        assert!(token.is(good.as_bytes()));
        assert!(
            !token.is(b"") && !token.is(&good.as_bytes()[1..]) && !token.is(good.to_uppercase().as_bytes())
        );
        for (text, mode, words) in [
            (good, 0o640, "chmod 600"),
            ("short", 0o600, "holds no token"),
            ("", 0o600, "holds no token"),
            ("0123456789abcdef 0123456789abcdef", 0o600, "holds no token"),
            (&"x".repeat(5000), 0o600, "holds no token"),
        ] {
            let error = load(text, mode).err().unwrap();
            assert!(error.contains(words) && error.lines().count() == 1, "{error}");
        }
        assert!(Token::load(&folder.path().join("none")).err().unwrap().to_string().contains("cannot read"));
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
