//! Parses the configuration: TOML (a file, a request's body) or one JSON object (a command) becomes desired state.
//!
//! `settings` validates single keys and tables, `check` their combinations; both report all errors, one line each, and a text
//! with an error changes nothing. These checks depend on the text alone, never on the host, so a file can be checked anywhere;
//! [`check_files`] also reads the files that the configuration names.

use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::desired::*;
use crate::table::{KeyTable, Notes, Place, Problem};
use crate::{check, settings};

/// Maximum length of a configuration file in bytes: a million routes fit.
pub const FILE_MAX: u64 = 128 << 20;

/// All errors of a rejected configuration, in the order of its lines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct ConfigError(pub Vec<Problem>);

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> ConfigError {
        ConfigError(vec![problem])
    }
}

/// A parsed configuration with its warnings.
#[derive(Clone, Debug)]
pub struct Configuration {
    /// The desired state of the host.
    pub desired: Desired,
    /// Settings that are valid but do not have the effect that they suggest.
    pub warnings: Vec<Problem>,
}

/// Reads and checks a configuration file.
pub fn load(path: &Path) -> Result<Configuration, ConfigError> {
    let file = path.display().to_string();
    let cannot = |why: String| ConfigError::from(Problem::new(&Place::default(), format!("{file}: {why}")));
    let length = std::fs::metadata(path).map(|meta| meta.len());
    if length.as_ref().is_ok_and(|length| *length > FILE_MAX) {
        return Err(cannot(format!("larger than {FILE_MAX} bytes, the limit of a configuration file")));
    }
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&file, &text),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let what = if length.is_ok() { "it is there" } else { "its directory is there" };
            Err(cannot(format!("{what}, but not readable by this user; use sudo, or change its permissions")))
        }
        Err(error) => {
            Err(cannot(format!("cannot read the configuration: {error}; give its path with --config")))
        }
    }
}

/// Reads and checks a configuration; `file` is its name in messages.
pub fn parse(file: &str, text: &str) -> Result<Configuration, ConfigError> {
    let file: Arc<str> = file.into();
    let table = KeyTable::from_toml(&file, text).map_err(ConfigError)?;
    let (mut notes, mut broken) = (Notes::default(), vec![]);
    let desired = settings::read_file(table, &Place::new(&file, 1), &mut notes, &mut broken);
    check::check(&desired, &broken, &mut notes.problems);
    check::warn(&desired, &mut notes.warnings);
    notes.problems.sort();
    notes.problems.dedup();
    notes.warnings.sort();
    if notes.problems.is_empty() {
        Ok(Configuration { desired, warnings: notes.warnings })
    } else {
        Err(ConfigError(notes.problems))
    }
}

/// Checks the files that a configuration names: certificates, keys, the token.
pub fn check_files(mut configuration: Configuration) -> Result<Configuration, ConfigError> {
    let mut notes = Notes::default();
    check::files::check(&configuration.desired, &mut notes);
    configuration.warnings.append(&mut notes.warnings);
    if notes.problems.is_empty() { Ok(configuration) } else { Err(ConfigError(notes.problems)) }
}

/// Checks a desired state that does not come from a configuration text.
pub fn validate(desired: &Desired) -> Result<(), ConfigError> {
    let mut problems = vec![];
    check::check(desired, &[], &mut problems);
    if problems.is_empty() { Ok(()) } else { Err(ConfigError(problems)) }
}

/// Reads an interface from a JSON object with the keys of `[[interface]]`.
pub fn interface_from_json(json: &[u8]) -> Result<Item<InterfaceSpec>, ConfigError> {
    from_json(json, settings::interface_from)
}

/// Changes an open interface by a JSON object with keys of `[[interface]]`. Keys that cannot be applied while frames flow are
/// refused.
pub fn change_from_json(json: &[u8], spec: &InterfaceSpec) -> Result<InterfaceSpec, ConfigError> {
    let (mut notes, mut spec) = (Notes::default(), spec.clone());
    settings::change_interface(KeyTable::from_json(json)?, &mut notes, &mut spec);
    if notes.problems.is_empty() { Ok(spec) } else { Err(ConfigError(notes.problems)) }
}

/// Reads a link from a JSON object with the keys of `[[link]]`.
pub fn link_from_json(json: &[u8]) -> Result<Item<LinkSpec>, ConfigError> {
    from_json(json, settings::link_from)
}

/// Reads a rule from a JSON object with the keys of `[[route]]`.
pub fn route_from_json(json: &[u8]) -> Result<Item<RouteSpec>, ConfigError> {
    from_json(json, settings::route_from)
}

fn from_json<T>(
    json: &[u8],
    read: fn(KeyTable, &mut Notes) -> Option<Item<T>>,
) -> Result<Item<T>, ConfigError> {
    let mut notes = Notes::default();
    let item = read(KeyTable::from_json(json)?, &mut notes);
    match item {
        Some(item) if notes.problems.is_empty() => Ok(item),
        _ => Err(ConfigError(notes.problems)),
    }
}
