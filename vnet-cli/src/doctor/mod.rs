//! `vnet doctor`: what on this host would hold vnet back, and what to do about it.
//!
//! Each check looks at one thing and says a line: [`Level`], what was found, why it matters, what to do. Most need no daemon:
//! they read /proc and /sys ([`host`]), or ask the kernel. With a daemon its threads, limits, links and counters are looked
//! at, too. Nothing is changed.

mod daemon;
mod host;
mod machine;

use std::fmt::Write;

use serde::Serialize;
use serde_json::json;
use vnet_control::api::{Interface, Link, Status};

use crate::client::Client;
use crate::{Failure, print, read};
use host::Host;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// vnet works, but is slower or less steady than it could be.
    Warn,
    /// Something does not work.
    Problem,
}

/// What one check found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// The check's name, stable for scripts.
    pub check: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found.
    pub what: String,
    /// Why that matters.
    pub why: &'static str,
    /// What to do; nothing where all is well.
    #[serde(rename = "do", skip_serializing_if = "Option::is_none")]
    pub todo: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, why: &'static str, what: impl Into<String>) -> Finding {
        Finding { check, level: Level::Ok, what: what.into(), why, todo: None }
    }

    fn bad(
        check: &'static str,
        level: Level,
        why: &'static str,
        what: impl Into<String>,
        todo: impl Into<String>,
    ) -> Finding {
        Finding { check, level, what: what.into(), why, todo: Some(todo.into()) }
    }
}

/// What a daemon says of itself.
pub struct Daemon {
    status: Status,
    interfaces: Vec<Interface>,
    links: Vec<Link>,
}

impl Daemon {
    /// Asks; `None` when nobody answers.
    fn ask(client: &Client<'_>) -> Option<Daemon> {
        let status = read(&client.get("/v1/status").ok()?).ok()?;
        let interfaces = read(&client.get("/v1/interfaces").ok()?).ok()?;
        let links = read(&client.get("/v1/links").ok()?).ok()?;
        Some(Daemon { status, interfaces, links })
    }
}

/// Looks at everything, and says it. Fails when there is a problem.
pub fn run(client: &Client<'_>, json: bool) -> Result<(), Failure> {
    let daemon = Daemon::ask(client);
    let findings = examine(&Host::here(), daemon.as_ref());
    if json {
        let host = daemon.as_ref().map(|daemon| &daemon.status.host);
        let answer = json!({ "daemon": host, "findings": findings });
        print(&format!("{answer}\n"))?;
    } else {
        print(&text(&findings, daemon.as_ref()))?;
    }
    match findings.iter().filter(|finding| finding.level == Level::Problem).count() {
        0 => Ok(()),
        1 => Err(Failure::Lines(vec!["1 problem".into()])),
        n => Err(Failure::Lines(vec![format!("{n} problems")])),
    }
}

fn examine(host: &Host, daemon: Option<&Daemon>) -> Vec<Finding> {
    let mut findings = machine::examine(host, daemon);
    if let Some(daemon) = daemon {
        findings.extend(daemon::examine(host, daemon));
    }
    findings
}

fn text(findings: &[Finding], daemon: Option<&Daemon>) -> String {
    let mut text = match daemon {
        Some(daemon) => format!("with vnetd of host {}, process {}\n", daemon.status.host, daemon.status.pid),
        None => "no vnetd answers: only the machine is looked at\n".into(),
    };
    for Finding { check, level, what, why, todo } in findings {
        let level = match level {
            Level::Ok => "ok     ",
            Level::Warn => "warn   ",
            Level::Problem => "PROBLEM",
        };
        let _ = writeln!(text, "{level}  {check:<12}  {what}");
        if let Some(todo) = todo {
            let _ = writeln!(text, "         why: {why}\n         do:  {todo}");
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    let (ok, warn, problem) = (count(Level::Ok), count(Level::Warn), count(Level::Problem));
    let _ = writeln!(text, "{ok} ok, {warn} to improve, {problem} not working");
    text
}

#[cfg(test)]
mod tests;
