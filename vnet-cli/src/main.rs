//! vnet: the command line client. It queries or changes a running vnetd over its control socket, and prints the answer as an
//! aligned table or as JSON.

mod args;
mod capture;
mod client;
mod console;
mod doctor;
mod events;
mod headers;
mod keys;
mod mpi;
mod output;
mod save;
mod settings;
mod show;
mod timeline;
mod top;

use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use args::{Args, Command, InterfaceCommand, LinkCommand, NetworkCommand, RouteCommand};
use clap::{CommandFactory, Parser};
use client::{Client, ClientError};
use output::{Failure, print, read, read_file};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use vnet_control::config::{self, FILE_MAX};
use vnet_control::{Problem, api};

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(()) | Err(Failure::NobodyReads) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let vnet = Vnet { client: Client::new(&args.socket), json: args.json };
    match &args.command {
        Command::Status => vnet.list("/v1/status", show::status),
        Command::Stats { watch } => vnet.stats(*watch),
        Command::Overlay => vnet.list("/v1/overlay", show::overlay),
        Command::Addresses => vnet.list("/v1/learned", show::addresses),
        Command::Flows => vnet.list("/v1/flows", show::flows),
        Command::Network(NetworkCommand::List) => vnet.list("/v1/networks", show::networks),
        Command::Save(save) => save::run(&vnet.client, save),
        Command::Events { count } => events::run(&vnet.client, *count, args.json),
        Command::Interface(InterfaceCommand::List) => vnet.list("/v1/interfaces", show::interfaces),
        Command::Link(LinkCommand::List) => vnet.list("/v1/links", show::links),
        Command::Route(RouteCommand::List) => vnet.list("/v1/routes", show::routes),
        Command::Interface(InterfaceCommand::Add(add)) => {
            vnet.add("/v1/interfaces", &add.request(), |_: api::Interface| {
                format!("interface {} added\n", add.name())
            })
        }
        Command::Interface(InterfaceCommand::Set { name, settings }) => {
            let settings: serde_json::Map<_, _> = settings.iter().cloned().collect();
            let path = format!("/v1/interfaces/{}", client::encode(name));
            vnet.change(&path, &settings.into(), |changed| show::interfaces(&vec![changed]))
        }
        Command::Interface(InterfaceCommand::Timeline(timeline)) => {
            vnet.ask(&timeline.path(), timeline::show)
        }
        Command::Link(LinkCommand::Add(add)) => {
            vnet.add("/v1/links", &add.request(), |_: api::Link| format!("link {} added\n", add.name()))
        }
        Command::Route(RouteCommand::Add(add)) => {
            vnet.add("/v1/routes", &add.request(), |route: api::Route| {
                format!("route {} added\n", route.index)
            })
        }
        Command::Route(RouteCommand::Move { mac, to, network }) => {
            let request = json!({ "dst": mac, "to": to.to_string(), "network": network });
            vnet.change("/v1/routes", &request, |moved| show::routes(&moved))
        }
        Command::Interface(InterfaceCommand::Del { name }) => {
            vnet.remove("interface", "/v1/interfaces", name)
        }
        Command::Link(LinkCommand::Del { name }) => vnet.remove("link", "/v1/links", name),
        Command::Route(RouteCommand::Del { index }) => vnet.remove("route", "/v1/routes", &index.to_string()),
        Command::Apply { file, dry_run } => vnet.apply(file, *dry_run),
        Command::Check { file, text_only } => vnet.check(file, *text_only),
        Command::Trace(trace) if trace.follow => vnet.ask(&trace.path(), show::trace),
        Command::Trace(trace) => vnet.list(&trace.path(), show::trace),
        Command::Console { files, dialect } => {
            console::run(&vnet.client, files, dialect.map(Into::into), args.json)
        }
        Command::Capture(capture) => capture::run(&vnet.client, capture, args.json),
        Command::Doctor => doctor::run(&vnet.client, args.json),
        Command::Top(top) => top::run(&vnet.client, top, args.json),
        Command::Keys(command) => {
            let (text, answer) = keys::run(command).map_err(|line| Failure::Lines(vec![line]))?;
            vnet.print(answer.to_string().as_bytes(), |_| Ok(text))
        }
        Command::MpiEnv(wanted) => mpi::run(wanted, args.json),
        Command::Version => vnet.version(),
        Command::Completions { shell } => {
            let mut script = vec![];
            clap_complete::generate(*shell, &mut Args::command(), "vnet", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Man { folder } => clap_mangen::generate_to(Args::command(), folder)
            .map_err(|error| Failure::Lines(vec![format!("cannot write to {}: {error}", folder.display())])),
    }
}

fn body(request: &Value) -> Vec<u8> {
    request.to_string().into_bytes()
}

struct Vnet<'a> {
    client: Client<'a>,
    json: bool,
}

impl Vnet<'_> {
    /// GETs an answer and prints it.
    fn list<T: DeserializeOwned>(&self, path: &str, show: impl Fn(&T) -> String) -> Result<(), Failure> {
        let answer = self.client.get(path)?;
        self.print(&answer, |answer| Ok(show(&read(answer)?)))
    }

    /// POSTs without a body and prints the answer.
    fn ask<T: DeserializeOwned>(&self, path: &str, show: impl Fn(&T) -> String) -> Result<(), Failure> {
        let answer = self.client.post(path, vec![])?;
        self.print(&answer, |answer| Ok(show(&read(answer)?)))
    }

    /// POSTs a request and prints the answer.
    fn add<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &Value,
        show: impl Fn(T) -> String,
    ) -> Result<(), Failure> {
        self.answered(self.client.post(path, body(request)), show)
    }

    /// PATCHes a request and prints the answer.
    fn change<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &Value,
        show: impl Fn(T) -> String,
    ) -> Result<(), Failure> {
        self.answered(self.client.patch(path, body(request)), show)
    }

    fn answered<T: DeserializeOwned>(
        &self,
        answer: Result<Vec<u8>, ClientError>,
        show: impl Fn(T) -> String,
    ) -> Result<(), Failure> {
        self.print(&answer?, |answer| Ok(show(read(answer)?)))
    }

    fn remove(&self, object: &str, path: &str, name: &str) -> Result<(), Failure> {
        self.client.delete(&format!("{path}/{}", client::encode(name)))?;
        let answer = json!({ "removed": { "object": object, "name": name } });
        self.print(answer.to_string().as_bytes(), |_| Ok(format!("{object} {name} removed\n")))
    }

    fn apply(&self, file: &Path, dry_run: bool) -> Result<(), Failure> {
        let (name, text) = read_file(file, FILE_MAX)?;
        let path = format!("/v1/apply?dry_run={dry_run}&name={}", client::encode(&name));
        let answer = self.client.post(&path, text)?;
        let applied: api::Applied = read(&answer)?;
        applied.warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        self.print(&answer, |_| Ok(show::applied(&applied)))
    }

    /// Checks a file, and unless `text_only` is set, the files that it names; needs no running vnetd.
    fn check(&self, file: &Path, text_only: bool) -> Result<(), Failure> {
        let (name, text) = read_file(file, FILE_MAX)?;
        let result = match String::from_utf8(text) {
            Ok(text) if text_only => config::parse(&name, &text),
            Ok(text) => config::parse(&name, &text).and_then(config::check_files),
            Err(_) => return Err(Failure::Lines(vec![format!("{name}: is not UTF-8 text")])),
        };
        let lines = |problems: &[Problem]| problems.iter().map(ToString::to_string).collect::<Vec<_>>();
        let (errors, warnings) = match &result {
            Ok(configuration) => (vec![], lines(&configuration.warnings)),
            Err(error) => (lines(&error.0), vec![]),
        };
        let answer =
            json!({ "file": name, "good": errors.is_empty(), "errors": errors, "warnings": warnings });
        warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
        if errors.is_empty() {
            return self.print(answer.to_string().as_bytes(), |_| Ok(format!("{name}: good\n")));
        }
        if self.json {
            self.print(answer.to_string().as_bytes(), |_| Ok(String::new()))?;
        }
        Err(Failure::Lines(errors))
    }

    fn version(&self) -> Result<(), Failure> {
        let daemon = self.client.get("/v1/status").ok().and_then(|answer| read::<api::Status>(&answer).ok());
        let daemon = daemon.map(|status| status.version);
        let answer = json!({ "vnet": env!("CARGO_PKG_VERSION"), "vnetd": daemon });
        self.print(answer.to_string().as_bytes(), |_| {
            let daemon = daemon.as_deref().unwrap_or("not reached");
            Ok(format!("vnet {}\nvnetd {daemon}\n", env!("CARGO_PKG_VERSION")))
        })
    }

    /// Prints counters, once or every `watch` seconds.
    fn stats(&self, watch: Option<u32>) -> Result<(), Failure> {
        let Some(seconds) = watch else { return self.list("/v1/stats", show::stats) };
        loop {
            let answer = self.client.get("/v1/stats")?;
            if !self.json && io::stdout().is_terminal() {
                // Cursor home, clear the screen.
                print("\x1b[H\x1b[J")?;
            }
            self.print(&answer, |answer| Ok(show::stats(&read(answer)?) + "\n"))?;
            std::thread::sleep(Duration::from_secs(seconds.into()));
        }
    }

    /// Prints an answer: with --json on one line as sent by vnetd, else as text.
    fn print(
        &self,
        answer: &[u8],
        show: impl FnOnce(&[u8]) -> Result<String, Failure>,
    ) -> Result<(), Failure> {
        if self.json { print(&(String::from_utf8_lossy(answer) + "\n")) } else { print(&show(answer)?) }
    }
}
