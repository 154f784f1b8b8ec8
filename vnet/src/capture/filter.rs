//! The filter language: which frames a capture is about. A small part of tcpdump's, with the same words and precedence.
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
//! A text is read once into a list of steps for a machine with one stack of truth values, so that matching neither recurses
//! nor allocates. What a frame does not have (the ports of a later fragment, say) does not match.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use super::packet::{self, Inside, Packet};
use crate::frame::NetworkId;
use crate::wire::ethernet::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, Mac};

/// Longest expression in bytes.
pub const EXPRESSION_MAX: usize = 4096;
/// Most steps, and so the most that one frame costs.
const STEPS_MAX: usize = 256;
/// Deepest nesting of parentheses and `not`.
const DEPTH_MAX: usize = 32;

/// Why a text is no filter.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FilterError {
    /// Longer than [`EXPRESSION_MAX`].
    #[error("the filter is longer than {EXPRESSION_MAX} bytes; shorten it")]
    TooLong,
    /// More parts than are worth it.
    #[error("the filter has too many parts or is nested too deeply; simplify it")]
    TooMuch,
    /// Something else stands where a part was expected.
    #[error("filter: '{found}' is not {wanted}")]
    Unexpected {
        /// What stands there; "the end" when nothing does.
        found: String,
        /// What could have stood there.
        wanted: &'static str,
    },
}

/// Which of two ends a primitive is about.
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
    Net(End, IpAddr, u8),
    Port(Option<u8>, End, u16, u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Test(Test),
    Not,
    And,
    Or,
}

/// A frame, as far as filters look at it.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Its first bytes.
    pub head: &'a [u8],
    /// All of its bytes, counted.
    pub len: usize,
    /// Its network.
    pub network: NetworkId,
    /// It enters the core here, rather than leaving it.
    pub inbound: bool,
}

/// Which frames a capture is about. The empty text is all frames.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// In reverse Polish order; empty for all frames.
    steps: Vec<Step>,
}

impl Filter {
    /// Whether a frame is among them.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        if self.steps.is_empty() {
            return true;
        }
        let Some(packet) = Packet::new(subject.head) else { return false };
        // One bit each, the top one lowest. The parser bounds the depth at far below 64 (`Reader::push`).
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
            Test::Net(end, net, bits) => {
                packet.hosts().is_some_and(|hosts| end.test(hosts, |found| within(found, net, bits)))
            }
            Test::Port(protocol, end, first, last) => {
                let right = match (protocol, packet.inside) {
                    (Some(wanted), Inside::Ip { protocol, .. }) => wanted == protocol,
                    _ => true,
                };
                right
                    && packet
                        .ports()
                        .is_some_and(|ports| end.test(ports, |port| (first..=last).contains(&port)))
            }
        }
    }
}

/// Whether the first `bits` bits of both addresses are the same.
fn within(address: IpAddr, net: IpAddr, bits: u8) -> bool {
    let differ = |a: u128, b: u128, width: u8| (a ^ b).checked_shr(u32::from(width - bits)).unwrap_or(0);
    match (address, net) {
        (IpAddr::V4(a), IpAddr::V4(b)) => differ(u128::from(a.to_bits()), u128::from(b.to_bits()), 32) == 0,
        (IpAddr::V6(a), IpAddr::V6(b)) => differ(a.to_bits(), b.to_bits(), 128) == 0,
        _ => false,
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
            Test::Net(end, net, bits) if bits == width(net) => write!(f, "{end}host {net}"),
            Test::Net(end, net, bits) => write!(f, "{end}net {net}/{bits}"),
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
        packet::TCP => "tcp",
        packet::UDP => "udp",
        packet::ICMP => "icmp",
        _ => "icmp6",
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl fmt::Display for Filter {
    /// The expression, with the parentheses that it needs: nested no deeper than it was written.
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
        let mut reader = Reader { words: words(text), at: 0, steps: vec![], depth: 0 };
        if !reader.words.is_empty() {
            reader.expression()?;
        }
        match reader.peek() {
            None => Ok(Filter { steps: reader.steps }),
            Some(_) => Err(reader.unexpected("'and', 'or' or the end")),
        }
    }
}

/// Splits at white space; parentheses and `!` stand for themselves.
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

struct Reader<'a> {
    words: Vec<&'a str>,
    at: usize,
    steps: Vec<Step>,
    depth: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.at).copied()
    }

    /// Takes the next word if it is one of these.
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

    /// Takes the next word as a value.
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

    /// Adds a step. Operators follow their operands at once, so that the stack of [`Filter::matches`] holds one value for each
    /// level of nesting and operator that waits: at most `2 * DEPTH_MAX - 1`, which 64 bits have room for.
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
            "icmp" => Test::Protocol(packet::ICMP),
            "icmp6" => Test::Protocol(packet::ICMPV6),
            "tcp" => return self.transport(packet::TCP),
            "udp" => return self.transport(packet::UDP),
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

    /// Behind `tcp` or `udp`: ports, or nothing.
    fn transport(&mut self, protocol: u8) -> Result<Test, FilterError> {
        let before = self.at;
        let end = self.end();
        if self.peek() == Some("port") {
            return self.ended(Some(protocol), end);
        }
        self.at = before;
        Ok(Test::Protocol(protocol))
    }

    /// What may follow `src` and `dst`.
    fn ended(&mut self, protocol: Option<u8>, end: End) -> Result<Test, FilterError> {
        if protocol.is_none() && self.accept(&["host"]) {
            let address: IpAddr = self.value("an IP address", |word| word.parse().ok())?;
            return Ok(Test::Net(end, address, width(address)));
        }
        if protocol.is_none() && self.accept(&["net"]) {
            let net = |word: &str| {
                let (address, bits) = word.split_once('/')?;
                let (address, bits): (IpAddr, u8) = (address.parse().ok()?, bits.parse().ok()?);
                (bits <= width(address)).then_some((address, bits))
            };
            let (address, bits) = self.value("a network such as 10.0.0.0/8", net)?;
            return Ok(Test::Net(end, address, bits));
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
