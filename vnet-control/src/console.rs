//! The console: executes commands of the [`language`] on the engine and formats the answers.
//!
//! A command becomes the same edit of the desired state as an API request, and its keys go through the configuration's parsers,
//! so the console accepts only what a file may contain. An answer is `OK …`, `ERROR reason`, or the lines of a listing ended by a
//! line with a single dot.

use std::fmt;
use std::ops::Range;

use serde_json::{Map, Value, json};

use super::desired::{Item, LinkSpec, Target};
use super::engine::{Engine, EngineError, Listed};
use super::language::{self, COMMANDS, Command, Dialect, LISTING_MAX, LanguageError, PortName, Transport};
use super::{api, config, desired};
use vnet::link::ANYWHERE;
use vnet::route::Qualifier;

/// The answer to a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// No answer: the line was empty or a comment.
    Nothing,
    /// `OK …`
    Ok(String),
    /// `ERROR reason`
    Error(String),
    /// A listing, ended by `.`; lines that begin with `#` are remarks.
    Listing(Vec<String>),
    /// `OK …`, then the session ends.
    Done,
}

impl From<LanguageError> for Answer {
    fn from(error: LanguageError) -> Answer {
        Answer::Error(error.to_string())
    }
}

/// Maximum length of an `OK` or `ERROR` line in bytes. A line of 4 096 bytes can hold a thousand mistakes; the first few are
/// enough.
pub const REPLY_MAX: usize = 1_000;

/// Joins the lines of a text and replaces control characters, so that quoted text cannot break the answer's line.
fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join("; ").chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A line that begins with `word`, of at most [`REPLY_MAX`] bytes.
fn reply(word: &str, text: &str) -> String {
    let mut line = format!("{word} {}", one_line(text));
    if line.len() > REPLY_MAX {
        let fits = |end: &usize| line.is_char_boundary(*end);
        line.truncate((0..=REPLY_MAX - '…'.len_utf8()).rev().find(fits).unwrap_or(0));
        line.push('…');
    }
    line
}

impl fmt::Display for Answer {
    /// The answer as sent, with line endings.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Answer::Nothing => Ok(()),
            Answer::Ok(text) => writeln!(f, "{}", reply("OK", text)),
            Answer::Error(reason) => writeln!(f, "{}", reply("ERROR", reason)),
            Answer::Listing(lines) => {
                lines.iter().try_for_each(|line| writeln!(f, "{}", one_line(line)))?;
                f.write_str(".\n")
            }
            Answer::Done => f.write_str("OK bye\n"),
        }
    }
}

/// Error of a command.
#[derive(Debug, thiserror::Error)]
enum ConsoleError {
    #[error(transparent)]
    Engine(EngineError),
    #[error("there is no {0}; {1} lists them")]
    NotFound(String, &'static str),
    #[error(transparent)]
    Config(#[from] config::ConfigError),
    #[error("there is no link to {0}; LINKS? lists them")]
    NoLink(String),
    #[error("there is no interface {0}; INTERFACES? lists them")]
    NoInterface(String),
    #[error("several links go to {0}; name one as IP:PORT or by its name")]
    Ambiguous(String),
}

impl From<EngineError> for ConsoleError {
    fn from(error: EngineError) -> ConsoleError {
        match error {
            EngineError::NotFound(what, listed) => ConsoleError::NotFound(what, listed.line()),
            error => ConsoleError::Engine(error),
        }
    }
}

/// Parses and executes a line.
pub fn answer(engine: &mut Engine, dialect: Dialect, line: &[u8]) -> Answer {
    match language::parse_bytes(dialect, line.strip_suffix(b"\r").unwrap_or(line)) {
        Ok(command) => execute(engine, command),
        Err(error) => error.into(),
    }
}

/// Lines of a file, executed a few at a time. The client reads the answers before more lines are executed, which bounds the
/// memory of answers even for a file of long listings.
pub struct Script {
    dialect: Dialect,
    text: Vec<u8>,
    /// Offset of the next line; `None` after the last one or `DONE`.
    at: Option<usize>,
    /// Number of lines executed.
    lines: usize,
}

/// Maximum number of lines executed by one [`Script::next`], so that other clients can use the engine in between.
pub const LINES_AT_ONCE: usize = 256;
/// [`Script::next`] stops once its answers hold this many bytes. One listing may exceed that.
pub const ANSWERS_AT_ONCE: usize = 64 << 10;

impl Script {
    /// A script of `text`.
    pub fn new(dialect: Dialect, text: Vec<u8>) -> Script {
        Script { dialect, text, at: Some(0), lines: 0 }
    }

    /// True once every line, or `DONE`, was executed.
    pub fn is_done(&self) -> bool {
        self.at.is_none()
    }

    /// Executes the next lines. Lines without an answer are omitted.
    pub fn next(&mut self, engine: &mut Engine) -> Vec<api::ConsoleAnswer> {
        let (mut answers, mut bytes, last) = (vec![], 0, self.lines + LINES_AT_ONCE);
        while let Some(line) = self.next_line().filter(|_| bytes < ANSWERS_AT_ONCE && self.lines < last) {
            let answer = answer(engine, self.dialect, &self.text[line.clone()]);
            self.lines += 1;
            self.at = if answer == Answer::Done { None } else { self.after(line.end) };
            let text = answer.to_string();
            bytes += text.len();
            if !text.is_empty() {
                let good = !matches!(answer, Answer::Error(_));
                let lines = text.lines().map(ToString::to_string).collect();
                answers.push(api::ConsoleAnswer { line: self.lines, good, lines });
            }
        }
        answers
    }

    /// Range of the next line, without its line ending.
    fn next_line(&self) -> Option<Range<usize>> {
        let begin = self.at?;
        let length = self.text[begin..].iter().position(|byte| *byte == b'\n');
        let end = length.map_or(self.text.len(), |length| begin + length);
        Some(begin..end)
    }

    /// Offset of the line after the one that ends at `end`.
    fn after(&self, end: usize) -> Option<usize> {
        (end < self.text.len()).then_some(end + 1)
    }
}

/// Executes a command.
pub fn execute(engine: &mut Engine, command: Command) -> Answer {
    match command {
        Command::Nothing => Answer::Nothing,
        Command::Done => Answer::Done,
        Command::Help => help(),
        Command::Hello => {
            let host = &engine.current().host.spec.name;
            Answer::Ok(format!("vnet {} on host {host}; HELP lists the commands", env!("CARGO_PKG_VERSION")))
        }
        Command::Links(first) => links(engine, first),
        Command::Routes(first) => routes(engine, first),
        Command::Interfaces(first) => interfaces(engine, first),
        Command::Stats(first) => stats(engine, first),
        change => match carry_out(engine, change) {
            Ok(text) => Answer::Ok(text),
            Err(error) => Answer::Error(error.to_string()),
        },
    }
}

/// Executes a command that changes something; returns the text of its answer.
fn carry_out(engine: &mut Engine, command: Command) -> Result<String, ConsoleError> {
    match command {
        Command::AddLink { remote, transport, keys } => {
            let mut object = object(keys.0);
            let next = engine.indices().next_link();
            object.entry("name").or_insert_with(|| json!(format!("link{next}")));
            object.insert("remote".into(), json!(remote.to_string()));
            let encapsulation = match transport {
                Transport::Udp => "vnet",
                Transport::Tcp => "stream",
            };
            let encapsulation = object.entry("encapsulation").or_insert_with(|| json!(encapsulation));
            if *encapsulation == "vnet" && !object.contains_key("sealed") {
                // VNET/P has no encryption: its own encapsulation implies a trusted path. Other encapsulations must set
                // `trusted`.
                object.entry("trusted").or_insert(json!(true));
            }
            Ok(format!("link {}", engine.add_link(config::link_from_json(&bytes(object))?)?))
        }
        Command::AddInterface { name, kind, keys } => {
            let mut object = object(keys.0);
            object.insert("name".into(), json!(name));
            object.insert("kind".into(), json!(kind));
            let index = engine.add_interface(config::interface_from_json(&bytes(object))?)?;
            Ok(format!("interface {index}"))
        }
        Command::AddRoute(route) => Ok(format!("route {}", add_route(engine, route)?)),
        Command::DeleteRoute(index) => {
            engine.remove_route(index)?;
            Ok(format!("route {index} removed"))
        }
        Command::MoveRoutes { dst, to, network } => {
            let to = target(engine, &to)?;
            let network = network.or_else(|| network_of(engine, &to)).unwrap_or_default();
            let moved = engine.move_routes(network, dst, &to)?;
            let indices: Vec<_> = moved.iter().map(ToString::to_string).collect();
            Ok(format!("route {}", indices.join(" ")))
        }
        Command::DeleteLink(index) => {
            let name = engine.indices().link_name(index).map(ToString::to_string);
            engine.remove_link(
                &name.ok_or_else(|| EngineError::NotFound(format!("link {index}"), Listed::Links))?,
            )?;
            Ok(format!("link {index} removed"))
        }
        Command::DeleteInterface(index) => {
            let name = engine.indices().interface_name(index).map(ToString::to_string);
            let name =
                name.ok_or_else(|| EngineError::NotFound(format!("interface {index}"), Listed::Interfaces))?;
            engine.remove_interface(&name)?;
            Ok(format!("interface {index} removed"))
        }
        // `execute` answers all other commands itself.
        other => Ok(other.to_string()),
    }
}

fn object(keys: Vec<(String, Value)>) -> Map<String, Value> {
    keys.into_iter().collect()
}

fn bytes(object: Map<String, Value>) -> Vec<u8> {
    Value::Object(object).to_string().into_bytes()
}

fn add_route(engine: &mut Engine, route: language::AddRoute) -> Result<u32, ConsoleError> {
    let to = target(engine, &route.to)?;
    let from = match &route.from {
        language::FromClause::Any => desired::RouteSource::Any,
        language::FromClause::AnyEdge => desired::RouteSource::AnyLink,
        language::FromClause::AnyInterface => desired::RouteSource::AnyInterface,
        language::FromClause::One(place) => desired::RouteSource::One(target(engine, place)?),
    };
    let network = route.network.or_else(|| network_of(engine, &to)).unwrap_or_default();
    let object = json!({
        "network": network.get(),
        "src": route.src.to_string(),
        "dst": route.dst.to_string(),
        "from": from.to_string(),
        "to": to.to_string(),
    });
    Ok(engine.add_route(config::route_from_json(object.to_string().as_bytes())?)?)
}

/// The default network of a route to `target`: that of the interface, or the link's if it carries only one.
fn network_of(engine: &Engine, target: &Target) -> Option<vnet::frame::NetworkId> {
    let current = engine.current();
    match target {
        Target::Interface(name) => {
            current.interfaces.iter().find(|item| item.spec.name == *name).map(|item| item.spec.network)
        }
        Target::Link(name) => {
            let link = current.links.iter().find(|item| item.spec.name == *name)?;
            match link.spec.networks.as_deref() {
                Some([only]) => Some(*only),
                _ => None,
            }
        }
    }
}

/// Resolves a peer to an interface or link.
fn target(engine: &Engine, place: &PortName) -> Result<Target, ConsoleError> {
    let current = engine.current();
    let link = |what: String, is: &dyn Fn(&LinkSpec) -> bool| {
        let mut found = current.links.iter().filter(|item| is(&item.spec));
        match (found.next(), found.next()) {
            (Some(item), None) => Ok(Target::Link(item.spec.name.clone())),
            (None, _) => Err(ConsoleError::NoLink(what)),
            (Some(_), Some(_)) => Err(ConsoleError::Ambiguous(what)),
        }
    };
    let interface = |what: String, is: &dyn Fn(&desired::InterfaceSpec) -> bool| {
        let found = current.interfaces.iter().find(|item| is(&item.spec));
        found.map(|item| Target::Interface(item.spec.name.clone())).ok_or(ConsoleError::NoInterface(what))
    };
    match place {
        PortName::EdgeIp(ip) => link(ip.to_string(), &|spec| spec.remote.ip() == ip.to_canonical()),
        PortName::EdgeRemote(remote) => link(remote.to_string(), &|spec| spec.remote == *remote),
        PortName::EdgeName(name) => link(quoted(name), &|spec| spec.name == *name),
        PortName::InterfaceMac(mac) => interface(mac.to_string(), &|spec| spec.mac == Some(*mac)),
        PortName::InterfaceName(name) => interface(quoted(name), &|spec| spec.name == *name),
    }
}

fn quoted(name: &str) -> String {
    super::table::quote(name)
}

fn help() -> Answer {
    let mut lines = vec![];
    for usage in COMMANDS {
        let synonyms = match usage.synonyms {
            "" => String::new(),
            synonyms => format!(" (also {synonyms})"),
        };
        lines.push(usage.syntax.to_string());
        lines.push(format!("    {}{synonyms}", usage.help));
    }
    Answer::Listing(lines)
}

/// The lines of a listing from index `first` on, up to [`LISTING_MAX`], with a remark about how to continue.
fn listing(command: &str, lines: impl Iterator<Item = (u32, String)>, first: u32) -> Answer {
    let mut lines = lines.skip_while(|(index, _)| *index < first);
    let mut shown: Vec<_> = lines.by_ref().take(LISTING_MAX).map(|(_, line)| line).collect();
    if let Some((next, _)) = lines.next() {
        shown.push(format!("# more: {command} {next}"));
    }
    Answer::Listing(shown)
}

/// The `count` items with the lowest indices from `first` on, in order. Takes memory for these only: a table may have a million.
fn lowest<T>(items: impl Iterator<Item = (u32, T)>, first: u32, count: usize) -> Vec<(u32, T)> {
    let mut kept = vec![];
    for item in items.filter(|(index, _)| *index >= first) {
        kept.push(item);
        if kept.len() == 2 * count {
            kept.select_nth_unstable_by_key(count, |(index, _)| *index);
            kept.truncate(count);
        }
    }
    kept.sort_unstable_by_key(|(index, _)| *index);
    kept.truncate(count);
    kept
}

fn links(engine: &Engine, first: u32) -> Answer {
    let indices = engine.indices();
    let line = |Item { spec, .. }: &Item<LinkSpec>| {
        let (name, ip, port) = (&spec.name, spec.remote.ip(), spec.remote.port());
        let encapsulation = spec.encapsulation();
        let transport =
            if encapsulation == vnet::link::Encapsulation::Stream { Transport::Tcp } else { Transport::Udp };
        (indices.link(name), format!("{ip} {port} {transport} {name} {encapsulation}"))
    };
    let states: std::collections::HashMap<_, _> =
        engine.links().into_iter().map(|link| (link.name, link.state)).collect();
    let mut lines: Vec<_> = engine.current().links.iter().map(|item| (line(item), &item.spec.name)).collect();
    lines.sort_by_key(|((index, _), _)| *index);
    let state = |name| states.get(name).map_or("gone", String::as_str);
    let lines = lines
        .into_iter()
        .map(|((index, line), name)| (index, format!("{index} {line} {}", state(name.as_str()))));
    listing("LINKS?", lines, first)
}

fn routes(engine: &Engine, first: u32) -> Answer {
    let current = engine.current();
    let remotes: std::collections::HashMap<_, _> =
        current.links.iter().map(|item| (item.spec.name.as_str(), item.spec.remote)).collect();
    let place = |target: &Target| match target {
        Target::Interface(name) => format!("interface {name}"),
        Target::Link(name) => match remotes.get(name.as_str()) {
            Some(remote) if *remote != ANYWHERE => format!("edge {remote}"),
            _ => format!("edge {name}"),
        },
    };
    // One more than is shown tells that there are more.
    let routes = lowest(engine.route_indices(), first, LISTING_MAX + 1);
    let lines = routes.into_iter().map(|(index, spec)| {
        let from = match &spec.from {
            desired::RouteSource::Any => "any".into(),
            desired::RouteSource::AnyInterface => "interface".into(),
            desired::RouteSource::AnyLink => "edge".into(),
            desired::RouteSource::One(target) => place(target),
        };
        let (src, dst): (&Qualifier, &Qualifier) = (&spec.src, &spec.dst);
        (index, format!("{index} {src} {dst} {} {from} network={}", place(&spec.to), spec.network))
    });
    listing("ROUTES?", lines, first)
}

fn interfaces(engine: &Engine, first: u32) -> Answer {
    let indices = engine.indices();
    let mut lines: Vec<_> = engine
        .interfaces()
        .into_iter()
        .map(|interface| {
            let api::Interface { name, state, settings, .. } = interface;
            let (index, mac) = (indices.interface(&name), settings.text_or("mac", "-"));
            let [kind, mtu, network] = ["kind", "mtu", "network"].map(|key| settings.text(key));
            (index, format!("{index} {mac} {name} {kind} {state} mtu={mtu} network={network}"))
        })
        .collect();
    lines.sort_unstable();
    listing("INTERFACES?", lines.into_iter(), first)
}

/// One line per port: `KIND NAME COUNTER=VALUE …`. Optional counters are omitted if zero.
fn stats(engine: &Engine, first: u32) -> Answer {
    let stats = engine.stats();
    let mut lines = vec![];
    for api::Port { kind, name, counters } in &stats.ports {
        let api::Counters { in_frames, in_bytes, out_frames, out_bytes, copies, .. } = counters;
        let mut line = format!(
            "{kind} {name} in_frames={in_frames} in_bytes={in_bytes} out_frames={out_frames} out_bytes={out_bytes} \
             copies={copies}"
        );
        for (what, reasons) in [("drop", &counters.drops), ("discard", &counters.discards)] {
            for (reason, count) in reasons.iter().filter(|(_, count)| **count > 0) {
                line += &format!(" {what}.{reason}={count}");
            }
        }
        lines.push(line);
    }
    let api::Balance { entered, copies, out, drops } = stats.balance;
    lines.push(format!("balance in={entered} copies={copies} out={out} drops={drops}"));
    listing("STATS?", (1..).zip(lines), first)
}

#[cfg(test)]
#[path = "console_tests.rs"]
mod tests;
