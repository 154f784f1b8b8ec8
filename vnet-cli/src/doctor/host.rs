//! Reads a host's files in /proc, /sys and /dev, below a root directory that tests replace.

use std::fs;
use std::path::{Path, PathBuf};

/// A host's files below a root directory.
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// The host that this command runs on.
    pub fn here() -> Host {
        Host::at(Path::new("/"))
    }

    /// A host whose files are below `root`.
    pub fn at(root: &Path) -> Host {
        Host { root: root.into() }
    }

    /// The path of a file below the root.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The trimmed text of a file; `None` if it is missing or unreadable.
    pub fn text(&self, path: &str) -> Option<String> {
        Some(fs::read_to_string(self.path(path)).ok()?.trim().into())
    }

    /// The number in a file.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// True if the file exists.
    pub fn has(&self, path: &str) -> bool {
        self.path(path).exists()
    }

    /// Sorted names in a directory; empty if it is missing.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The value of `key` in a file of lines `key: value` or `key value`.
    pub fn field(&self, path: &str, key: &str) -> Option<String> {
        field(&self.text(path)?, key)
    }
}

/// The value of `key` in lines `key: value` or `key value`.
pub fn field(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?;
        let value = rest.trim_start_matches([' ', '\t']);
        let value = value.strip_prefix(':').unwrap_or(value);
        // "Max open files" must not match "Max open files soft".
        (rest.starts_with([':', ' ', '\t'])).then(|| value.trim().to_string())
    })
}

/// CPUs of a list such as `0-3,8`, up to a bound.
pub fn cpus(list: &str) -> Vec<usize> {
    const CPU_MAX: usize = 8192;
    let mut cpus = vec![];
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) {
            cpus.extend(first..=last.min(CPU_MAX));
        }
    }
    cpus
}

/// The word in brackets of `always [madvise] never`.
pub fn chosen(text: &str) -> Option<&str> {
    text.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_and_choices_are_read() {
        assert_eq!(cpus("0-2,5\n"), [0, 1, 2, 5]);
        assert_eq!(cpus("\n"), Vec::<usize>::new());
        assert_eq!(cpus("7-99999999999").len(), 8192 - 6);
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen(""), None);
        let limits = "Max open files            1024                 4096                 files";
        assert_eq!(field(limits, "Max open files").unwrap().split_whitespace().next(), Some("1024"));
        assert_eq!(field("a:\t1\nab: 2", "ab"), Some("2".into()));
    }
}
