//! Markdown tables of keys, for docs/.

use std::fmt::Write;

use super::host::{BRIDGE, CONTROL, DISPATCH, HOST, IDENTITY, NETWORK};
use super::interface::INTERFACE;
use super::key::{Applies, Declaration, Key, Takes, plain};
use super::link::LINK;
use super::overlay::OVERLAY;
use super::route::ROUTE;

/// The tables of docs/configuration.md, in the order of a file.
pub const TABLES: [fn() -> String; 9] = [
    || document(&HOST),
    || document(&CONTROL),
    || document(&DISPATCH),
    || document(&BRIDGE),
    || document(&IDENTITY),
    || document(&NETWORK),
    || document(&INTERFACE),
    || document(&LINK),
    || document(&ROUTE),
];

/// The tables of docs/overlay.md.
pub const OVERLAY_TABLES: [fn() -> String; 1] = [|| document(&OVERLAY)];

/// A table of the keys of `declaration` in Markdown.
pub fn document<S>(declaration: &Declaration<S>) -> String {
    let mut text = format!(
        "### `{}`\n\n| key | meaning | default, limits | a change |\n|---|---|---|---|\n",
        declaration.title
    );
    let default = (declaration.default)();
    for field in declaration.fields {
        let key = &field.key;
        let mut about = key.about();
        if let Takes::Words(words) = key.takes {
            let words: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
            write!(about, ": {}", words.join(", ")).expect("a String takes all");
        }
        if !key.note.is_empty() {
            write!(about, "; {}", key.note).expect("a String takes all");
        }
        let applies = match key.applies.unwrap_or(declaration.applies) {
            Applies::Live => "at once; `set`",
            Applies::Reload => "at once",
            Applies::Reopen => "opens it again",
            Applies::Restart => "restart",
        };
        let (value, about) = (limits(key, (field.show)(&default).as_ref()), about.replace('|', "\\|"));
        writeln!(text, "| `{}` | {about} | {value} | {applies} |", key.name).expect("a String takes all");
    }
    text
}

fn limits(key: &Key, default: Option<&serde_json::Value>) -> String {
    let default = match default {
        _ if key.needed.is_some() => "needed".into(),
        Some(value) if !plain(value).is_empty() => format!("`{}`", plain(value)),
        _ if key.absent.is_empty() => String::new(),
        _ => key.absent.into(),
    };
    let parts = [default, key.limits()].into_iter().filter(|part| !part.is_empty());
    parts.collect::<Vec<_>>().join("; ")
}
