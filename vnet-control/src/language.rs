//! The control language of VNET/P: parses a line of text into a command, without I/O or engine.
//!
//! ```text
//! LINK ADD 10.0.0.2 9000 udp
//! ROUTE ADD any 52:54:00:00:00:02 edge 10.0.0.2 any
//! ROUTES?
//! LINK DEL 1
//! ```
//!
//! Keywords ignore case and have synonyms (VNET/P says `edge` for a link, VNET/U says `DEVICES?` for the interfaces).
//! In VNET/P's files `links` and `routes` the noun is optional ([`Dialect`]). Settings beyond the published grammar
//! are `key=value` with the keys of the configuration file, checked by the same reader. `Display` prints a line that
//! parses to the same command.
//!
//! The parser is written by hand: the grammar is a few words per line, and each error names the expected syntax.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use super::settings::plain;
use super::table::quote;
pub use super::usage::{COMMANDS, Usage};
use vnet::frame::NetworkId;
use vnet::route::Qualifier;
use vnet::wire::ethernet::Mac;

/// Maximum length of a line in bytes, without its line ending.
pub const LINE_MAX: usize = 4_096;
/// Maximum number of lines of one listing; the client requests the rest with an index. At up to 300 bytes per line an answer
/// stays below about a megabyte.
pub const LISTING_MAX: usize = 4_096;

/// Syntax of lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// The console's: each line begins with its noun or verb.
    #[default]
    Console,
    /// VNET/P's file `links`: `ADD …` and `DEL …` refer to links.
    Links,
    /// VNET/P's file `routes`: `ADD …` and `DEL …` refer to routes.
    Routes,
}

/// A parsed line.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// An empty line or comment, without an answer.
    Nothing,
    /// `HELLO`
    Hello,
    /// `HELP`
    Help,
    /// `DONE`
    Done,
    /// `LINKS?`, starting at an index.
    Links(u32),
    /// `ROUTES?`, starting at an index.
    Routes(u32),
    /// `INTERFACES?`, starting at an index.
    Interfaces(u32),
    /// `STATS?`, starting at a line.
    Stats(u32),
    /// `LINK ADD`
    AddLink {
        /// Address of the other host.
        remote: SocketAddr,
        /// The transport.
        transport: Transport,
        /// Further keys of `[[link]]`.
        keys: Keys,
    },
    /// `LINK DEL`
    DeleteLink(u32),
    /// `ROUTE ADD`
    AddRoute(AddRoute),
    /// `ROUTE DEL`
    DeleteRoute(u32),
    /// `ROUTE MOVE`
    MoveRoutes {
        /// The address whose frames lead elsewhere.
        dst: Mac,
        /// Interface or link to which they go.
        to: PortName,
        /// The network; by default that of the interface, else 1.
        network: Option<NetworkId>,
    },
    /// `INTERFACE ADD`
    AddInterface {
        /// Interface name.
        name: String,
        /// `tap` or `vhost-user`, as written.
        kind: String,
        /// Further keys of `[[interface]]`.
        keys: Keys,
    },
    /// `INTERFACE DEL`
    DeleteInterface(u32),
}

/// A link's transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
}

/// A route whose interfaces and links are not resolved yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddRoute {
    /// Source addresses.
    pub src: Qualifier,
    /// Destination addresses.
    pub dst: Qualifier,
    /// Interface or link to which matching frames go.
    pub to: PortName,
    /// Condition on the ingress port.
    pub from: FromClause,
    /// The route's network; by default that of the interface that the route names, else 1.
    pub network: Option<NetworkId>,
}

/// Where the frames that a route matches enter the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromClause {
    /// Anywhere.
    Any,
    /// Any link.
    AnyEdge,
    /// Any interface.
    AnyInterface,
    /// One link or interface.
    One(PortName),
}

/// A link or interface by one of its identities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortName {
    /// The link to this address.
    EdgeIp(IpAddr),
    /// The link to this address and port.
    EdgeRemote(SocketAddr),
    /// The link with this name.
    EdgeName(String),
    /// The interface with this address.
    InterfaceMac(Mac),
    /// The interface with this name.
    InterfaceName(String),
}

/// Keys of the configuration file with their values, in the order of the line, without duplicates.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Keys(pub Vec<(String, serde_json::Value)>);

/// Error of a line that is not a valid command.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LanguageError {
    /// Unknown first word.
    #[error("{} is not a command; HELP lists them", quote(.0))]
    Unknown(String),
    /// Wrong syntax.
    #[error("{what}; write {syntax}")]
    Usage {
        /// The mistake.
        what: String,
        /// The expected syntax.
        syntax: &'static str,
    },
    /// More than [`LINE_MAX`] bytes.
    #[error("the line is longer than {LINE_MAX} bytes")]
    TooLong,
    /// Not UTF-8.
    #[error("the line is not UTF-8 text")]
    NotText,
}

/// Parses a raw line without its line end.
pub fn parse_bytes(dialect: Dialect, line: &[u8]) -> Result<Command, LanguageError> {
    if line.len() > LINE_MAX {
        return Err(LanguageError::TooLong);
    }
    parse(dialect, str::from_utf8(line).map_err(|_| LanguageError::NotText)?)
}

/// The noun of a command.
#[derive(Clone, Copy, PartialEq)]
enum Noun {
    Link,
    Route,
    Interface,
}

/// Parses a line.
pub fn parse(dialect: Dialect, line: &str) -> Result<Command, LanguageError> {
    if line.len() > LINE_MAX {
        return Err(LanguageError::TooLong);
    }
    let command = command(dialect, line)?;
    // Older names and omitted words are shorter than what the command is displayed as, which must be a line, too.
    if command.to_string().len() > LINE_MAX { Err(LanguageError::TooLong) } else { Ok(command) }
}

fn command(dialect: Dialect, line: &str) -> Result<Command, LanguageError> {
    let mut words = Words { rest: line, syntax: "" };
    let Some(first) = words.next().filter(|word| !word.starts_with('#')) else { return Ok(Command::Nothing) };
    let bare = match dialect {
        Dialect::Console => None,
        Dialect::Links => Some(Noun::Link),
        Dialect::Routes => Some(Noun::Route),
    };
    if let (Some(noun), Some(verb)) = (bare, verb(first)) {
        return change(noun, verb, words);
    }
    let upper = first.to_ascii_uppercase();
    let (noun, listing) = match &*upper {
        "LINK" | "EDGE" => (Noun::Link, false),
        "ROUTE" => (Noun::Route, false),
        "INTERFACE" | "DEVICE" => (Noun::Interface, false),
        "LINKS" | "LINKS?" | "LINK?" | "EDGES" | "EDGES?" | "EDGE?" => (Noun::Link, true),
        "ROUTES" | "ROUTES?" | "ROUTE?" => (Noun::Route, true),
        "INTERFACES" | "INTERFACES?" | "INTERFACE?" | "DEVICES" | "DEVICES?" | "DEVICE?" => {
            (Noun::Interface, true)
        }
        _ => return simple(&upper, first, words),
    };
    if listing {
        return list(noun, words);
    }
    match words.next() {
        Some(word) if word.eq_ignore_ascii_case("list") => list(noun, words),
        Some(word) => match verb(word) {
            Some(verb) => change(noun, verb, words),
            None => Err(LanguageError::Usage {
                what: format!("{} is neither {}", quote(word), verbs(noun)),
                syntax: syntax_of(noun, Verb::Add),
            }),
        },
        None => {
            Err(LanguageError::Usage { what: "a verb is missing".into(), syntax: syntax_of(noun, Verb::Add) })
        }
    }
}

/// Parses a command without a noun.
fn simple(upper: &str, first: &str, mut words: Words<'_>) -> Result<Command, LanguageError> {
    let (command, syntax) = match upper {
        "HELLO" => return Ok(Command::Hello),
        "HELP" | "?" => (Command::Help, "HELP"),
        "DONE" | "QUIT" | "EXIT" => (Command::Done, "DONE"),
        "STATS" | "STATS?" => {
            words.syntax = syntax("STATS?");
            return words.last_number(0).map(Command::Stats);
        }
        _ => return Err(LanguageError::Unknown(first.into())),
    };
    words.syntax = syntax;
    words.end()?;
    Ok(command)
}

fn list(noun: Noun, mut words: Words<'_>) -> Result<Command, LanguageError> {
    let (what, command): (_, fn(u32) -> Command) = match noun {
        Noun::Link => ("LINKS?", Command::Links),
        Noun::Route => ("ROUTES?", Command::Routes),
        Noun::Interface => ("INTERFACES?", Command::Interfaces),
    };
    words.syntax = syntax(what);
    words.last_number(0).map(command)
}

#[derive(Clone, Copy, PartialEq)]
enum Verb {
    Add,
    Delete,
    Move,
}

/// What may follow a noun.
fn verbs(noun: Noun) -> &'static str {
    if noun == Noun::Route { "ADD, DEL, MOVE nor LIST" } else { "ADD, DEL nor LIST" }
}

fn verb(word: &str) -> Option<Verb> {
    match &*word.to_ascii_lowercase() {
        "add" => Some(Verb::Add),
        "del" | "delete" | "remove" => Some(Verb::Delete),
        "move" => Some(Verb::Move),
        _ => None,
    }
}

/// The syntax of the command that begins with `words`.
fn syntax(words: &str) -> &'static str {
    COMMANDS.iter().find(|usage| usage.words == words).map_or("HELP", |usage| usage.syntax)
}

fn syntax_of(noun: Noun, verb: Verb) -> &'static str {
    syntax(match (noun, verb) {
        (Noun::Link, Verb::Add) => "LINK ADD",
        (Noun::Link, Verb::Delete) => "LINK DEL",
        (Noun::Route, Verb::Add) => "ROUTE ADD",
        (Noun::Route, Verb::Delete) => "ROUTE DEL",
        (Noun::Route, Verb::Move) => "ROUTE MOVE",
        (Noun::Link, Verb::Move) => "LINK ADD",
        (Noun::Interface, Verb::Add | Verb::Move) => "INTERFACE ADD",
        (Noun::Interface, Verb::Delete) => "INTERFACE DEL",
    })
}

fn change(noun: Noun, verb: Verb, mut words: Words<'_>) -> Result<Command, LanguageError> {
    words.syntax = syntax_of(noun, verb);
    match (noun, verb) {
        (Noun::Link, Verb::Add) => add_link(words),
        (Noun::Route, Verb::Add) => add_route(words).map(Command::AddRoute),
        (Noun::Route, Verb::Move) => move_routes(words),
        (Noun::Link | Noun::Interface, Verb::Move) => {
            Err(words.wrong(format!("MOVE is neither {}", verbs(noun))))
        }
        (Noun::Interface, Verb::Add) => add_interface(words),
        (Noun::Link, Verb::Delete) => words.index().map(Command::DeleteLink),
        (Noun::Route, Verb::Delete) => words.index().map(Command::DeleteRoute),
        (Noun::Interface, Verb::Delete) => words.index().map(Command::DeleteInterface),
    }
}

fn add_link(mut words: Words<'_>) -> Result<Command, LanguageError> {
    let ip: IpAddr = words.parsed("the IP address")?;
    let port: u16 = words.parsed("the port")?;
    let transport = match words.peek() {
        Some(word) if word.eq_ignore_ascii_case("udp") => Some(Transport::Udp),
        Some(word) if word.eq_ignore_ascii_case("tcp") => Some(Transport::Tcp),
        _ => None,
    };
    if transport.is_some() {
        words.next();
    }
    let transport = transport.unwrap_or(Transport::Udp);
    Ok(Command::AddLink { remote: SocketAddr::new(ip, port), transport, keys: words.keys(&["remote"])? })
}

fn add_interface(mut words: Words<'_>) -> Result<Command, LanguageError> {
    let name = words.word("a name")?.to_string();
    let kind = words.word("a kind")?.to_ascii_lowercase();
    Ok(Command::AddInterface { name, kind, keys: words.keys(&["name", "kind"])? })
}

fn add_route(mut words: Words<'_>) -> Result<AddRoute, LanguageError> {
    let src = words.parsed("the source")?;
    let dst = words.parsed("the destination")?;
    let to = destination(&mut words)?;
    let kind = words.word("any, edge or interface")?;
    let kind = words.kind(kind)?;
    // An identity follows, unless the next word is a key.
    let id = words.peek().filter(|word| kind.is_some() && !word.contains('='));
    if id.is_some() {
        words.next();
    }
    let from = match (kind, id) {
        (None, _) => FromClause::Any,
        (Some(Noun::Link), None) => FromClause::AnyEdge,
        (Some(_), None) => FromClause::AnyInterface,
        (Some(Noun::Link), Some(id)) => FromClause::One(edge(id)),
        (Some(_), Some(id)) => FromClause::One(interface(id)),
    };
    let network = network(&mut words)?;
    Ok(AddRoute { src, dst, to, from, network })
}

fn move_routes(mut words: Words<'_>) -> Result<Command, LanguageError> {
    let dst = words.parsed("the address")?;
    let to = destination(&mut words)?;
    Ok(Command::MoveRoutes { dst, to, network: network(&mut words)? })
}

/// Parses the link or interface that frames go to.
fn destination(words: &mut Words<'_>) -> Result<PortName, LanguageError> {
    let kind = words.word("edge or interface")?;
    match words.kind(kind)? {
        Some(Noun::Link) => Ok(edge(words.word("the link's IP address")?)),
        Some(_) => Ok(interface(words.word("the interface's MAC address")?)),
        None => Err(words.wrong("frames cannot go to 'any'".into())),
    }
}

/// Parses the keys of a route, of which there is one.
fn network(words: &mut Words<'_>) -> Result<Option<NetworkId>, LanguageError> {
    let mut network = None;
    for (key, value) in words.keys(&[])?.0 {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok()).and_then(NetworkId::new);
        network = match (key.as_str(), id) {
            ("network", Some(id)) => Some(id),
            ("network", None) => {
                return Err(words.wrong(format!("{} is not a network", quote(&plain(&value)))));
            }
            _ => return Err(words.wrong(format!("a route has no key {}", quote(&key)))),
        };
    }
    Ok(network)
}

fn edge(id: &str) -> PortName {
    if let Ok(ip) = id.parse() {
        PortName::EdgeIp(ip)
    } else if let Ok(remote) = id.parse() {
        PortName::EdgeRemote(remote)
    } else {
        PortName::EdgeName(id.into())
    }
}

fn interface(id: &str) -> PortName {
    id.parse().map_or_else(|_| PortName::InterfaceName(id.into()), PortName::InterfaceMac)
}

/// Iterator over the words of a line.
struct Words<'a> {
    rest: &'a str,
    /// Syntax of the command, for errors.
    syntax: &'static str,
}

impl<'a> Words<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.rest.split_ascii_whitespace().next()
    }

    fn next(&mut self) -> Option<&'a str> {
        let rest = self.rest.trim_ascii_start();
        let end = rest.find(|c: char| c.is_ascii_whitespace()).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        self.rest = rest;
        (!word.is_empty()).then_some(word)
    }

    fn wrong(&self, what: String) -> LanguageError {
        LanguageError::Usage { what, syntax: self.syntax }
    }

    fn word(&mut self, what: &str) -> Result<&'a str, LanguageError> {
        self.next().ok_or_else(|| self.wrong(format!("{what} is missing")))
    }

    fn parsed<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, LanguageError> {
        let word = self.word(what)?;
        word.parse().map_err(|_| self.wrong(format!("{what} cannot be {}", quote(word))))
    }

    /// Parses a set of addresses, or `any`.
    fn kind(&self, word: &str) -> Result<Option<Noun>, LanguageError> {
        match &*word.to_ascii_lowercase() {
            "any" => Ok(None),
            "edge" | "link" => Ok(Some(Noun::Link)),
            "interface" | "device" => Ok(Some(Noun::Interface)),
            _ => Err(self.wrong(format!("{} is neither edge nor interface", quote(word)))),
        }
    }

    /// Parses an index as the last word.
    fn index(mut self) -> Result<u32, LanguageError> {
        let index = self.parsed("the index")?;
        self.end()?;
        Ok(index)
    }

    /// Parses an optional number as the last word.
    fn last_number(self, default: u32) -> Result<u32, LanguageError> {
        if self.peek().is_none() { Ok(default) } else { self.index() }
    }

    fn end(&mut self) -> Result<(), LanguageError> {
        self.next().map_or(Ok(()), |word| Err(self.wrong(format!("{} is one word too many", quote(word)))))
    }

    /// Parses all remaining words as `key=value`; refuses keys in `taken`.
    fn keys(&mut self, taken: &[&str]) -> Result<Keys, LanguageError> {
        let mut keys = Keys::default();
        while let Some(word) = self.next() {
            let Some((key, value)) = word.split_once('=') else {
                return Err(self.wrong(format!("{} is one word too many, or not KEY=VALUE", quote(word))));
            };
            let key = key.to_ascii_lowercase();
            if taken.contains(&key.as_str()) || keys.0.iter().any(|(known, _)| *known == key) {
                return Err(self.wrong(format!("{} is given twice", quote(&key))));
            }
            let value = value_of(&key, value);
            keys.0.push((key, value));
        }
        Ok(keys)
    }
}

/// Keys whose value is text even if it looks like a number.
const TEXTS: [&str; 9] =
    ["device", "encapsulation", "kind", "mac", "mode", "name", "netns", "remote", "socket"];

/// A value as JSON: a list for `networks`, else an integer, a boolean, or text.
fn value_of(key: &str, text: &str) -> serde_json::Value {
    if TEXTS.contains(&key) {
        return text.into();
    }
    if key == "networks" {
        return text.split(',').map(|item| value_of("", item)).collect::<Vec<_>>().into();
    }
    match (text, text.parse::<u32>()) {
        ("true", _) => true.into(),
        ("false", _) => false.into(),
        (_, Ok(number)) => number.into(),
        _ => text.into(),
    }
}

impl fmt::Display for Keys {
    /// Each key as ` key=value`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare =
            |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), ToString::to_string);
        self.0.iter().try_for_each(|(key, value)| match value {
            serde_json::Value::Array(list) => {
                write!(f, " {key}={}", list.iter().map(bare).collect::<Vec<_>>().join(","))
            }
            value => write!(f, " {key}={}", bare(value)),
        })
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Udp => "udp",
            Transport::Tcp => "tcp",
        })
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PortName::EdgeIp(ip) => write!(f, "edge {ip}"),
            PortName::EdgeRemote(remote) => write!(f, "edge {remote}"),
            PortName::EdgeName(name) => write!(f, "edge {name}"),
            PortName::InterfaceMac(mac) => write!(f, "interface {mac}"),
            PortName::InterfaceName(name) => write!(f, "interface {name}"),
        }
    }
}

impl fmt::Display for AddRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.src, self.dst, self.to)?;
        match &self.from {
            FromClause::Any => f.write_str("any")?,
            FromClause::AnyEdge => f.write_str("edge")?,
            FromClause::AnyInterface => f.write_str("interface")?,
            FromClause::One(place) => place.fmt(f)?,
        }
        self.network.map_or(Ok(()), |network| write!(f, " network={network}"))
    }
}

impl fmt::Display for Command {
    /// A line that parses to this command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = |f: &mut fmt::Formatter<'_>, what, first: u32| match first {
            0 => f.write_str(what),
            first => write!(f, "{what} {first}"),
        };
        match self {
            Command::Nothing => Ok(()),
            Command::Hello => f.write_str("HELLO"),
            Command::Help => f.write_str("HELP"),
            Command::Done => f.write_str("DONE"),
            Command::Links(first) => from(f, "LINKS?", *first),
            Command::Routes(first) => from(f, "ROUTES?", *first),
            Command::Interfaces(first) => from(f, "INTERFACES?", *first),
            Command::Stats(first) => from(f, "STATS?", *first),
            Command::AddLink { remote, transport, keys } => {
                write!(f, "LINK ADD {} {} {transport}{keys}", remote.ip(), remote.port())
            }
            Command::DeleteLink(index) => write!(f, "LINK DEL {index}"),
            Command::AddRoute(route) => write!(f, "ROUTE ADD {route}"),
            Command::DeleteRoute(index) => write!(f, "ROUTE DEL {index}"),
            Command::MoveRoutes { dst, to, network } => {
                write!(f, "ROUTE MOVE {dst} {to}")?;
                network.map_or(Ok(()), |network| write!(f, " network={network}"))
            }
            Command::AddInterface { name, kind, keys } => write!(f, "INTERFACE ADD {name} {kind}{keys}"),
            Command::DeleteInterface(index) => write!(f, "INTERFACE DEL {index}"),
        }
    }
}

#[cfg(test)]
#[path = "language_tests.rs"]
pub(super) mod tests;
