//! `vnet doctor`: finds settings and faults of this host that limit vnet, and proposes a remedy for each.
//!
//! Each check reports one line: [`Level`], finding, reason, remedy. Most checks need no running vnetd: they read /proc and /sys
//! ([`host`]) or query the kernel. If vnetd runs, its threads, limits, links and counters are checked, too. The checks change
//! nothing.

mod daemon;
mod finding;
mod host;
mod machine;

use std::fmt::Write;

use serde_json::json;

use crate::client::Client;
use crate::output::{Failure, print};
use finding::{Daemon, Finding, Level};
use host::Host;

/// Runs all checks and prints the findings. Fails if one is a [`Level::Problem`].
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
        None => "no vnetd answers: only the machine is checked\n".into(),
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
