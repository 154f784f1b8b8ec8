//! HTTP client for the control socket: requests with complete answers, and streams.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use vnet_control::api;

/// Timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Maximum length of an answer in bytes: a million routes as JSON.
const ANSWER_MAX: usize = 256 << 20;

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No vnetd listens at the socket.
    #[error(
        "cannot reach vnetd at '{socket}': {error}; is it running, and is this its socket? (--socket, $VNET_SOCKET)"
    )]
    Unreachable {
        /// The control socket.
        socket: PathBuf,
        /// The error from connecting.
        error: io::Error,
    },
    /// This user may not connect to the socket.
    #[error("no permission to use vnetd's control socket '{0}'; run this command as root or as vnetd's user")]
    Forbidden(PathBuf),
    /// The peer closed the connection, timed out, or does not speak HTTP.
    #[error("vnetd at '{socket}' did not answer: {why}")]
    NoAnswer {
        /// The control socket.
        socket: PathBuf,
        /// Reason why there is no answer.
        why: String,
    },
    /// vnetd refused the request; one line per error.
    #[error("{}", .0.join("\n"))]
    Refused(Vec<String>),
}

/// A client of one vnetd.
pub struct Client<'a> {
    socket: &'a Path,
}

impl Client<'_> {
    /// A client of the vnetd that listens at `socket`.
    pub fn new(socket: &Path) -> Client<'_> {
        Client { socket }
    }

    /// GETs `path`; returns the body.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        self.request(Method::GET, path, vec![])
    }

    /// POSTs `body`; returns the answer's body.
    pub fn post(&self, path: &str, body: Vec<u8>) -> Result<Vec<u8>, ClientError> {
        self.request(Method::POST, path, body)
    }

    /// PATCHes `path`; returns the answer's body.
    pub fn patch(&self, path: &str, body: Vec<u8>) -> Result<Vec<u8>, ClientError> {
        self.request(Method::PATCH, path, body)
    }

    /// DELETEs `path`; returns the answer's body.
    pub fn delete(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        self.request(Method::DELETE, path, vec![])
    }

    /// Requests `path` without a body, and passes the answer's data to `take` until `take` returns false, the answer ends, or
    /// Ctrl-C or SIGTERM arrives. Time and size are not limited.
    pub fn stream(
        &self,
        method: Method,
        path: &str,
        mut take: impl FnMut(&[u8]) -> bool,
    ) -> Result<Ended, ClientError> {
        let runtime = self.runtime()?;
        runtime.block_on(async {
            let no_answer = |why: String| self.no_answer(why);
            // Subscribe once, before the loop: a signal that arrives between two polls stays pending.
            let heard = |kind| signal(kind).map_err(|error| no_answer(error.to_string()));
            let (mut interrupt, mut terminate) =
                (heard(SignalKind::interrupt())?, heard(SignalKind::terminate())?);
            let answer = tokio::time::timeout(PATIENCE, self.send(method, path, vec![]));
            let answer = answer.await.map_err(|_| no_answer(timed_out()))??;
            let status = answer.status();
            let mut body = answer.into_body();
            if !status.is_success() {
                let body = Limited::new(body, ANSWER_MAX).collect().await;
                let body = body.map_err(|error| no_answer(error.to_string()))?;
                return Err(self.refusal(status, &body.to_bytes()));
            }
            loop {
                tokio::select! {
                    frame = body.frame() => match frame {
                        Some(Ok(frame)) => {
                            if frame.data_ref().is_some_and(|data| !take(data)) {
                                return Ok(Ended::Taker);
                            }
                        }
                        Some(Err(_)) | None => return Ok(Ended::Server),
                    },
                    _ = interrupt.recv() => return Ok(Ended::Signal),
                    _ = terminate.recv() => return Ok(Ended::Signal),
                }
            }
        })
    }

    fn no_answer(&self, why: String) -> ClientError {
        ClientError::NoAnswer { socket: self.socket.into(), why }
    }

    fn runtime(&self) -> Result<tokio::runtime::Runtime, ClientError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.map_err(|error| self.no_answer(error.to_string()))
    }

    /// The error of an answer without a success status.
    fn refusal(&self, status: StatusCode, body: &[u8]) -> ClientError {
        match serde_json::from_slice::<api::Refusal>(body) {
            Ok(refusal) => ClientError::Refused(refusal.errors),
            Err(_) => self.no_answer(format!("it sent HTTP status {status}")),
        }
    }

    fn request(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Vec<u8>, ClientError> {
        let answer = self.runtime()?.block_on(async {
            let exchange = self.exchange(method, path, body);
            match tokio::time::timeout(PATIENCE, exchange).await {
                Ok(answer) => answer,
                Err(_) => Err(self.no_answer(timed_out())),
            }
        });
        let (status, body) = answer?;
        if status.is_success() { Ok(body) } else { Err(self.refusal(status, &body)) }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>), ClientError> {
        let answer = self.send(method, path, body).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX).collect().await;
        let body = body.map_err(|error| self.no_answer(error.to_string()))?;
        Ok((status, body.to_bytes().to_vec()))
    }

    /// Sends a request and waits for the answer's head.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, ClientError> {
        let stream = UnixStream::connect(self.socket).await.map_err(|error| {
            if error.kind() == io::ErrorKind::PermissionDenied {
                ClientError::Forbidden(self.socket.into())
            } else {
                ClientError::Unreachable { socket: self.socket.into(), error }
            }
        })?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.no_answer(e.to_string()))?;
        tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(hyper::header::HOST, "vnetd")
            .body(Full::new(Bytes::from(body)))
            .map_err(|e| self.no_answer(e.to_string()))?;
        sender.send_request(request).await.map_err(|e| self.no_answer(e.to_string()))
    }
}

fn timed_out() -> String {
    format!("no answer within {} s", PATIENCE.as_secs())
}

/// The event that ended a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// `take` returned false.
    Taker,
    /// vnetd closed the stream.
    Server,
    /// Ctrl-C or SIGTERM.
    Signal,
}

/// Percent-encodes text for a URI (RFC 3986, section 2.1).
pub fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(byte.into());
        } else {
            encoded += &format!("%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    #[test]
    fn reserved_characters_are_percent_encoded() {
        assert_eq!(super::encode("a-b/c d.ü"), "a-b%2Fc%20d.%C3%BC");
    }
}
