//! Finds text that no source may contain: phrases that a reader has to translate, and names of files that do not exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with third-party or generated files.
const SKIPPED: [&str; 7] =
    ["target", "corpus", "artifacts", "node_modules", "__pycache__", "measurements", "out"];
/// Hidden folders that belong to the project.
const HIDDEN: [&str; 1] = [".ci"];

/// Phrases of documents outside the repository, and phrases that are not the field's words.
const BANNED: [&str; 5] =
    ["design page", "so before it could be told", "nobody asked for", "and says why", "asks for news"];

/// Every file of the project below `root`, relative to it.
pub fn files(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut open) = (vec![], vec![root.to_owned()]);
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                if !SKIPPED.contains(&&*name) && (!name.starts_with('.') || HIDDEN.contains(&&*name)) {
                    open.push(entry.path());
                }
            } else if kind.is_file() {
                found.push(entry.path().strip_prefix(root).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

pub fn has_extension(file: &Path, extensions: &[&str]) -> bool {
    file.extension().is_some_and(|extension| extensions.iter().any(|known| extension == *known))
}

/// The banned phrases in a text, including those split across lines.
pub fn banned(text: &str) -> Vec<&'static str> {
    let words: Vec<&str> =
        text.split_whitespace().filter(|word| !matches!(*word, "//" | "///" | "//!" | "#" | "*")).collect();
    let text = words.join(" ");
    BANNED.into_iter().filter(|phrase| text.contains(phrase)).collect()
}

/// Source files that the comments of a text name, with as much of their path as is given.
pub fn named_files(text: &str) -> BTreeSet<String> {
    let comments = text.lines().filter_map(|line| {
        let line = line.trim_start();
        let is_comment = ["//", "# ", "* ", "/*"].iter().any(|mark| line.starts_with(mark));
        is_comment.then_some(line)
    });
    let mut found = BTreeSet::new();
    for comment in comments {
        for word in comment.split(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-' | '/' | '.'))) {
            let word = word.trim_end_matches('.').trim_start_matches("./");
            let (stem, extension) = word.rsplit_once('.').unwrap_or_default();
            let is_name = stem.chars().any(char::is_alphanumeric) && !stem.ends_with('/');
            if is_name && ["rs", "py", "md", "c"].contains(&extension) {
                found.insert(word.to_owned());
            }
        }
    }
    found
}

/// True if a file with this name, or this end of its path, is among `files`.
pub fn exists(files: &[PathBuf], name: &str) -> bool {
    files.iter().any(|file| file.ends_with(name))
}
