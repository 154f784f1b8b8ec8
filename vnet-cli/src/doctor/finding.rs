//! The result of a check, and vnetd's answers that checks use.

use serde::Serialize;
use vnet_control::api::{Interface, Link, Overlay, Status};

use crate::client::Client;
use crate::output::read;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No action needed.
    Ok,
    /// vnet works, but is slower or less predictable than it could be.
    Warn,
    /// A function does not work.
    Problem,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Name of the check, stable for scripts.
    pub check: &'static str,
    /// Severity.
    pub level: Level,
    /// The finding.
    pub what: String,
    /// Why the finding matters.
    pub why: &'static str,
    /// The remedy; absent if nothing is wrong.
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

/// The answers of a running vnetd.
pub struct Daemon {
    pub status: Status,
    pub interfaces: Vec<Interface>,
    pub links: Vec<Link>,
    /// Absent if the host is in no overlay.
    pub overlay: Option<Overlay>,
}

impl Daemon {
    /// Queries vnetd; `None` if it does not answer.
    pub fn ask(client: &Client<'_>) -> Option<Daemon> {
        let status = read(&client.get("/v1/status").ok()?).ok()?;
        let interfaces = read(&client.get("/v1/interfaces").ok()?).ok()?;
        let links = read(&client.get("/v1/links").ok()?).ok()?;
        let overlay = client.get("/v1/overlay").ok().and_then(|answer| read(&answer).ok());
        Some(Daemon { status, interfaces, links, overlay })
    }
}
