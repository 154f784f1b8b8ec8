//! A check's result, and the daemon's answers that checks use.

use serde::Serialize;
use vnet_control::api::{Interface, Link, Overlay, Status};

use crate::client::Client;
use crate::output::read;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Nothing to do.
    Ok,
    /// vnet works, but is slower or less predictable than it could be.
    Warn,
    /// Something does not work.
    Problem,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The check's name, stable for scripts.
    pub check: &'static str,
    /// Severity.
    pub level: Level,
    /// What was found.
    pub what: String,
    /// Why it matters.
    pub why: &'static str,
    /// How to fix it; absent if nothing is wrong.
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub todo: Option<String>,
}

impl Finding {
    pub fn ok(check: &'static str, why: &'static str, what: impl Into<String>) -> Finding {
        Finding { check, level: Level::Ok, what: what.into(), why, todo: None }
    }

    pub fn bad(
        check: &'static str,
        level: Level,
        why: &'static str,
        what: impl Into<String>,
        todo: impl Into<String>,
    ) -> Finding {
        Finding { check, level, what: what.into(), why, todo: Some(todo.into()) }
    }
}

/// A daemon's answers.
pub struct Daemon {
    pub status: Status,
    pub interfaces: Vec<Interface>,
    pub links: Vec<Link>,
    /// Absent where the host is in no overlay.
    pub overlay: Option<Overlay>,
}

impl Daemon {
    /// Queries the daemon; `None` if it does not answer.
    pub fn ask(client: &Client<'_>) -> Option<Daemon> {
        let status = read(&client.get("/v1/status").ok()?).ok()?;
        let interfaces = read(&client.get("/v1/interfaces").ok()?).ok()?;
        let links = read(&client.get("/v1/links").ok()?).ok()?;
        let overlay = client.get("/v1/overlay").ok().and_then(|answer| read(&answer).ok());
        Some(Daemon { status, interfaces, links, overlay })
    }
}
