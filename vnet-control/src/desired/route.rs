//! Routing rules, and references to interfaces and links.

use std::fmt;
use std::str::FromStr;

use vnet::frame::NetworkId;
use vnet::route::Qualifier;

use crate::table::quote;

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RouteSpec {
    /// Network of matching frames.
    pub network: NetworkId,
    /// Source addresses of matching frames.
    pub src: Qualifier,
    /// Destination addresses of matching frames.
    pub dst: Qualifier,
    /// Where matching frames enter the core.
    pub from: RouteSource,
    /// Where matching frames go.
    pub to: Target,
}

impl RouteSpec {
    /// True if the rule refers to `target`.
    pub fn names(&self, target: &Target) -> bool {
        self.to == *target || matches!(&self.from, RouteSource::One(from) if from == target)
    }
}

/// Where frames that match a rule enter the core.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RouteSource {
    /// Any interface or link.
    Any,
    /// Any interface.
    AnyInterface,
    /// Any link.
    AnyLink,
    /// The given interface or link.
    One(Target),
}

/// An interface or a link, by its name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Target {
    /// `interface NAME`
    Interface(String),
    /// `link NAME`
    Link(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Interface(name) => write!(f, "interface {name}"),
            Target::Link(name) => write!(f, "link {name}"),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Target, String> {
        let words: Vec<_> = text.split_whitespace().collect();
        match words[..] {
            ["interface", name] => Ok(Target::Interface(name.into())),
            ["link", name] => Ok(Target::Link(name.into())),
            _ => Err(format!(
                "{} is not a destination for frames; write interface NAME or link NAME",
                quote(text)
            )),
        }
    }
}

impl fmt::Display for RouteSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RouteSource::Any => f.write_str("any"),
            RouteSource::AnyInterface => f.write_str("interface"),
            RouteSource::AnyLink => f.write_str("link"),
            RouteSource::One(target) => target.fmt(f),
        }
    }
}

impl FromStr for RouteSource {
    type Err = String;

    fn from_str(text: &str) -> Result<RouteSource, String> {
        match text.trim() {
            "any" => Ok(RouteSource::Any),
            "interface" => Ok(RouteSource::AnyInterface),
            "link" => Ok(RouteSource::AnyLink),
            _ => text.parse().map(RouteSource::One).map_err(|_| {
                format!(
                    "{} is not a source of frames; write any, interface, link, interface NAME or link NAME",
                    quote(text)
                )
            }),
        }
    }
}
