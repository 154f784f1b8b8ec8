//! The client side of a SOCKS 5 exchange over a non-blocking socket.
//!
//! Reads exactly the proxy's bytes: the first byte after them belongs to the other end of the connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use super::options::Proxy;
use crate::wire::socks::{self, Destination, Login, SocksError};

/// Reason why the exchange failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProxyError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Refused(#[from] SocksError),
}

/// The request that was sent last.
#[derive(Clone, Copy)]
enum Step {
    Greeting,
    Password,
    Connect,
    /// The rest of the reply to CONNECT, whose first bytes determine its length.
    Rest,
}

/// An exchange in progress.
pub(super) struct Exchange {
    step: Step,
    /// Bytes that the socket has not taken yet.
    question: Vec<u8>,
    answer: Vec<u8>,
    /// Number of bytes of `answer` that have arrived.
    filled: usize,
}

impl Exchange {
    pub(super) fn new(proxy: &Proxy) -> Exchange {
        Exchange::ask(Step::Greeting, socks::greeting(proxy.credentials.is_some()), 2)
    }

    fn ask(step: Step, question: Vec<u8>, answer_len: usize) -> Exchange {
        Exchange { step, question, answer: vec![0; answer_len], filled: 0 }
    }

    /// Continues until the socket would block. Returns true once the proxy has connected to `to`.
    pub(super) fn advance(
        &mut self,
        socket: &TcpStream,
        proxy: &Proxy,
        to: &Destination,
    ) -> Result<bool, ProxyError> {
        loop {
            if !self.transfer(socket)? {
                return Ok(false);
            }
            let connect = || Exchange::ask(Step::Connect, socks::connect(to), socks::ANSWER_START);
            *self = match (self.step, &self.answer[..]) {
                (Step::Greeting, &[version, method]) => {
                    match (socks::login([version, method], proxy.credentials.is_some())?, &proxy.credentials)
                    {
                        (Login::Password, Some(credentials)) => {
                            Exchange::ask(Step::Password, socks::password(credentials), 2)
                        }
                        _ => connect(),
                    }
                }
                (Step::Password, &[version, status]) => {
                    socks::granted([version, status])?;
                    connect()
                }
                (Step::Connect, start) => {
                    let start = *start.first_chunk().expect("an answer of ANSWER_START bytes");
                    Exchange::ask(Step::Rest, vec![], socks::answer_rest(start)?)
                }
                _ => return Ok(true),
            };
        }
    }

    /// Sends the request, then reads the reply. Returns false when the socket would block.
    fn transfer(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        while !self.question.is_empty() || self.filled < self.answer.len() {
            let moved = if self.question.is_empty() {
                socket.read(&mut self.answer[self.filled..])
            } else {
                socket.write(&self.question)
            };
            match moved {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) if self.question.is_empty() => self.filled += count,
                Ok(count) => drop(self.question.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}
