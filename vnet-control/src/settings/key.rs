//! Declarations of keys, and what is derived from them: reading, showing, comparing, help.

use std::fmt::Write;

use serde_json::{Map, Value as Json};

use crate::table::{Problem, Reader};

/// The type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A text; holds the placeholder on the command line.
    Text(&'static str),
    /// A whole number within limits, both included.
    Number(u32, u32),
    /// True or false.
    Flag,
    /// One of these words.
    Words(&'static [&'static str]),
    /// A list of texts; holds the placeholder on the command line.
    Texts(&'static str),
    /// A list of whole numbers within limits.
    Numbers(u32, u32),
}

/// How a change of a key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applies {
    /// At once, on reload or by `vnet interface set`.
    Live,
    /// At once, on reload.
    Reload,
    /// The interface or link is closed and reopened.
    Reopen,
    /// Only after a restart of vnetd.
    Restart,
}

/// One key of the configuration: its only declaration.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Its name in the file, in JSON, and with `-` for `_` on the command line.
    pub name: &'static str,
    /// Type of its value.
    pub takes: Takes,
    /// Its purpose, in one sentence.
    pub help: &'static str,
    /// Markdown that only the documentation adds.
    pub note: &'static str,
    /// The unit of a number.
    pub unit: &'static str,
    /// Mandatory key: example for the error when it is missing.
    pub needed: Option<&'static str>,
    /// Behaviour when absent, if no value of the key means the same.
    pub absent: &'static str,
    /// Kinds of interfaces, or encapsulations of links, that it applies to; all when empty.
    pub only_for: &'static [&'static str],
    /// A kind that accepts but ignores it, and why.
    pub idle_for: Option<(&'static str, &'static str)>,
    /// How a change takes effect; the table's default when absent.
    pub applies: Option<Applies>,
    /// How a plan shows it: `{}` is the value, `{#}` the number of values; empty hides it.
    pub phrase: Option<&'static str>,
    /// How a plan shows a flag that is off.
    pub phrase_off: &'static str,
    /// Shown by plans even at its default.
    pub always: bool,
    /// Keys that the command line requires with it.
    pub requires: &'static [&'static str],
    /// A key that the command line refuses with it.
    pub conflicts: Option<&'static str>,
    /// The command line requires this key unless that one is given.
    pub unless: Option<&'static str>,
}

impl Key {
    /// An optional key with default attributes.
    pub const fn new(name: &'static str, takes: Takes, help: &'static str) -> Key {
        Key {
            name,
            takes,
            help,
            note: "",
            unit: "",
            needed: None,
            absent: "",
            only_for: &[],
            idle_for: None,
            applies: None,
            phrase: None,
            phrase_off: "",
            always: false,
            requires: &[],
            conflicts: None,
            unless: None,
        }
    }

    fn is_for(&self, kind: Option<&str>) -> bool {
        self.only_for.is_empty() || kind.is_some_and(|kind| self.only_for.contains(&kind))
    }

    /// Its help, prefixed with the kinds that it applies to: `tap, local: …`.
    pub fn about(&self) -> String {
        let kinds = self.only_for.join(", ");
        if kinds.is_empty() { self.help.into() } else { format!("{kinds}: {}", self.help) }
    }

    /// The limits of a number with its unit, `68 to 65535 bytes`; only the unit without an upper limit.
    pub fn limits(&self) -> String {
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        match self.takes {
            Takes::Number(least, most) if most < i32::MAX as u32 => format!("{least} to {most}{unit}"),
            Takes::Number(..) => unit.trim_start().into(),
            _ => String::new(),
        }
    }
}

/// A key bound to a member of `S`.
pub(crate) struct Field<S> {
    pub key: Key,
    /// Reads the key from a table into `S`; true when it was present and valid.
    pub read: fn(&mut Reader<'_>, &Key, &mut S) -> bool,
    /// The value as JSON; `None` when there is none.
    pub show: fn(&S) -> Option<Json>,
    /// The value in a saved file, where it differs from what is shown: a secret, or a text that is no value of the key.
    pub save: Option<fn(&S) -> Option<Json>>,
}

/// Setters for the attributes that differ from the defaults.
impl<S> Field<S> {
    pub const fn needed(mut self, example: &'static str) -> Self {
        self.key.needed = Some(example);
        self
    }
    pub const fn absent(mut self, words: &'static str) -> Self {
        self.key.absent = words;
        self
    }
    pub const fn unit(mut self, unit: &'static str) -> Self {
        self.key.unit = unit;
        self
    }
    pub const fn note(mut self, note: &'static str) -> Self {
        self.key.note = note;
        self
    }
    pub const fn only_for(mut self, kinds: &'static [&'static str]) -> Self {
        self.key.only_for = kinds;
        self
    }
    pub const fn idle_for(mut self, kind: &'static str, why: &'static str) -> Self {
        self.key.idle_for = Some((kind, why));
        self
    }
    pub const fn applies(mut self, applies: Applies) -> Self {
        self.key.applies = Some(applies);
        self
    }
    pub const fn live(self) -> Self {
        self.applies(Applies::Live)
    }
    pub const fn phrase(mut self, phrase: &'static str) -> Self {
        self.key.phrase = Some(phrase);
        self
    }
    pub const fn phrase_off(mut self, phrase: &'static str) -> Self {
        self.key.phrase_off = phrase;
        self
    }
    pub const fn always(mut self) -> Self {
        self.key.always = true;
        self
    }
    pub const fn requires(mut self, keys: &'static [&'static str]) -> Self {
        self.key.requires = keys;
        self
    }
    pub const fn conflicts(mut self, key: &'static str) -> Self {
        self.key.conflicts = Some(key);
        self
    }
    pub const fn unless(mut self, key: &'static str) -> Self {
        self.key.unless = Some(key);
        self
    }
    pub const fn save(mut self, save: fn(&S) -> Option<Json>) -> Self {
        self.save = Some(save);
        self
    }
}

/// Declares a key: name, type (a `Kind` of `kinds.rs`), member, and help. A member of one enum variant is
/// written `|spec: Spec| enum, pattern => value`.
macro_rules! field {
    ($name:literal, $kind:expr, |$spec:ident: $type:ty| $place:expr, $help:literal) => {
        $crate::settings::key::Field::<$type> {
            key: $crate::settings::key::Key::new($name, $kind.takes, $help),
            read: |reader, key, $spec| match ($kind.read)(reader, key) {
                Some(value) => {
                    $place = value.into();
                    true
                }
                None => false,
            },
            show: |$spec| $crate::settings::kinds::Show::show(&$place),
            save: None,
        }
    };
    ($name:literal, $kind:expr, |$spec:ident: $type:ty| $of:expr, $variant:pat => $value:ident, $help:literal) => {
        $crate::settings::key::Field::<$type> {
            key: $crate::settings::key::Key::new($name, $kind.takes, $help),
            read: |reader, key, $spec| match (($kind.read)(reader, key), &mut $of) {
                (Some(value), $variant) => {
                    *$value = value.into();
                    true
                }
                _ => false,
            },
            show: |$spec| match &$of {
                $variant => $crate::settings::kinds::Show::show($value),
                #[allow(unreachable_patterns)]
                _ => None,
            },
            save: None,
        }
    };
}
pub(crate) use field;

/// The key that decides which other keys apply.
pub(crate) struct Selector<S> {
    /// Its name: `kind`, `encapsulation`.
    pub key: &'static str,
    /// Its current value.
    pub chosen: fn(&S) -> &'static str,
}

/// All keys of one table.
pub struct Declaration<S: 'static> {
    /// The table, as it is written: `[bridge]`, `[[link]]`.
    pub title: &'static str,
    pub(crate) applies: Applies,
    pub(crate) selector: Option<Selector<S>>,
    pub(crate) default: fn() -> S,
    pub(crate) fields: &'static [Field<S>],
}

/// A key with its default, for lists of keys. Declarations of one name for several kinds are merged.
#[derive(Clone, Debug)]
pub struct Described {
    /// The key.
    pub key: Key,
    /// Help by kind, with limits and unit.
    pub help: String,
    /// How a change takes effect.
    pub applies: Applies,
    /// Its default.
    pub default: Option<Json>,
}

/// A difference of one key.
pub(crate) struct Changed {
    pub key: Key,
    pub applies: Applies,
    pub from: String,
    pub to: String,
}

/// A value in words; lists without commas.
pub fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
        value => value.to_string(),
    }
}

impl<S> Declaration<S> {
    fn applies(&self, key: &Key) -> Applies {
        key.applies.unwrap_or(self.applies)
    }

    /// Reads all keys into `spec`; reports missing keys and keys of other kinds.
    pub(crate) fn read(&self, reader: &mut Reader<'_>, spec: &mut S) {
        let mut kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        for field in self.fields {
            let key = &field.key;
            if !key.is_for(kind) {
                self.refuse(reader, key, kind);
                continue;
            }
            if let Some(example) = key.needed {
                reader.require(key.name, example);
            }
            if let (Some((idle, why)), Some(kind)) = (key.idle_for, kind)
                && idle == kind
                && reader.given(key.name)
            {
                let place = reader.place_of(key.name);
                reader.hint(&place, format!("{} has no effect on kind {kind}: {why}", key.name));
            }
            let good = (field.read)(reader, key, spec);
            if let Some(selector) = self.selector.as_ref().filter(|selector| selector.key == key.name) {
                // Without a valid kind, do not judge keys by kind.
                let known = good || key.needed.is_none();
                kind = known.then(|| (selector.chosen)(spec));
            }
        }
    }

    /// Reports a key that does not apply to `kind`, unless another declaration of its name does.
    fn refuse(&self, reader: &mut Reader<'_>, key: &Key, kind: Option<&str>) {
        let mut same = self.fields.iter().map(|field| &field.key).filter(|other| other.name == key.name);
        if kind.is_some() && same.clone().any(|other| other.is_for(kind)) {
            return;
        }
        let (Some(entry), Some(_), Some(selector)) = (reader.take(key.name), kind, &self.selector) else {
            return;
        };
        let kinds: Vec<_> = same.by_ref().flat_map(|key| key.only_for).copied().collect();
        let text =
            format!("'{}' applies to {} {} only; remove it", key.name, selector.key, kinds.join(" and "));
        reader.problem(&entry.place, text);
    }

    /// Reads only the keys that apply to an open interface.
    pub(crate) fn read_live(&self, reader: &mut Reader<'_>, spec: &mut S) {
        for field in self.fields.iter().filter(|field| self.applies(&field.key) == Applies::Live) {
            (field.read)(reader, &field.key, spec);
        }
    }

    /// The keys with their defaults; one entry per name.
    pub fn described(&self) -> Vec<Described> {
        let default = (self.default)();
        let mut all: Vec<Described> = vec![];
        for Field { key, show, .. } in self.fields {
            let limits = key.limits();
            let comma = if limits.is_empty() { "" } else { "; " };
            let help = format!("{}{comma}{limits}", key.about());
            match all.iter_mut().find(|described| described.key.name == key.name) {
                Some(same) => {
                    same.help += &format!("; {help}");
                    if let (Takes::Number(least, most), Takes::Number(low, high)) =
                        (same.key.takes, key.takes)
                    {
                        same.key.takes = Takes::Number(least.min(low), most.max(high));
                    }
                }
                None => all.push(Described {
                    key: *key,
                    help,
                    applies: self.applies(key),
                    default: show(&default),
                }),
            }
        }
        all
    }

    /// All values of `spec` as JSON.
    pub(crate) fn show(&self, spec: &S) -> Map<String, Json> {
        let kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        let here = self.fields.iter().filter(|field| field.key.is_for(kind));
        here.filter_map(|field| Some((field.key.name.to_string(), (field.show)(spec)?))).collect()
    }

    /// The keys that a file needs to describe `spec`: those without a default, and those that differ from it.
    pub(crate) fn written(&self, spec: &S) -> Vec<(&'static str, Json)> {
        let default = (self.default)();
        let kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        let here = self.fields.iter().filter(|field| field.key.is_for(kind));
        let value = |field: &Field<S>| {
            let save = field.save.unwrap_or(field.show);
            let value = save(spec)?;
            let needed = field.key.needed.is_some() || save(&default).as_ref() != Some(&value);
            needed.then_some((field.key.name, value))
        };
        here.filter_map(value).collect()
    }

    /// The settings of `spec` that differ from the defaults (or are always shown), as text to append.
    pub(crate) fn phrases(&self, spec: &S) -> String {
        let (default, mut text) = ((self.default)(), String::new());
        let kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        for Field { key, show, .. } in self.fields.iter().filter(|field| field.key.is_for(kind)) {
            let Some(value) = show(spec) else { continue };
            let named = format!("{} {{}}", key.name);
            let phrase = match value {
                Json::Bool(false) => key.phrase_off,
                Json::Bool(true) => key.phrase.unwrap_or(key.name),
                _ => key.phrase.unwrap_or(&named),
            };
            if phrase.is_empty() || !key.always && Some(&value) == show(&default).as_ref() {
                continue;
            }
            let count = value.as_array().map_or(1, Vec::len).to_string();
            let phrase = phrase.replace("{#}", &count).replace("{}", &plain(&value));
            // A leading space continues the text before it, without a comma.
            let comma = if phrase.starts_with(' ') { "" } else { ", " };
            write!(text, "{comma}{phrase}").expect("a String takes all");
        }
        text
    }

    /// The keys in which two specs differ.
    pub(crate) fn changed(&self, is: &S, wanted: &S) -> Vec<Changed> {
        let words = |value: Option<&Json>, key: &Key| match value {
            Some(value) => plain(value),
            None if key.absent.is_empty() => "none".into(),
            None => key.absent.into(),
        };
        let changed = |field: &Field<S>| {
            let (from, to) = ((field.show)(is), (field.show)(wanted));
            let (key, applies) = (field.key, self.applies(&field.key));
            let words = |value: &Option<Json>| words(value.as_ref(), &key);
            (from != to).then(|| Changed { key, applies, from: words(&from), to: words(&to) })
        };
        self.fields.iter().filter_map(changed).collect()
    }

    /// Differences that need a restart of vnetd, one problem each.
    pub(crate) fn restarts(&self, is: &S, wanted: &S, place: &crate::table::Place) -> Vec<Problem> {
        let changed =
            self.changed(is, wanted).into_iter().filter(|change| change.applies == Applies::Restart);
        let text = |Changed { key, from, to, .. }: Changed| {
            format!(
                "{} {} changes from {from} to {to}, which takes a restart of vnetd; nothing was changed",
                self.title, key.name
            )
        };
        changed.map(|change| Problem::new(place, text(change))).collect()
    }
}
