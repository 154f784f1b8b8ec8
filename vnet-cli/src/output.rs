//! Input and output of all commands: failures, standard output, answers, files.

use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::client::ClientError;

/// Error of a command: one line for each reason.
#[derive(Debug)]
pub enum Failure {
    /// vnetd refused the request or is unreachable.
    Client(ClientError),
    /// Error lines of the command itself.
    Lines(Vec<String>),
    /// Standard output is closed, as by `vnet stats | head`: the command exits silently.
    NobodyReads,
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Failure {
        Failure::Client(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Client(error) => error.fmt(f),
            Failure::Lines(lines) => f.write_str(&lines.join("\n")),
            Failure::NobodyReads => Ok(()),
        }
    }
}

/// Writes to standard output.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Failure::NobodyReads),
        Err(error) => Err(Failure::Lines(vec![format!("cannot write the answer: {error}")])),
    }
}

/// Parses an answer of vnetd.
pub fn read<T: DeserializeOwned>(answer: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(answer).map_err(|error| {
        let text =
            format!("cannot understand vnetd's answer: {error}; is it the same version? (vnet version)");
        Failure::Lines(vec![text])
    })
}

/// Reads a file, or standard input for `-`, of at most `bytes_max` bytes; returns its name for messages and its content.
pub fn read_file(file: &Path, bytes_max: u64) -> Result<(String, Vec<u8>), Failure> {
    let standard_input = file == Path::new("-");
    let name = if standard_input { "stdin".into() } else { file.display().to_string() };
    let mut text = vec![];
    let opened: io::Result<Box<dyn Read>> = if standard_input {
        Ok(Box::new(io::stdin().lock()))
    } else {
        std::fs::File::open(file).map(|file| Box::new(file) as _)
    };
    match opened.and_then(|from| from.take(bytes_max).read_to_end(&mut text)) {
        Ok(_) => Ok((name, text)),
        Err(error) => Err(Failure::Lines(vec![format!("{name}: cannot read the file: {error}")])),
    }
}
