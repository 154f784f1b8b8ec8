//! `vnet console`: the control language, entered interactively with history and completion, or read from files and standard
//! input.
//!
//! Lines are sent to vnetd by `POST /v1/console`, a file as one request; vnetd executes them in order.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use rustyline::completion::{Completer, Pair};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};
use vnet_control::api::{self, ConsoleAnswer};
use vnet_control::language::{self, COMMANDS, Command, Dialect};

use crate::client::Client;
use crate::output::{Failure, print, read, read_file};

/// Maximum length of a file in bytes: that of the API's request bodies.
const FILE_MAX: u64 = 1 << 20;
/// Maximum number of lines kept in the history.
const HISTORY_MAX: usize = 1_000;

/// Runs files, standard input, or an interactive session.
pub fn run(
    client: &Client<'_>,
    files: &[PathBuf],
    dialect: Option<Dialect>,
    json: bool,
) -> Result<(), Failure> {
    if files.is_empty() && io::stdin().is_terminal() && !json {
        return interactive(client);
    }
    let standard_input = [PathBuf::from("-")];
    let files = if files.is_empty() { &standard_input[..] } else { files };
    let mut failures = vec![];
    for file in files {
        let (name, text) = read_file(file, FILE_MAX + 1)?;
        if text.len() as u64 > FILE_MAX {
            let why = format!("{name}: larger than {FILE_MAX} bytes; split it, or use 'vnet apply'");
            return Err(Failure::Lines(vec![why]));
        }
        let dialect = dialect.unwrap_or_else(|| dialect_of(file));
        for ConsoleAnswer { line, good, lines } in send(client, dialect, text, json)? {
            if good {
                if !json {
                    print(&(lines.join("\n") + "\n"))?;
                }
            } else {
                let reason = lines.join(" ");
                let reason = reason.strip_prefix("ERROR ").unwrap_or(&reason);
                failures.push(format!("{name}:{line}: {reason}"));
            }
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(Failure::Lines(failures)) }
}

/// The dialect of a file: VNET/P's files have fixed names.
fn dialect_of(file: &Path) -> Dialect {
    match file.file_name().and_then(|name| name.to_str()) {
        Some("links") => Dialect::Links,
        Some("routes") => Dialect::Routes,
        _ => Dialect::Console,
    }
}

fn send(
    client: &Client<'_>,
    dialect: Dialect,
    text: Vec<u8>,
    json: bool,
) -> Result<Vec<ConsoleAnswer>, Failure> {
    let dialect = match dialect {
        Dialect::Console => "console",
        Dialect::Links => "links",
        Dialect::Routes => "routes",
    };
    let answer = client.post(&format!("/v1/console?dialect={dialect}"), text)?;
    if json {
        print(&(String::from_utf8_lossy(&answer) + "\n"))?;
    }
    read(&answer)
}

/// History file: below `$XDG_STATE_HOME`, else `~/.local/state`.
fn history_file() -> Option<PathBuf> {
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/state"));
    let state = std::env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let folder = state.or_else(home)?.join("vnet");
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder.join("console_history"))
}

fn interactive(client: &Client<'_>) -> Result<(), Failure> {
    let failure = |error: ReadlineError| Failure::Lines(vec![format!("cannot use the terminal: {error}")]);
    let config = Config::builder()
        .max_history_size(HISTORY_MAX)
        .map_err(failure)?
        .auto_add_history(true)
        .completion_type(rustyline::CompletionType::List)
        .build();
    let mut editor: Editor<Complete<'_>, FileHistory> = Editor::with_config(config).map_err(failure)?;
    editor.set_helper(Some(Complete { client }));
    let history = history_file();
    if let Some(history) = &history {
        // The file does not exist on the first run.
        let _ = editor.load_history(history);
    }
    print("VNET control language: HELP lists the commands, Tab completes, DONE or Ctrl-D quits.\n")?;
    let result = read_lines(client, &mut editor).map_err(|error| match error {
        Ended::Terminal(error) => failure(error),
        Ended::Failed(failure) => failure,
    });
    if let Some(history) = &history
        && let Err(error) = editor.save_history(history)
    {
        eprintln!("cannot save the history: {}: {error}", history.display());
    }
    result
}

enum Ended {
    Terminal(ReadlineError),
    Failed(Failure),
}

fn read_lines(client: &Client<'_>, editor: &mut Editor<Complete<'_>, FileHistory>) -> Result<(), Ended> {
    loop {
        let line = match editor.readline("vnet> ") {
            Ok(line) => line,
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(Ended::Terminal(error)),
        };
        let done = language::parse(Dialect::Console, &line) == Ok(Command::Done);
        let answers = send(client, Dialect::Console, line.into_bytes(), false).map_err(Ended::Failed)?;
        for answer in answers {
            print(&(answer.lines.join("\n") + "\n")).map_err(Ended::Failed)?;
        }
        if done {
            return Ok(());
        }
    }
}

/// Completes keywords, and names and addresses of existing ports.
struct Complete<'a> {
    client: &'a Client<'a>,
}

/// Completions of the last word of `line`, and where that word starts. Calls `ports` only if needed.
fn complete(line: &str, ports: impl FnOnce() -> Vec<String>) -> (usize, Vec<String>) {
    let start = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let word = line[start..].to_ascii_uppercase();
    let before: Vec<String> = line[..start].split_whitespace().map(str::to_ascii_uppercase).collect();
    let mut found = vec![];
    for usage in COMMANDS {
        // In the syntax, keywords come first in upper case; choices follow in lower case.
        let words: Vec<_> = usage.words.split(' ').collect();
        if before.len() < words.len() && before.iter().zip(&words).all(|(said, word)| said == word) {
            found.push(words[before.len()].to_string());
        } else if words.len() == 2 && before.len() >= 2 && before[..2] == words {
            let choices = usage.syntax.split(' ').flat_map(|part| {
                part.trim_matches(['[', ']']).split('|').filter(|part| part.contains(char::is_lowercase))
            });
            found.extend(choices.map(ToString::to_string));
        }
    }
    if before.len() >= 2 {
        found.extend(ports());
    }
    found.retain(|candidate| candidate.to_ascii_uppercase().starts_with(&word));
    found.sort();
    found.dedup();
    (start, found)
}

/// Names and addresses of links and interfaces.
fn ports(client: &Client<'_>) -> Vec<String> {
    let mut found = vec![];
    // Completion is a convenience: without an answer, nothing is completed.
    if let Ok(links) = client.get("/v1/links").map_err(Failure::from).and_then(|a| read::<Vec<api::Link>>(&a))
    {
        found.extend(links.into_iter().flat_map(|link| [link.settings.text("remote"), link.name]));
    }
    let interfaces = client.get("/v1/interfaces").map_err(Failure::from);
    if let Ok(interfaces) = interfaces.and_then(|answer| read::<Vec<api::Interface>>(&answer)) {
        for interface in interfaces {
            found.push(interface.name);
            found.extend(Some(interface.settings.text("mac")).filter(|mac| !mac.is_empty()));
        }
    }
    found
}

impl Completer for Complete<'_> {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _: &Context<'_>,
    ) -> Result<(usize, Vec<Pair>), ReadlineError> {
        let (start, found) = complete(&line[..position], || ports(self.client));
        let pair = |text: String| Pair { display: text.clone(), replacement: text + " " };
        Ok((start, found.into_iter().map(pair).collect()))
    }
}

impl Hinter for Complete<'_> {
    type Hint = String;
}
impl Highlighter for Complete<'_> {}
impl Validator for Complete<'_> {}
impl Helper for Complete<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_completed_by_position() {
        let ports = || vec!["h2".to_string(), "10.0.0.2:9000".to_string()];
        for (line, start, want) in [
            ("li", 0, vec!["LINK", "LINKS?"]),
            ("LINK ", 5, vec!["ADD", "DEL"]),
            ("route a", 6, vec!["ADD"]),
            ("route m", 6, vec!["MOVE"]),
            ("LINK ADD 10.0.0.2 9000 t", 23, vec!["tcp"]),
            ("ROUTE ADD any any edge h", 23, vec!["h2"]),
            ("ROUTE ADD any any e", 18, vec!["edge"]),
            ("zzz", 0, vec![]),
        ] {
            let (at, found) = complete(line, ports);
            assert_eq!((at, found), (start, want.into_iter().map(String::from).collect()), "{line}");
        }
    }

    #[test]
    fn files_of_vnet_p_are_known_by_name() {
        assert_eq!(dialect_of(Path::new("/etc/links")), Dialect::Links);
        assert_eq!(dialect_of(Path::new("routes")), Dialect::Routes);
        assert_eq!(dialect_of(Path::new("routes.txt")), Dialect::Console);
    }
}
