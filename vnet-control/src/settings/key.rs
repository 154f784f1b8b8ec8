//! Declarations of keys, and code derived from them: parsing, display, comparison, help.

use std::fmt::Write;

use serde_json::{Map, Value as Json};

use crate::table::{Problem, Reader};

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A text; the parameter is the placeholder on the command line.
    Text(&'static str),
    /// A whole number within limits, both inclusive.
    Number(u32, u32),
    /// True or false.
    Flag,
    /// One of the given words.
    Words(&'static [&'static str]),
    /// A list of texts; the parameter is the placeholder on the command line.
    Texts(&'static str),
    /// A list of whole numbers within limits.
    Numbers(u32, u32),
}

/// How a change of a key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applies {
    /// Applies at once, on reload or by `vnet interface set`.
    Live,
    /// Applies at once, on reload.
    Reload,
    /// Applies by closing and reopening the interface or link.
    Reopen,
    /// Applies only after a restart of vnetd.
    Restart,
}

/// One key of the configuration, and its only declaration.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// Name of the key in the file, in JSON, and with `-` for `_` on the command line.
    pub name: &'static str,
    /// Type of the key's value.
    pub takes: Takes,
    /// Purpose of the key, in one sentence.
    pub help: &'static str,
    /// Markdown that is added in the documentation only.
    pub note: &'static str,
    /// Unit of a number.
    pub unit: &'static str,
    /// Mandatory key: an example for the error if the key is missing.
    pub needed: Option<&'static str>,
    /// Behaviour if the key is absent, for keys whose default is not one of their values.
    pub absent: &'static str,
    /// Kinds of interfaces, or encapsulations of links, that have the key; all if empty.
    pub only_for: &'static [&'static str],
    /// A kind that accepts the key but ignores it, and the reason.
    pub idle_for: Option<(&'static str, &'static str)>,
    /// Kinds that refuse the key although their answers show it.
    pub not_for: &'static [&'static str],
    /// How a change takes effect; if absent, the table's default.
    pub applies: Option<Applies>,
    /// How a plan displays the key: `{}` is the value, `{#}` the number of values; empty hides it.
    pub phrase: Option<&'static str>,
    /// How a plan displays a flag that is off.
    pub phrase_off: &'static str,
    /// True if plans display the key even at its default.
    pub always: bool,
    /// Keys that the command line requires together with this key.
    pub requires: &'static [&'static str],
    /// A key that the command line refuses together with this key.
    pub conflicts: Option<&'static str>,
    /// A key that makes this one optional: the command line requires one of the two.
    pub unless: Option<&'static str>,
}

impl Key {
    /// An optional key; all other attributes have their defaults.
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
            not_for: &[],
            applies: None,
            phrase: None,
            phrase_off: "",
            always: false,
            requires: &[],
            conflicts: None,
            unless: None,
        }
    }

    /// True if a table of this kind may contain the key.
    fn may_be_given(&self, kind: Option<&str>) -> bool {
        self.is_for(kind) && !kind.is_some_and(|kind| self.not_for.contains(&kind))
    }

    fn is_for(&self, kind: Option<&str>) -> bool {
        self.only_for.is_empty() || kind.is_some_and(|kind| self.only_for.contains(&kind))
    }

    /// Help of the key, prefixed with the kinds that have it: `tap, local: …`.
    pub fn about(&self) -> String {
        let kinds = self.only_for.join(", ");
        if kinds.is_empty() { self.help.into() } else { format!("{kinds}: {}", self.help) }
    }

    /// The limits of a number with its unit, `68 to 65535 bytes`; only the unit if there is no upper limit.
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
    /// Reads the key from a table into `S`; true if the key was present and valid.
    pub read: fn(&mut Reader<'_>, &Key, &mut S) -> bool,
    /// The value as JSON; `None` if the key is not set.
    pub show: fn(&S) -> Option<Json>,
    /// The value in a saved file, if it differs from the displayed one: a secret, or a display text that the key does not accept.
    pub save: Option<fn(&S) -> Option<Json>>,
}

/// Setters for attributes that differ from their defaults.
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
    pub const fn not_for(mut self, kinds: &'static [&'static str]) -> Self {
        self.key.not_for = kinds;
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

/// The key that selects which other keys a table may have.
pub(crate) struct Selector<S> {
    /// Name of the key: `kind`, `encapsulation`.
    pub key: &'static str,
    /// The key's current value.
    pub chosen: fn(&S) -> &'static str,
}

/// All keys of one table.
pub struct Declaration<S: 'static> {
    /// The table's header as written: `[bridge]`, `[[link]]`.
    pub title: &'static str,
    pub(crate) applies: Applies,
    pub(crate) selector: Option<Selector<S>>,
    pub(crate) default: fn() -> S,
    pub(crate) fields: &'static [Field<S>],
}

/// A key with its default, for lists of keys. Declarations of the same name for several kinds are merged.
#[derive(Clone, Debug)]
pub struct Described {
    /// The key.
    pub key: Key,
    /// Help per kind, with limits and unit.
    pub help: String,
    /// How a change takes effect.
    pub applies: Applies,
    /// The key's default.
    pub default: Option<Json>,
}

/// A key whose value differs between two specs.
pub(crate) struct Changed {
    pub key: Key,
    pub applies: Applies,
    pub from: String,
    pub to: String,
}

/// A value as plain text; lists without commas.
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

    /// Reads all keys into `spec`; reports missing keys and keys that the table's kind does not have.
    pub(crate) fn read(&self, reader: &mut Reader<'_>, spec: &mut S) {
        let mut kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        for field in self.fields {
            let key = &field.key;
            if !key.may_be_given(kind) {
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
                // Without a valid kind, no key can be refused for its kind.
                let known = good || key.needed.is_none();
                kind = known.then(|| (selector.chosen)(spec));
            }
        }
    }

    /// Reports a key that `kind` does not have, unless another declaration of the same name applies.
    fn refuse(&self, reader: &mut Reader<'_>, key: &Key, kind: Option<&str>) {
        let mut same = self.fields.iter().map(|field| &field.key).filter(|other| other.name == key.name);
        if kind.is_some() && same.clone().any(|other| other.may_be_given(kind)) {
            return;
        }
        let (Some(entry), Some(_), Some(selector)) = (reader.take(key.name), kind, &self.selector) else {
            return;
        };
        let kinds: Vec<_> = same.by_ref().flat_map(|key| key.only_for).copied().collect();
        let text = match kind {
            Some(kind) if kinds.is_empty() => {
                format!("'{}' has no effect on {} {kind}; remove it", key.name, selector.key)
            }
            _ => {
                format!("'{}' applies to {} {} only; remove it", key.name, selector.key, kinds.join(" and "))
            }
        };
        reader.problem(&entry.place, text);
    }

    /// Reads only the keys that can be changed while an interface is open.
    pub(crate) fn read_live(&self, reader: &mut Reader<'_>, spec: &mut S) {
        let kind = self.selector.as_ref().map(|selector| (selector.chosen)(spec));
        for field in self.fields.iter().filter(|field| self.applies(&field.key) == Applies::Live) {
            if field.key.may_be_given(kind) {
                (field.read)(reader, &field.key, spec);
            } else {
                self.refuse(reader, &field.key, kind);
            }
        }
    }

    /// The keys with their defaults, one entry per name.
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

    /// The keys that a file needs to describe `spec`: mandatory keys, and keys whose value differs from the default.
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

    /// The settings of `spec` that differ from the defaults or are always displayed, as text to append.
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
            // A phrase with a leading space continues the text before it without a comma.
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
