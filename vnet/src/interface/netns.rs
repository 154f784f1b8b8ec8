//! Network namespaces that devices live in.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Netns {
    /// A name as in `ip netns`.
    Name(String),
    /// A file such as `/proc/1234/ns/net`.
    Path(PathBuf),
    /// The namespace of a process, `pid:N`.
    Pid(u32),
}

impl FromStr for Netns {
    type Err = String;

    fn from_str(text: &str) -> Result<Netns, String> {
        if let Some(pid) = text.strip_prefix("pid:") {
            let pid =
                pid.parse().map_err(|_| format!("'{text}' does not name a process; write pid:NUMBER"))?;
            return Ok(Netns::Pid(pid));
        }
        if text.starts_with('/') {
            return Ok(Netns::Path(text.into()));
        }
        if text.is_empty() || text.contains('/') || text == ".." {
            return Err(format!(
                "'{text}' is not a network namespace; write its name, a path, or pid:NUMBER"
            ));
        }
        Ok(Netns::Name(text.into()))
    }
}

impl std::fmt::Display for Netns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Netns::Name(name) => f.write_str(name),
            Netns::Path(path) => path.display().fmt(f),
            Netns::Pid(pid) => write!(f, "pid:{pid}"),
        }
    }
}

impl Netns {
    /// Runs `open` in this namespace, on a short-lived thread that enters it.
    ///
    /// # Errors
    /// The namespace does not exist or may not be entered.
    pub(super) fn run<T: Send>(&self, open: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                let file = self.open()?;
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                Ok(open())
            });
            inside.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// True when it is known to be that of the calling thread.
    pub fn is_own(&self) -> bool {
        let file = |path: &Path| rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
        let own = file(Path::new("/proc/thread-self/ns/net"));
        own.is_ok() && own == file(&self.file())
    }

    /// Opens the namespace.
    ///
    /// # Errors
    /// The namespace does not exist or may not be opened.
    pub(super) fn open(&self) -> io::Result<File> {
        File::open(self.file())
    }

    /// The namespace's file for setns(2).
    fn file(&self) -> PathBuf {
        match self {
            Netns::Name(name) => Path::new("/run/netns").join(name),
            Netns::Path(path) => path.clone(),
            Netns::Pid(pid) => format!("/proc/{pid}/ns/net").into(),
        }
    }
}
