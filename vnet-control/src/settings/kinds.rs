//! Types of keys: parsers of single values with their error messages, and conversion to JSON.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value as Json;
use strum::VariantNames;
use vnet::dispatch::mode::Mode;
use vnet::dispatch::yielding::Strategy;
use vnet::frame::NetworkId;
use vnet::interface::interrupts::Interrupts;
use vnet::interface::pair::Pair;
use vnet::interface::tap::{DEVICE_NAME_MAX, Netns};
use vnet::link::{Encapsulation, SourceMatch, ZeroCopy};
use vnet::route::Qualifier;
use vnet::wire::ethernet::Mac;

use super::key::{Key, Takes};
use crate::desired::{
    Account, FileMode, KernelPath, NAME_MAX, Prefix, RouteSource, SOCKET_PATH_MAX, Target, Topology, is_name,
};
use crate::table::{Entry, Placed, Reader, Value, quote};

/// The largest network number (24 bits).
pub(crate) const NETWORK_MAX: u32 = (1 << 24) - 1;

/// The type of a key's value, and its parser.
pub(crate) struct Kind<T> {
    pub takes: Takes,
    pub read: fn(&mut Reader<'_>, &Key) -> Option<T>,
}

impl<T> Kind<T> {
    pub const fn new(takes: Takes, read: fn(&mut Reader<'_>, &Key) -> Option<T>) -> Kind<T> {
        Kind { takes, read }
    }
}

/// A whole number within limits.
pub(crate) const fn number<T: TryFrom<u32>>(least: u32, most: u32) -> Kind<T> {
    Kind::new(Takes::Number(least, most), |reader, key| {
        let Takes::Number(least, most) = key.takes else { return None };
        reader.number(key.name, least, most).and_then(|number| number.try_into().ok())
    })
}

/// A list of whole numbers within limits.
pub(crate) const fn numbers<T: TryFrom<u32>>(least: u32, most: u32) -> Kind<Vec<T>> {
    Kind::new(Takes::Numbers(least, most), |reader, key| {
        let Takes::Numbers(least, most) = key.takes else { return None };
        let (_, numbers) = reader.numbers(key.name, least, most)?;
        Some(numbers.into_iter().filter_map(|number| number.try_into().ok()).collect())
    })
}

/// A boolean.
pub(crate) const fn flag() -> Kind<bool> {
    Kind::new(Takes::Flag, |reader, key| reader.flag(key.name).map(|(_, flag)| flag))
}

/// Any text.
pub(crate) const fn text(name: &'static str) -> Kind<String> {
    Kind::new(Takes::Text(name), |reader, key| reader.text(key.name).map(|(_, text)| text))
}

/// A variant of an enum, by name.
pub(crate) const fn word<T: FromStr + VariantNames>() -> Kind<T> {
    Kind::new(Takes::Words(T::VARIANTS), |reader, key| {
        let (place, text) = reader.text(key.name)?;
        let value = text.parse().ok();
        if value.is_none() {
            let words: Vec<_> = T::VARIANTS.iter().map(|word| format!("'{word}'")).collect();
            let known = words.join(" or ");
            reader.problem(&place, format!("{} {} is not known; use {known}", key.name, quote(&text)));
        }
        value
    })
}

/// A text, parsed by `T::from_str`, whose error becomes the message.
pub(crate) const fn parsed<T: FromStr<Err: Display>>(name: &'static str) -> Kind<T> {
    Kind::new(Takes::Text(name), |reader, key| reader.parsed(key.name).map(|(_, value)| value))
}

/// Default limit of a list's length.
const LISTED_MAX: usize = 4096;

/// A list of texts, parsed by `T::from_str`, whose errors become the messages; `example` completes them with advice.
pub(crate) fn list<T: FromStr<Err: Display>>(
    reader: &mut Reader<'_>,
    key: &Key,
    example: &str,
) -> Option<Vec<T>> {
    let name = key.name;
    let Entry { place, value } = reader.take(name)?;
    let Value::List(entries) = value else {
        reader.problem(&place, format!("'{name}' must be a list of texts; write {name} = [\"{example}\"]"));
        return None;
    };
    if entries.len() > LISTED_MAX {
        reader.problem(&place, format!("{name} lists more than {LISTED_MAX}, the limit"));
    }
    let mut values = vec![];
    for entry in entries {
        match &entry.value {
            Value::Text(text) => match text.parse() {
                Ok(value) => values.push(value),
                Err(error) => reader.problem(&entry.place, format!("{name}: {error}")),
            },
            _ => reader.problem(&entry.place, format!("{name} takes texts; write {name} = [\"{example}\"]")),
        }
    }
    Some(values)
}

/// The name of a host, an interface or a link.
pub(crate) const fn name() -> Kind<String> {
    Kind::new(Takes::Text("NAME"), |reader, key| {
        let (place, name) = reader.text(key.name)?;
        if is_name(&name) {
            return Some(name);
        }
        let text = format!(
            "name {} cannot be used; take 1 to {NAME_MAX} letters, digits, '.', '_' or '-', not beginning with '.' or '-'",
            quote(&name)
        );
        reader.problem(&place, text);
        None
    })
}

/// A network's number.
pub(crate) const fn network() -> Kind<NetworkId> {
    Kind::new(Takes::Number(0, NETWORK_MAX), |reader, key| {
        let entry = reader.take(key.name)?;
        let id = match entry.value {
            Value::Integer(id) => u32::try_from(id).ok().and_then(NetworkId::new),
            _ => None,
        };
        if id.is_none() {
            let text = format!("{} must be a whole number from 0 to {NETWORK_MAX}", key.name);
            reader.problem(&entry.place, text);
        }
        id
    })
}

/// Networks, sorted, without duplicates.
pub(crate) const fn networks() -> Kind<Vec<NetworkId>> {
    Kind::new(Takes::Numbers(0, NETWORK_MAX), |reader, key| {
        let (_, ids) = reader.numbers(key.name, 0, NETWORK_MAX)?;
        let mut ids: Vec<_> = ids.into_iter().filter_map(NetworkId::new).collect();
        ids.sort();
        ids.dedup();
        Some(ids)
    })
}

/// An address with a port.
pub(crate) const fn address() -> Kind<SocketAddr> {
    Kind::new(Takes::Text("ADDRESS:PORT"), |reader, key| {
        let text = reader.text(key.name)?;
        socket_address(reader, key.name, text)
    })
}

pub(crate) fn socket_address(
    reader: &mut Reader<'_>,
    key: &str,
    (place, text): Placed<String>,
) -> Option<SocketAddr> {
    let Ok(address) = text.parse::<SocketAddr>() else {
        let text = format!(
            "{key} {} is not an address with a port; write 10.0.0.2:9000 or [fd00::2]:9000",
            quote(&text)
        );
        reader.problem(&place, text);
        return None;
    };
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

/// A unicast MAC address.
pub(crate) const fn mac() -> Kind<Mac> {
    Kind::new(Takes::Text("MAC"), |reader, key| {
        let (place, mac) = reader.parsed::<Mac>(key.name)?;
        if mac.is_unicast() {
            return Some(mac);
        }
        let text =
            format!("{}: {mac} is not a unicast address; take one such as 52:54:00:12:34:56", key.name);
        reader.problem(&place, text);
        None
    })
}

/// A file, by its absolute path.
pub(crate) const fn file() -> Kind<PathBuf> {
    Kind::new(Takes::Text("PATH"), |reader, key| {
        let (place, path) = reader.text(key.name)?;
        if path.starts_with('/') && !path.contains('\0') {
            return Some(path.into());
        }
        let text = format!("{} {} is not an absolute path; begin it with '/'", key.name, quote(&path));
        reader.problem(&place, text);
        None
    })
}

/// A Unix socket, by its absolute path.
pub(crate) const fn socket() -> Kind<PathBuf> {
    Kind::new(Takes::Text("PATH"), |reader, key| {
        let (place, path) = reader.text(key.name)?;
        let why = if !path.starts_with('/') {
            "is not an absolute path; begin it with '/'".into()
        } else if path.contains('\0') || path.ends_with('/') {
            "names no file".into()
        } else if path.len() > SOCKET_PATH_MAX {
            format!("is longer than {SOCKET_PATH_MAX} bytes, the kernel's limit; choose a shorter one")
        } else {
            return Some(path.into());
        };
        reader.problem(&place, format!("{} {} {why}", key.name, quote(&path)));
        None
    })
}

/// A network device's name.
pub(crate) const fn device() -> Kind<String> {
    Kind::new(Takes::Text("DEVICE"), |reader, key| {
        let (place, name) = reader.text(key.name)?;
        // Rules of the kernel's dev_valid_name(); '%' is refused too, because the kernel would expand it.
        let bad = |c: char| c == '/' || c == ':' || c == '%' || c.is_whitespace() || c.is_control();
        let dots = name == "." || name == "..";
        if !name.is_empty() && name.len() <= DEVICE_NAME_MAX && !dots && !name.contains(bad) {
            return Some(name);
        }
        let text = format!(
            "device {} cannot be a device's name; take 1 to {DEVICE_NAME_MAX} bytes without space, '/', ':' or '%'",
            quote(&name)
        );
        reader.problem(&place, text);
        None
    })
}

/// Conversion to JSON for answers and plans.
pub(crate) trait Show {
    /// `None` if there is nothing to display.
    fn show(&self) -> Option<Json>;
}

macro_rules! show {
    ($($type:ty),* => $value:ident: $json:expr) => {
        $(impl Show for $type {
            fn show(&self) -> Option<Json> {
                let $value = self;
                Some($json)
            }
        })*
    };
}

show!(bool, u16, u32, u64, usize => value: Json::from(*value));
show!(String => value: Json::from(value.clone()));
show!(NetworkId => value: Json::from(value.get()));
show!(PathBuf => value: Json::from(value.display().to_string()));
show!(
    Mac, IpAddr, Ipv4Addr, SocketAddr, Netns, Qualifier, RouteSource, Target, Topology, Mode, Strategy, Interrupts,
    Encapsulation, SourceMatch, ZeroCopy, Prefix, KernelPath, Pair, Account, FileMode => value: Json::from(value.to_string())
);

impl<T: Show> Show for Option<T> {
    fn show(&self) -> Option<Json> {
        self.as_ref().and_then(T::show)
    }
}

impl<T: Show> Show for Vec<T> {
    fn show(&self) -> Option<Json> {
        let values: Vec<_> = self.iter().filter_map(T::show).collect();
        (!values.is_empty()).then(|| values.into())
    }
}
