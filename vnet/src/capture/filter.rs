//! The capture filter language: a small part of tcpdump's, with the same words and precedence.
//!
//! Implemented here rather than with libpcap: BPF can test neither an overlay network nor a frame's direction, and a filter
//! written by an untrusted user must cost a bounded number of steps per frame.
//!
//! ```text
//! expression = term { "or" term }            also: ||
//! term       = factor { "and" factor }       also: &&
//! factor     = "not" factor | "(" expression ")" | primitive          also: !
//! primitive  = "arp" | "ip" | "ip6" | "icmp" | "icmp6" | "tcp" | "udp"
//!            | "broadcast" | "multicast" | "inbound" | "outbound"
//!            | "vlan" [ID] | "network" ID | "less" BYTES | "greater" BYTES
//!            | "ether" ["src" | "dst"] ["host"] MAC | "ether" "proto" NUMBER
//!            | ["src" | "dst"] "host" ADDRESS | ["src" | "dst"] "net" ADDRESS/BITS
//!            | ["tcp" | "udp"] ["src" | "dst"] "port" PORT[-PORT]
//! ```
//!
//! The parser compiles an expression into steps for a stack machine of truth values, so matching neither recurses nor allocates.
//! A test of a field that the frame lacks (such as the ports of a later fragment) fails.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

use super::packet::Packet;
use crate::frame::NetworkId;
use crate::wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac};
use crate::wire::ip;

/// Maximum length of a filter expression in bytes.
pub const EXPRESSION_MAX: usize = 4096;
/// Maximum number of steps of one filter. It bounds the cost of a filter per frame.
const STEPS_MAX: usize = 256;
/// Maximum nesting depth of parentheses and `not`.
const DEPTH_MAX: usize = 32;

/// A syntax error in a filter expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// The expression is longer than [`EXPRESSION_MAX`].
    #[error("the filter is longer than {EXPRESSION_MAX} bytes; shorten it")]
    TooLong,
    /// The expression needs more than [`STEPS_MAX`] steps, or nests deeper than [`DEPTH_MAX`].
    #[error("the filter has too many parts or is nested too deeply; simplify it")]
    TooMuch,
    /// A word that the grammar does not allow here.
    #[error("filter: '{found}' is not {wanted}")]
    Unexpected {
        /// The word found, or "the end".
        found: String,
        /// What the grammar allows here.
        wanted: &'static str,
    },
}

/// The end of the frame's path that a primitive tests: source, destination or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Src,
    Dst,
    Either,
}

impl End {
    fn test<T: Copy>(self, (src, dst): (T, T), holds: impl Fn(T) -> bool) -> bool {
        match self {
            End::Src => holds(src),
            End::Dst => holds(dst),
            End::Either => holds(src) || holds(dst),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            End::Src => "src ",
            End::Dst => "dst ",
            End::Either => "",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    EtherType(u16),
    Protocol(u8),
    Broadcast,
    Multicast,
    Inbound(bool),
    Vlan(Option<u16>),
    Network(NetworkId),
    Less(u32),
    Greater(u32),
    Ether(End, Mac),
    Net(End, IpNet),
    Port(Option<u8>, End, u16, u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Test(Test),
    Not,
    And,
    Or,
}

/// The frame that a filter is matched against.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// First bytes of the frame.
    pub head: &'a [u8],
    /// Length of the whole frame in bytes.
    pub len: usize,
    /// Network of the frame.
    pub network: NetworkId,
    /// True when the frame enters the core here, false when it leaves.
    pub inbound: bool,
}

/// A compiled filter. The empty expression matches all frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Steps in reverse Polish order; empty matches all frames.
    steps: Vec<Step>,
}

impl Filter {
    /// True when the filter matches `subject`.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        if self.steps.is_empty() {
            return true;
        }
        let Some(packet) = Packet::new(subject.head) else { return false };
        // One bit per value; the top of the stack is the lowest bit. `Parser::push` keeps the depth far below 64.
        let mut stack = 0u64;
        for step in &self.steps {
            stack = match step {
                Step::Test(test) => stack << 1 | u64::from(test.holds(&packet, subject)),
                Step::Not => stack ^ 1,
                Step::And => stack >> 1 & (stack | !1),
                Step::Or => stack >> 1 | (stack & 1),
            };
        }
        stack & 1 != 0
    }
}

impl Test {
    fn holds(&self, packet: &Packet<'_>, subject: &Subject<'_>) -> bool {
        match *self {
            Test::EtherType(ethertype) => packet.ethertype == ethertype,
            Test::Protocol(protocol) => packet.protocol() == Some(protocol),
            Test::Broadcast => packet.dst == Mac::BROADCAST,
            Test::Multicast => packet.dst.is_multicast(),
            Test::Inbound(inbound) => subject.inbound == inbound,
            Test::Vlan(None) => packet.vlan.is_some(),
            Test::Vlan(vlan) => packet.vlan == vlan,
            Test::Network(network) => subject.network == network,
            Test::Less(bytes) => subject.len <= bytes as usize,
            Test::Greater(bytes) => subject.len >= bytes as usize,
            Test::Ether(end, mac) => end.test((packet.src, packet.dst), |found| found == mac),
            Test::Net(end, net) => {
                packet.hosts().is_some_and(|hosts| end.test(hosts, |found| net.contains(&found)))
            }
            Test::Port(protocol, end, first, last) => {
                protocol.is_none_or(|wanted| packet.protocol() == Some(wanted))
                    && packet
                        .ports()
                        .is_some_and(|ports| end.test(ports, |port| (first..=last).contains(&port)))
            }
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Test::EtherType(ETHERTYPE_ARP) => f.write_str("arp"),
            Test::EtherType(ETHERTYPE_IPV4) => f.write_str("ip"),
            Test::EtherType(ETHERTYPE_IPV6) => f.write_str("ip6"),
            Test::EtherType(other) => write!(f, "ether proto 0x{other:04x}"),
            Test::Protocol(protocol) => f.write_str(protocol_name(protocol)),
            Test::Broadcast => f.write_str("broadcast"),
            Test::Multicast => f.write_str("multicast"),
            Test::Inbound(true) => f.write_str("inbound"),
            Test::Inbound(false) => f.write_str("outbound"),
            Test::Vlan(None) => f.write_str("vlan"),
            Test::Vlan(Some(vlan)) => write!(f, "vlan {vlan}"),
            Test::Network(network) => write!(f, "network {network}"),
            Test::Less(bytes) => write!(f, "less {bytes}"),
            Test::Greater(bytes) => write!(f, "greater {bytes}"),
            Test::Ether(end, mac) => write!(f, "ether {end}host {mac}"),
            Test::Net(end, net) if net.prefix_len() == net.max_prefix_len() => {
                write!(f, "{end}host {}", net.addr())
            }
            Test::Net(end, net) => write!(f, "{end}net {net}"),
            Test::Port(protocol, end, first, last) => {
                if let Some(protocol) = protocol {
                    write!(f, "{} ", protocol_name(protocol))?;
                }
                write!(f, "{end}port {first}")?;
                if first == last { Ok(()) } else { write!(f, "-{last}") }
            }
        }
    }
}

fn protocol_name(protocol: u8) -> &'static str {
    match protocol {
        ip::TCP => "tcp",
        ip::UDP => "udp",
        ip::ICMP => "icmp",
        _ => "icmp6",
    }
}

impl fmt::Display for Filter {
    /// Writes the expression with as few parentheses as it needs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const OR: u8 = 0;
        const AND: u8 = 1;
        const FACTOR: u8 = 2;
        let mut stack: Vec<(String, u8)> = vec![];
        let bound = |(text, binding): (String, u8), least| {
            if binding < least { format!("({text})") } else { text }
        };
        for step in &self.steps {
            let mut pop = || stack.pop().unwrap_or_default();
            let part = match step {
                Step::Test(test) => (test.to_string(), FACTOR),
                Step::Not => (format!("not {}", bound(pop(), FACTOR)), FACTOR),
                Step::And => {
                    let (right, left) = (pop(), pop());
                    (format!("{} and {}", bound(left, AND), bound(right, FACTOR)), AND)
                }
                Step::Or => {
                    let (right, left) = (pop(), pop());
                    (format!("{} or {}", bound(left, OR), bound(right, AND)), OR)
                }
            };
            stack.push(part);
        }
        f.write_str(&stack.pop().unwrap_or_default().0)
    }
}

impl FromStr for Filter {
    type Err = FilterError;

    fn from_str(text: &str) -> Result<Filter, FilterError> {
        if text.len() > EXPRESSION_MAX {
            return Err(FilterError::TooLong);
        }
        let mut parser = Parser { words: words(text), at: 0, steps: vec![], depth: 0 };
        if !parser.words.is_empty() {
            parser.expression()?;
        }
        match parser.peek() {
            None => Ok(Filter { steps: parser.steps }),
            Some(_) => Err(parser.unexpected("'and', 'or' or the end")),
        }
    }
}

/// Splits at white space; each parenthesis and each `!` is a separate word.
fn words(text: &str) -> Vec<&str> {
    let mut words = vec![];
    for mut word in text.split_whitespace() {
        while let Some(first) = word.find(['(', ')', '!']) {
            words.extend((first > 0).then(|| &word[..first]));
            words.push(&word[first..=first]);
            word = &word[first + 1..];
        }
        words.extend((!word.is_empty()).then_some(word));
    }
    words
}

struct Parser<'a> {
    words: Vec<&'a str>,
    at: usize,
    steps: Vec<Step>,
    depth: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).copied()
    }

    /// Consumes the next word if it is one of `words`.
    fn accept(&mut self, words: &[&str]) -> bool {
        let found = self.peek().is_some_and(|word| words.contains(&word));
        self.at += usize::from(found);
        found
    }

    fn unexpected(&self, wanted: &'static str) -> FilterError {
        let found = self.peek().unwrap_or("the end");
        let found = found.chars().filter(|c| !c.is_control()).take(64).collect();
        FilterError::Unexpected { found, wanted }
    }

    /// Consumes the next word as a value.
    fn value<T>(
        &mut self,
        wanted: &'static str,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, FilterError> {
        match self.peek().and_then(read) {
            Some(value) => {
                self.at += 1;
                Ok(value)
            }
            None => Err(self.unexpected(wanted)),
        }
    }

    /// Adds a step. An operator directly follows its operands, so the stack of [`Filter::matches`] holds one value for each
    /// level of nesting and each pending operator: at most `2 * DEPTH_MAX - 1`, which fits 64 bits.
    fn push(&mut self, step: Step) -> Result<(), FilterError> {
        if self.steps.len() == STEPS_MAX {
            return Err(FilterError::TooMuch);
        }
        self.steps.push(step);
        Ok(())
    }

    fn expression(&mut self) -> Result<(), FilterError> {
        self.term()?;
        while self.accept(&["or", "||"]) {
            self.term()?;
            self.push(Step::Or)?;
        }
        Ok(())
    }

    fn term(&mut self) -> Result<(), FilterError> {
        self.factor()?;
        while self.accept(&["and", "&&"]) {
            self.factor()?;
            self.push(Step::And)?;
        }
        Ok(())
    }

    fn factor(&mut self) -> Result<(), FilterError> {
        self.depth += 1;
        if self.depth >= DEPTH_MAX {
            return Err(FilterError::TooMuch);
        }
        if self.accept(&["not", "!"]) {
            self.factor()?;
            self.push(Step::Not)?;
        } else if self.accept(&["("]) {
            self.expression()?;
            if !self.accept(&[")"]) {
                return Err(self.unexpected("')'"));
            }
        } else {
            let test = self.primitive()?;
            self.push(Step::Test(test))?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn primitive(&mut self) -> Result<Test, FilterError> {
        const WANTED: &str = "a primitive such as arp, ip, tcp, host ADDRESS, port N, ether host MAC";
        let end = self.end();
        if end != End::Either {
            return self.ended(None, end);
        }
        let word = self.peek().ok_or_else(|| self.unexpected(WANTED))?;
        if matches!(word, "host" | "net" | "port") {
            return self.ended(None, end);
        }
        self.at += 1;
        let test = match word {
            "arp" => Test::EtherType(ETHERTYPE_ARP),
            "ip" => Test::EtherType(ETHERTYPE_IPV4),
            "ip6" => Test::EtherType(ETHERTYPE_IPV6),
            "icmp" => Test::Protocol(ip::ICMP),
            "icmp6" => Test::Protocol(ip::ICMPV6),
            "tcp" => return self.transport(ip::TCP),
            "udp" => return self.transport(ip::UDP),
            "broadcast" => Test::Broadcast,
            "multicast" => Test::Multicast,
            "inbound" => Test::Inbound(true),
            "outbound" => Test::Inbound(false),
            "vlan" => match self.peek().and_then(|word| word.parse().ok()) {
                Some(vlan) if vlan < 4096 => {
                    self.at += 1;
                    Test::Vlan(Some(vlan))
                }
                Some(_) => return Err(self.unexpected("a VLAN id below 4096")),
                None => Test::Vlan(None),
            },
            "network" => {
                Test::Network(self.value("a network id", |word| word.parse().ok().and_then(NetworkId::new))?)
            }
            "less" => Test::Less(self.value("a number of bytes", |word| word.parse().ok())?),
            "greater" => Test::Greater(self.value("a number of bytes", |word| word.parse().ok())?),
            "ether" => return self.ether(),
            _ => {
                self.at -= 1;
                return Err(self.unexpected(WANTED));
            }
        };
        Ok(test)
    }

    fn end(&mut self) -> End {
        if self.accept(&["src"]) {
            End::Src
        } else if self.accept(&["dst"]) {
            End::Dst
        } else {
            End::Either
        }
    }

    fn ether(&mut self) -> Result<Test, FilterError> {
        if self.accept(&["proto"]) {
            let number = |word: &str| match word.strip_prefix("0x") {
                Some(digits) => u16::from_str_radix(digits, 16).ok(),
                None => word.parse().ok(),
            };
            return Ok(Test::EtherType(self.value("an EtherType such as 0x88b5", number)?));
        }
        let end = self.end();
        self.accept(&["host"]);
        Ok(Test::Ether(end, self.value("a MAC address", |word| word.parse().ok())?))
    }

    /// Parses what may follow `tcp` or `udp`: ports, or nothing.
    fn transport(&mut self, protocol: u8) -> Result<Test, FilterError> {
        let before = self.at;
        let end = self.end();
        if self.peek() == Some("port") {
            return self.ended(Some(protocol), end);
        }
        self.at = before;
        Ok(Test::Protocol(protocol))
    }

    /// Parses what may follow `src` and `dst`.
    fn ended(&mut self, protocol: Option<u8>, end: End) -> Result<Test, FilterError> {
        if protocol.is_none() && self.accept(&["host"]) {
            let address: IpAddr = self.value("an IP address", |word| word.parse().ok())?;
            return Ok(Test::Net(end, address.into()));
        }
        if protocol.is_none() && self.accept(&["net"]) {
            let net = self.value("a network such as 10.0.0.0/8", |word| word.parse().ok())?;
            return Ok(Test::Net(end, net));
        }
        if self.accept(&["port"]) {
            let range = |word: &str| {
                let (first, last) = word.split_once('-').unwrap_or((word, word));
                let (first, last) = (first.parse().ok()?, last.parse().ok()?);
                (first <= last).then_some((first, last))
            };
            let (first, last) = self.value("a port or a range of ports", range)?;
            return Ok(Test::Port(protocol, end, first, last));
        }
        Err(self.unexpected("'host', 'net' or 'port'"))
    }
}

#[cfg(test)]
#[path = "filter_tests.rs"]
mod tests;
