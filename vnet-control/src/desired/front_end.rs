//! Access control for front ends of a vhost-user interface: who may connect to its socket, and how much memory a front end may
//! share.

use std::fmt;
use std::io;
use std::str::FromStr;

use nix::unistd::{Group, User};
use vnet::interface::vhost_user::AllowedPeer;
use vnet::unix::SocketAccess;

/// Maximum length of a user or group name in bytes (`LOGIN_NAME_MAX` less the terminating zero).
const NAME_LEN_MAX: usize = 255;

/// A user or group, by name or id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account(String);

impl FromStr for Account {
    type Err = String;

    fn from_str(text: &str) -> Result<Account, String> {
        let odd = |c: char| c.is_whitespace() || c.is_control() || c == ':' || c == '/';
        if text.is_empty() || text.len() > NAME_LEN_MAX || text.starts_with('-') || text.contains(odd) {
            return Err("it takes a name or a number, as in \"tenant1\" or \"1001\"".into());
        }
        Ok(Account(text.into()))
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Account {
    /// The user id.
    fn uid(&self) -> io::Result<u32> {
        self.number("user", |name| Ok(User::from_name(name)?.map(|user| user.uid.as_raw())))
    }

    /// The group id.
    fn gid(&self) -> io::Result<u32> {
        self.number("group", |name| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw())))
    }

    fn number(&self, what: &str, find: impl FnOnce(&str) -> io::Result<Option<u32>>) -> io::Result<u32> {
        if let Ok(number) = self.0.parse() {
            return Ok(number);
        }
        let text = |why: &str| io::Error::other(format!("{what} '{}' {why}; give its number", self.0));
        match find(&self.0) {
            Ok(number) => number.ok_or_else(|| text("does not exist on this host")),
            Err(error) => Err(text(&format!("cannot be looked up ({error})"))),
        }
    }
}

/// Permissions of a file, written in octal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMode(u32);

impl FromStr for FileMode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<FileMode, &'static str> {
        let octal = (3..=4).contains(&text.len()) && text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| octal && *mode <= 0o777);
        mode.map(FileMode).ok_or("it takes permissions in octal, as in \"0660\"")
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

/// Access rules of a vhost-user socket.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FrontEndSpec {
    /// Owner of the socket file.
    pub socket_owner: Option<Account>,
    /// Group of the socket file.
    pub socket_group: Option<Account>,
    /// Permissions of the socket file.
    pub socket_mode: Option<FileMode>,
    /// The only user whose process may be the front end.
    pub peer_user: Option<Account>,
    /// The only group whose process may be the front end.
    pub peer_group: Option<Account>,
    /// Upper bound on guest memory that one front end may share, in MiB.
    pub memory_limit: Option<u32>,
}

impl FrontEndSpec {
    /// Attributes of the socket file, with names resolved to ids.
    pub(crate) fn access(&self) -> io::Result<SocketAccess> {
        Ok(SocketAccess {
            owner: self.socket_owner.as_ref().map(Account::uid).transpose()?,
            group: self.socket_group.as_ref().map(Account::gid).transpose()?,
            mode: self.socket_mode.map(|FileMode(mode)| mode),
        })
    }

    /// The user and group whose processes may be the front end, with names resolved to ids.
    pub(crate) fn peer(&self) -> io::Result<AllowedPeer> {
        Ok(AllowedPeer {
            uid: self.peer_user.as_ref().map(Account::uid).transpose()?,
            gid: self.peer_group.as_ref().map(Account::gid).transpose()?,
        })
    }

    /// Upper bound on guest memory that one front end may share, in bytes.
    pub(crate) fn memory_max(&self) -> Option<u64> {
        self.memory_limit.map(|mib| u64::from(mib) << 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_names_or_numbers() {
        let account = |text: &str| text.parse::<Account>().unwrap();
        assert_eq!(account("1001").uid().unwrap(), 1001);
        assert_eq!((account("root").uid().unwrap(), account("root").gid().unwrap()), (0, 0));
        let error = account("no-such-user-here").uid().unwrap_err().to_string();
        assert_eq!(error, "user 'no-such-user-here' does not exist on this host; give its number");
        for bad in ["", "-1", "a b", "a:b", "a\0"] {
            assert!(bad.parse::<Account>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn permissions_are_octal() {
        assert_eq!("0660".parse(), Ok(FileMode(0o660)));
        assert_eq!("600".parse::<FileMode>().unwrap().to_string(), "0600");
        for bad in ["", "66", "0888", "7777", "00660", "rw-"] {
            assert!(bad.parse::<FileMode>().is_err(), "{bad:?}");
        }
    }
}
