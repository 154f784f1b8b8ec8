//! Network namespaces of devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::statfs;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::helper;

/// File system of namespaces (linux/magic.h).
const NSFS_MAGIC: u64 = 0x6e73_6673;

/// A network namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Netns {
    /// A name as used by `ip netns`.
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

/// The process whose id names a namespace. A later process with the same id is not mistaken for it.
#[derive(Clone, Debug)]
pub struct Process(Arc<OwnedFd>);

impl Process {
    /// The process that has this id now, if any.
    pub(super) fn with_id(pid: u32) -> Option<Process> {
        let pid = Pid::from_raw(pid.try_into().ok()?)?;
        Some(Process(Arc::new(pidfd_open(pid, PidfdFlags::empty()).ok()?)))
    }

    /// True if the process has exited.
    pub fn has_exited(&self) -> bool {
        let mut ends = [PollFd::new(&*self.0, PollFlags::IN)];
        // A pidfd becomes readable when its process exits. On an error, assume that it runs.
        poll(&mut ends, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Device and inode of a namespace's file. They are unique while a socket or device keeps the namespace alive.
pub type NamespaceId = (u64, u64);

/// Error for a namespace that does not exist or may not be entered.
#[derive(Debug)]
pub struct NetnsError {
    netns: Netns,
    error: io::Error,
}

impl std::error::Error for NetnsError {}

impl std::fmt::Display for NetnsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let NetnsError { netns, error } = self;
        match netns.pid() {
            Some(pid) if self.is_absent() => {
                write!(
                    f,
                    "cannot enter network namespace '{netns}': process {pid} has exited; name a running one"
                )
            }
            _ if self.is_unfinished() => write!(
                f,
                "cannot enter network namespace '{netns}': '{}' is not a network namespace; see 'ip netns list'",
                netns.file().display()
            ),
            _ => write!(
                f,
                "cannot enter network namespace '{netns}': {error}; is it there ('ip netns list'), and is vnetd root?"
            ),
        }
    }
}

impl NetnsError {
    /// True if the namespace does not exist yet.
    fn is_absent(&self) -> bool {
        self.error.kind() == io::ErrorKind::NotFound || self.is_unfinished()
    }

    /// True if the file is not a network namespace: 'ip netns add' creates the file before it mounts the namespace on it.
    fn is_unfinished(&self) -> bool {
        self.error.raw_os_error() == Some(libc::EINVAL)
    }

    /// The reason for the state "down" if the namespace may still appear.
    pub(super) fn waits_for(&self) -> Option<String> {
        self.is_absent().then(|| self.netns.absence())
    }
}

impl Netns {
    /// Runs `open` with this namespace as the thread's target namespace ([`crate::helper::within`]). Returns the namespace's identity with the
    /// result.
    ///
    /// # Errors
    /// The namespace does not exist, or may not be entered.
    pub fn run<T: Send>(&self, open: impl FnOnce() -> T + Send) -> Result<(NamespaceId, T), NetnsError> {
        let fail = |error| NetnsError { netns: self.clone(), error };
        let file = self.open()?;
        let id = file.metadata().map(|meta| identity_of(&meta)).map_err(fail)?;
        Ok((id, helper::within(file, open).map_err(fail)?))
    }

    /// True if this is known to be the namespace of the calling thread.
    pub fn is_own(&self) -> bool {
        let file = |path: &Path| rustix::fs::stat(path).map(|stat| (stat.st_dev, stat.st_ino));
        let own = file(Path::new("/proc/thread-self/ns/net")).ok();
        own.is_some() && own == self.identity()
    }

    /// Opens the namespace.
    ///
    /// # Errors
    /// The namespace does not exist, may not be opened, or is another file.
    pub(super) fn open(&self) -> Result<File, NetnsError> {
        let fail = |error| NetnsError { netns: self.clone(), error };
        helper::namespace(&self.file()).map_err(fail)
    }

    /// True if the namespace's file is there, and is no namespace yet.
    pub fn is_unfinished(&self) -> bool {
        statfs(self.file()).is_ok_and(|stat| stat.f_type as u64 & 0xffff_ffff != NSFS_MAGIC)
    }

    /// Path of the namespace's file for setns(2).
    pub(super) fn file(&self) -> PathBuf {
        match self {
            Netns::Name(name) => Path::new("/run/netns").join(name),
            Netns::Path(path) => path.clone(),
            Netns::Pid(pid) => format!("/proc/{pid}/ns/net").into(),
        }
    }

    /// The process that identifies the namespace, if it is given by a process id.
    pub fn pid(&self) -> Option<u32> {
        match self {
            Netns::Pid(pid) => Some(*pid),
            Netns::Path(path) => {
                path.strip_prefix("/proc").ok()?.iter().next()?.to_str().and_then(|pid| pid.parse().ok())
            }
            Netns::Name(_) => None,
        }
    }

    /// The process whose id names the namespace, if there is one.
    pub fn process(&self) -> Option<Process> {
        Process::with_id(self.pid()?)
    }

    /// Identity of the namespace that the name refers to now.
    pub fn identity(&self) -> Option<NamespaceId> {
        let file = self.file();
        let meta = std::fs::metadata(&file).or_else(|error| match error.kind() {
            // That of a process that has other rights than this one.
            io::ErrorKind::PermissionDenied => helper::namespace(&file)?.metadata(),
            _ => Err(error),
        });
        meta.ok().map(|meta| identity_of(&meta))
    }

    /// The reason to report for an interface while its namespace does not exist.
    pub fn absence(&self) -> String {
        match self.pid() {
            Some(pid) => format!("process {pid} of netns {self} has exited"),
            None => format!("waiting for netns {self}"),
        }
    }

    /// A shell command that acts on a device in this namespace; `command` is the part after `ip`.
    pub(super) fn ip_command(netns: Option<&Netns>, command: &str) -> String {
        match netns {
            None => format!("ip {command}"),
            Some(Netns::Name(name)) => format!("ip -n {name} {command}"),
            Some(netns) => format!("nsenter --net={} ip {command}", netns.file().display()),
        }
    }
}

fn identity_of(meta: &std::fs::Metadata) -> NamespaceId {
    (meta.dev(), meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_number_and_by_path() {
        let pid = |text: &str| text.parse::<Netns>().unwrap().pid();
        assert_eq!(
            [pid("pid:12"), pid("/proc/12/ns/net"), pid("/run/netns/12"), pid("12")],
            [Some(12), Some(12), None, None]
        );
    }

    #[test]
    fn a_process_that_has_exited_is_not_another_one_of_its_number() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let netns: Netns = format!("pid:{}", child.id()).parse().unwrap();
        let process = netns.process().unwrap();
        assert!(!process.has_exited());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_exited() && netns.process().is_none());
        assert!("box".parse::<Netns>().unwrap().process().is_none());
    }

    #[test]
    fn what_is_not_there_is_told_by_its_kind() {
        let error = |text: &str| text.parse::<Netns>().unwrap().run(|| ()).unwrap_err();
        // Above 2^22, the largest process id that Linux can be configured to assign.
        let gone = error("pid:4194305");
        assert!(gone.to_string().contains("process 4194305 has exited"), "{gone}");
        assert_eq!(gone.waits_for().unwrap(), "process 4194305 of netns pid:4194305 has exited");
        assert_eq!(error("no-such-netns").waits_for().unwrap(), "waiting for netns no-such-netns");
        // A file without a namespace mounted on it, as 'ip netns add' leaves it for a moment.
        let file = tempfile::NamedTempFile::new().unwrap();
        let unfinished = error(file.path().to_str().unwrap());
        assert!(unfinished.to_string().contains("' is not a network namespace; see"), "{unfinished}");
        assert!(unfinished.waits_for().unwrap().starts_with("waiting for netns /"));
        let netns: Netns = file.path().to_str().unwrap().parse().unwrap();
        assert!(netns.is_unfinished() && netns.open().is_err());
        let own = Netns::Path("/proc/thread-self/ns/net".into());
        assert!(!own.is_unfinished() && own.open().is_ok());
        assert!(!"no-such-netns".parse::<Netns>().unwrap().is_unfinished());
    }
}
