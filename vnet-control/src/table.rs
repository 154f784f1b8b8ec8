//! Reads tables of keys from TOML (configuration file) or JSON (request).
//!
//! Both become a [`KeyTable`], in which every value has its place. A [`Reader`] takes the keys one by one, reports each invalid
//! value in one line, and finally reports unknown keys. One pass over a file finds all errors.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use toml::de::{DeTable, DeValue};

/// Where a value was written: file and line, or no place (a command).
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(Option<(Arc<str>, usize)>);

impl Place {
    /// Line `line` (from 1) of `file`.
    pub fn new(file: &Arc<str>, line: usize) -> Place {
        Place(Some((file.clone(), line)))
    }

    /// ` (FILE:LINE)`, for a second place in a sentence; empty for a command.
    pub fn aside(&self) -> String {
        match &self.0 {
            Some((file, line)) => format!(" ({file}:{line})"),
            None => String::new(),
        }
    }
}

impl fmt::Display for Place {
    /// `FILE:LINE: `; empty for a command.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some((file, line)) => write!(f, "{file}:{line}: "),
            None => Ok(()),
        }
    }
}

/// One error or warning, in one line: where, what, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where the error was written.
    pub place: Place,
    /// The error, and its remedy.
    pub text: String,
}

impl Problem {
    /// A problem at `place`.
    pub fn new(place: &Place, text: impl Into<String>) -> Problem {
        Problem { place: place.clone(), text: text.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)?;
        // Quoted text may contain control characters: replace them, so that the message stays one line.
        self.text
            .chars()
            .try_for_each(|c| if c.is_control() { write!(f, "\u{fffd}") } else { write!(f, "{c}") })
    }
}

/// Quotes text for a message, shortened to a readable length.
pub(crate) fn quote(text: &str) -> String {
    const QUOTED_MAX: usize = 64;
    let mut quoted: String = text.chars().take(QUOTED_MAX).collect();
    if quoted.len() < text.len() {
        quoted.push('…');
    }
    format!("'{quoted}'")
}

/// A value and the place where it was written.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub place: Place,
    pub value: Value,
}

/// A value of TOML or JSON.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Text(String),
    Integer(i64),
    Flag(bool),
    List(Vec<Entry>),
    Table(KeyTable),
    /// A type that no key accepts, by its name in messages.
    Other(&'static str),
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) => "a text",
            Value::Integer(_) => "a whole number",
            Value::Flag(_) => "true or false",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
            Value::Other(kind) => kind,
        }
    }
}

/// Keys with their values, as parsed.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyTable {
    pub place: Place,
    pub entries: BTreeMap<String, Entry>,
}

/// Converts byte offsets to line numbers.
struct Lines<'a> {
    file: &'a Arc<str>,
    starts: Vec<usize>,
}

impl Lines<'_> {
    fn new<'a>(file: &'a Arc<str>, text: &str) -> Lines<'a> {
        let starts =
            text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1).collect();
        Lines { file, starts }
    }

    fn place(&self, offset: usize) -> Place {
        Place::new(self.file, 1 + self.starts.partition_point(|start| *start <= offset))
    }
}

impl KeyTable {
    /// Parses TOML; `file` is its name in messages.
    pub fn from_toml(file: &Arc<str>, text: &str) -> Result<KeyTable, Vec<Problem>> {
        let lines = Lines::new(file, text);
        let (table, errors) = DeTable::parse_recoverable(text);
        if errors.is_empty() {
            return Ok(KeyTable::from_de(&lines, table.span().start, table.get_ref()));
        }
        let problem = |error: &toml::de::Error| {
            let place = lines.place(error.span().map_or(0, |span| span.start.min(text.len())));
            Problem::new(&place, format!("not valid TOML: {}", error.message()))
        };
        Err(errors.iter().map(problem).collect())
    }

    fn from_de(lines: &Lines<'_>, start: usize, table: &DeTable<'_>) -> KeyTable {
        let entry = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
            // Use the key's place instead of the value's, because a table's key is its header.
            let place = lines.place(key.span().start);
            let key: &std::borrow::Cow<'_, str> = key.get_ref();
            (key.to_string(), Entry { place, value: Value::from_de(lines, value) })
        };
        KeyTable { place: lines.place(start), entries: table.iter().map(entry).collect() }
    }

    /// Parses a JSON object; its values have no place.
    pub fn from_json(json: &[u8]) -> Result<KeyTable, Problem> {
        let problem = |text| Problem::new(&Place::default(), text);
        match serde_json::from_slice(json) {
            Ok(serde_json::Value::Object(object)) => Ok(KeyTable::from_object(object)),
            Ok(_) => Err(problem("the request is not a JSON object; write {\"name\": …}".into())),
            Err(error) => Err(problem(format!("the request is not valid JSON: {error}"))),
        }
    }

    fn from_object(object: serde_json::Map<String, serde_json::Value>) -> KeyTable {
        let entry = |(key, value)| (key, Entry { place: Place::default(), value: Value::from_json(value) });
        KeyTable { place: Place::default(), entries: object.into_iter().map(entry).collect() }
    }
}

impl Value {
    fn from_de(lines: &Lines<'_>, value: &toml::Spanned<DeValue<'_>>) -> Value {
        match value.get_ref() {
            DeValue::String(text) => Value::Text(text.to_string()),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map_or(Value::Other("a number beyond 64 bits"), Value::Integer),
            DeValue::Boolean(flag) => Value::Flag(*flag),
            DeValue::Array(list) => Value::List(
                list.iter()
                    .map(|value| Entry {
                        place: lines.place(value.span().start),
                        value: Value::from_de(lines, value),
                    })
                    .collect(),
            ),
            DeValue::Table(table) => Value::Table(KeyTable::from_de(lines, value.span().start, table)),
            DeValue::Float(_) => Value::Other("a number with a fraction"),
            DeValue::Datetime(_) => Value::Other("a date"),
        }
    }

    fn from_json(value: serde_json::Value) -> Value {
        match value {
            serde_json::Value::String(text) => Value::Text(text),
            serde_json::Value::Number(number) => {
                number.as_i64().map_or(Value::Other("a number that is not a 64-bit integer"), Value::Integer)
            }
            serde_json::Value::Bool(flag) => Value::Flag(flag),
            serde_json::Value::Array(list) => Value::List(
                list.into_iter()
                    .map(|value| Entry { place: Place::default(), value: Value::from_json(value) })
                    .collect(),
            ),
            serde_json::Value::Object(object) => Value::Table(KeyTable::from_object(object)),
            serde_json::Value::Null => Value::Other("null"),
        }
    }
}

/// A value with the place where it was written.
pub(crate) type Placed<T> = (Place, T);

/// Problems and warnings collected while parsing.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    /// Errors.
    pub problems: Vec<Problem>,
    /// Settings that are valid but have no effect.
    pub warnings: Vec<Problem>,
}

/// Reads one table key by key and collects problems.
pub(crate) struct Reader<'a> {
    /// The table's header, as written in messages: `[bridge]`, `[[link]]`.
    what: &'static str,
    table: KeyTable,
    known: Vec<&'static str>,
    /// Keys taken so far, with the places where they are written.
    taken: BTreeMap<&'static str, Place>,
    notes: &'a mut Notes,
}

impl<'a> Reader<'a> {
    pub fn new(what: &'static str, table: KeyTable, notes: &'a mut Notes) -> Reader<'a> {
        Reader { what, table, known: vec![], taken: BTreeMap::new(), notes }
    }

    /// Where the table begins.
    pub fn place(&self) -> Place {
        self.table.place.clone()
    }

    /// Where a key is written; the table's place if the key is absent.
    pub fn place_of(&self, key: &str) -> Place {
        let entry = self.table.entries.get(key).map(|entry| &entry.place);
        entry.or_else(|| self.taken.get(key)).cloned().unwrap_or_else(|| self.place())
    }

    /// True if the key is present, whether or not its value is valid.
    pub fn given(&self, key: &str) -> bool {
        self.table.entries.contains_key(key) || self.taken.contains_key(key)
    }

    pub fn problem(&mut self, place: &Place, text: impl Into<String>) {
        self.notes.problems.push(Problem::new(place, text));
    }

    /// Warns about a setting that is valid but has no effect.
    pub fn hint(&mut self, place: &Place, text: impl Into<String>) {
        self.notes.warnings.push(Problem::new(place, text));
    }

    /// Number of problems so far.
    pub fn problems(&self) -> usize {
        self.notes.problems.len()
    }

    fn wrong_kind(&mut self, key: &str, entry: &Entry, wanted: &str) {
        let text = format!("'{key}' is {}, but must be {wanted}", entry.value.kind());
        self.problem(&entry.place, text);
    }

    /// Takes a key's value of any type.
    pub fn take(&mut self, key: &'static str) -> Option<Entry> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let entry = self.table.entries.remove(key)?;
        self.taken.insert(key, entry.place.clone());
        Some(entry)
    }

    /// Takes a text.
    pub fn text(&mut self, key: &'static str) -> Option<Placed<String>> {
        let entry = self.take(key)?;
        if let Value::Text(text) = entry.value {
            return Some((entry.place, text));
        }
        self.wrong_kind(key, &entry, &format!("a text; write {key} = \"…\""));
        None
    }

    /// Reports that a key is missing.
    pub fn require(&mut self, key: &'static str, example: &str) {
        if !self.given(key) {
            let text = format!("{} has no '{key}'; write {key} = {example}", self.what);
            let place = self.place();
            self.problem(&place, text);
        }
    }

    /// Takes a text and parses it by `T::from_str`, whose error becomes the message.
    pub fn parsed<T: FromStr<Err: fmt::Display>>(&mut self, key: &'static str) -> Option<Placed<T>> {
        let (place, text) = self.text(key)?;
        match text.parse() {
            Ok(value) => Some((place, value)),
            Err(error) => {
                self.problem(&place, format!("{key}: {error}"));
                None
            }
        }
    }

    /// Takes a whole number within limits, both inclusive.
    pub fn number(&mut self, key: &'static str, least: u32, most: u32) -> Option<u32> {
        let entry = self.take(key)?;
        let Value::Integer(number) = entry.value else {
            self.wrong_kind(key, &entry, &format!("a whole number from {least} to {most}"));
            return None;
        };
        let within = u32::try_from(number).ok().filter(|number| (least..=most).contains(number));
        if within.is_none() {
            let right = if least == most {
                format!("only {least} is possible")
            } else {
                format!("use {least} to {most}")
            };
            let text = format!("{key} {number} is beyond the limits; {right}");
            self.problem(&entry.place, text);
        }
        within
    }

    /// Takes a boolean.
    pub fn flag(&mut self, key: &'static str) -> Option<Placed<bool>> {
        let entry = self.take(key)?;
        if let Value::Flag(flag) = entry.value {
            return Some((entry.place, flag));
        }
        self.wrong_kind(key, &entry, "true or false, without quotes");
        None
    }

    /// Takes a list of texts, with the place of the list and of each text.
    pub fn texts(&mut self, key: &'static str) -> Option<Placed<Vec<Placed<String>>>> {
        let entry = self.take(key)?;
        let Value::List(list) = &entry.value else {
            self.wrong_kind(key, &entry, &format!("a list of texts; write {key} = [\"…\"]"));
            return None;
        };
        let mut texts = vec![];
        for item in list {
            match &item.value {
                Value::Text(text) => texts.push((item.place.clone(), text.clone())),
                _ => self.problem(&item.place, format!("{key} takes texts in quotes")),
            }
        }
        Some((entry.place, texts))
    }

    /// Takes a list of whole numbers within limits.
    pub fn numbers(&mut self, key: &'static str, least: u32, most: u32) -> Option<Placed<Vec<u32>>> {
        let entry = self.take(key)?;
        let Value::List(list) = &entry.value else {
            self.wrong_kind(key, &entry, &format!("a list of whole numbers; write {key} = [1, 2]"));
            return None;
        };
        let mut numbers = vec![];
        for item in list {
            match item.value {
                Value::Integer(number) if (i64::from(least)..=i64::from(most)).contains(&number) => {
                    numbers.push(number as u32);
                }
                _ => {
                    let text = format!("{key} takes whole numbers from {least} to {most}");
                    self.problem(&item.place, text);
                }
            }
        }
        Some((entry.place, numbers))
    }

    /// Takes a table, written `[key]`.
    pub fn table(&mut self, key: &'static str) -> Option<KeyTable> {
        let entry = self.take(key)?;
        match entry.value {
            Value::Table(table) => Some(KeyTable { place: entry.place, ..table }),
            _ => {
                self.wrong_kind(key, &entry, &format!("a table; write [{key}]"));
                None
            }
        }
    }

    /// Takes any number of tables, written `[[key]]`.
    pub fn tables(&mut self, key: &'static str) -> Vec<KeyTable> {
        let Some(entry) = self.take(key) else { return vec![] };
        let Value::List(list) = entry.value else {
            self.wrong_kind(key, &entry, &format!("a list of tables; write [[{key}]]"));
            return vec![];
        };
        let mut tables = vec![];
        for item in list {
            match item.value {
                Value::Table(table) => tables.push(table),
                _ => self.wrong_kind(key, &item, &format!("a list of tables; write [[{key}]]")),
            }
        }
        tables
    }

    /// Reports unknown keys.
    pub fn finish(self) {
        let Reader { what, table, known, notes, .. } = self;
        for (key, entry) in &table.entries {
            let advice = match closest(key, &known) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("known here: {}", known.join(", ")),
            };
            notes
                .problems
                .push(Problem::new(&entry.place, format!("unknown key {} in {what}; {advice}", quote(key))));
        }
    }
}

/// The known key with the smallest edit distance to `key`, at most two.
fn closest(key: &str, known: &[&'static str]) -> Option<&'static str> {
    // A much longer key is no misspelling, and the distance takes quadratic time.
    if key.len() > 32 {
        return None;
    }
    // A swap of neighbouring letters, the most frequent typing mistake, counts once.
    let near = known.iter().map(|known| (strsim::osa_distance(key, known), *known)).min()?;
    (near.0 <= 2).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_key_has_the_fewest_typing_mistakes() {
        let known = ["name", "kind", "socket", "mac", "mtu", "queues"];
        for (key, want) in [
            ("nmae", Some("name")),
            ("sokcet", Some("socket")),
            ("mack", Some("mac")),
            ("quees", Some("queues")),
            ("colour", None),
            (&"name".repeat(10), None),
        ] {
            assert_eq!(closest(key, &known), want, "{key}");
        }
    }

    #[test]
    fn a_problem_is_one_line() {
        let problem = Problem::new(&Place::new(&"f".into(), 3), "bad\nname\u{1b}[2J");
        assert_eq!(problem.to_string(), "f:3: bad\u{fffd}name\u{fffd}[2J");
    }

    #[test]
    fn places_are_lines_counted_from_one() {
        let table = KeyTable::from_toml(&"f".into(), "a = 1\n\n[b]\nc = 2\n").unwrap();
        assert_eq!(table.entries["a"].place, Place::new(&"f".into(), 1));
        assert_eq!(table.entries["b"].place, Place::new(&"f".into(), 3));
        let Value::Table(b) = &table.entries["b"].value else { panic!("b is a table") };
        assert_eq!(b.entries["c"].place, Place::new(&"f".into(), 4));
    }
}
