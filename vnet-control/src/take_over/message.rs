//! Messages of a take-over: a length (32 bits, little-endian), then JSON. Sealed links and pairs of hosts that meet here follow `Last`
//! without JSON, each as a length and the form of [`vnet::link::succession`] or [`vnet::link::rendezvous::relay_succession`]: keys never become text.
//!
//! They come from processes of root or of vnetd's own user only. All the same they are bounded and checked: a message that is too long, has an
//! unknown field or comes at a wrong time ends the take-over, and the running vnetd goes on.

use serde::{Deserialize, Serialize};

use super::state::{Estate, Last};
use crate::config::FILE_MAX;

/// Version of the protocol. Others are refused.
pub const VERSION: u32 = 2;
/// Bytes of the length before a message.
pub const HEAD: usize = 4;
/// Maximum length of a message in bytes: a configuration file of maximum length in JSON, where a line end takes two bytes, and the rest.
pub const LENGTH_MAX: u32 = 2 * FILE_MAX as u32 + (16 << 20);
/// Maximum number of descriptors with one message: the kernel's limit is 253 (`SCM_MAX_FD`).
pub const PASSED_MAX: usize = 128;
/// Maximum number of descriptors in all: about those of 1 024 interfaces with eight queues each.
pub const DESCRIPTORS_MAX: usize = 8192;
/// Maximum number of sealed links: that of links.
pub const SEALED_MAX: usize = 4096;
/// Maximum number of pairs of hosts that meet there: that of `meetings`.
pub const PAIRS_MAX: usize = 256;

/// A message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case", deny_unknown_fields)]
pub enum Message {
    /// From the new vnetd, first.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// Its release, for the log.
        release: String,
    },
    /// From either, instead of the next message: nothing is taken over.
    Refused {
        /// The reason, in one line.
        why: String,
    },
    /// The answer to `Hello`.
    Estate {
        /// Settings and positions.
        estate: Box<Estate>,
        /// Number of descriptors that follow.
        descriptors: usize,
        /// The running vnetd and its surroundings.
        process: Process,
    },
    /// After `Estate`, until all descriptors are passed: the descriptors with this message, by name.
    Descriptors {
        /// The names.
        names: Vec<String>,
    },
    /// From the new vnetd: everything is open, nothing is served.
    Prepared,
    /// The answer to `Prepared`, while dispatchers stand still.
    Last {
        /// The last state.
        last: Box<Last>,
        /// Number of sealed links that follow.
        sealed: usize,
        /// Number of pairs of hosts that meet there, which follow behind them.
        pairs: usize,
    },
    /// From the new vnetd, before it uses anything of the last state. If it fails later, keys of sealed links are discarded.
    Begins,
    /// From the new vnetd: frames flow.
    Running,
}

/// The running vnetd's process, as far as the new one takes its place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// True if the directory of the control socket is vnetd's own and is removed at the end.
    pub owns_folder: bool,
    /// The service manager's socket (`NOTIFY_SOCKET`).
    pub notify_socket: Option<String>,
    /// Interval of the service manager's watchdog (`WATCHDOG_USEC`).
    pub watchdog_us: Option<u64>,
}

/// Error of a message.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// Longer than any message.
    #[error("a message of {0} bytes, more than {LENGTH_MAX}")]
    TooLong(u64),
    /// Not a message of this version.
    #[error("not a message of a take-over: {0}")]
    Form(#[from] serde_json::Error),
    /// More descriptors than are allowed, or other names than descriptors.
    #[error("{0} descriptors with {1} names")]
    Descriptors(usize, usize),
}

impl Message {
    /// The bytes of a message with its length.
    ///
    /// # Errors
    /// It is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>, MessageError> {
        let mut bytes = vec![0; HEAD];
        serde_json::to_writer(&mut bytes, self)?;
        let len = bytes.len() - HEAD;
        let short = u32::try_from(len).ok().filter(|len| *len <= LENGTH_MAX);
        bytes[..HEAD].copy_from_slice(&short.ok_or(MessageError::TooLong(len as u64))?.to_le_bytes());
        Ok(bytes)
    }

    /// The length of the message that follows.
    ///
    /// # Errors
    /// It is too long.
    pub fn length(head: [u8; HEAD]) -> Result<usize, MessageError> {
        match u32::from_le_bytes(head) {
            len if len <= LENGTH_MAX => Ok(len as usize),
            len => Err(MessageError::TooLong(len.into())),
        }
    }

    /// Reads a message that came with `passed` descriptors.
    ///
    /// # Errors
    /// It is not a message, or does not name its descriptors.
    pub fn parse(bytes: &[u8], passed: usize) -> Result<Message, MessageError> {
        let message: Message = serde_json::from_slice(bytes)?;
        let names = if let Message::Descriptors { names } = &message { names.len() } else { 0 };
        if names != passed || passed > PASSED_MAX {
            return Err(MessageError::Descriptors(passed, names));
        }
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(message: &Message, passed: usize) {
        let bytes = message.to_bytes().unwrap();
        let (head, body) = bytes.split_first_chunk::<HEAD>().unwrap();
        assert_eq!(Message::length(*head).unwrap(), body.len());
        assert_eq!(Message::parse(body, passed).unwrap(), *message);
    }

    #[test]
    fn messages_are_read_as_written() {
        let estate = Estate { settings: "[host]\nname = \"h1\"\n".into(), positions: Default::default() };
        let process = Process { notify_socket: Some("/run/n".into()), ..Process::default() };
        round(&Message::Hello { version: VERSION, release: "1".into() }, 0);
        round(&Message::Refused { why: "\"no\"".into() }, 0);
        round(&Message::Estate { estate: Box::new(estate), descriptors: 3, process }, 0);
        round(&Message::Descriptors { names: vec!["bridge/0/0".into(), "a".into()] }, 2);
        round(&Message::Prepared, 0);
        round(&Message::Last { last: Box::default(), sealed: 2, pairs: 1 }, 0);
        round(&Message::Begins, 0);
        round(&Message::Running, 0);
    }

    #[test]
    fn descriptors_without_names_and_names_without_descriptors_are_refused() {
        let names = |count| Message::Descriptors { names: vec![String::new(); count] }.to_bytes().unwrap();
        assert!(Message::parse(&names(2)[HEAD..], 2).is_ok());
        assert!(Message::parse(&names(2)[HEAD..], 1).is_err());
        assert!(Message::parse(&names(2)[HEAD..], 3).is_err());
        assert!(Message::parse(&names(PASSED_MAX + 1)[HEAD..], PASSED_MAX + 1).is_err());
        assert!(Message::parse(&Message::Prepared.to_bytes().unwrap()[HEAD..], 1).is_err());
    }

    #[test]
    fn other_messages_are_refused() {
        assert!(Message::length(u32::MAX.to_le_bytes()).is_err());
        assert_eq!(Message::length(LENGTH_MAX.to_le_bytes()).unwrap(), LENGTH_MAX as usize);
        for text in ["", "{}", r#"{"message":"else"}"#, r#"{"message":"hello","version":1}"#, "[[[[[["] {
            assert!(Message::parse(text.as_bytes(), 0).is_err(), "{text}");
        }
        let unknown = r#"{"message":"hello","version":1,"release":"1","more":1}"#;
        assert!(Message::parse(unknown.as_bytes(), 0).is_err());
        let deep = "[".repeat(100_000);
        assert!(Message::parse(deep.as_bytes(), 0).is_err(), "no stack overflow");
    }
}
