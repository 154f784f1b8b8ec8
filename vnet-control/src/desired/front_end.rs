//! Access control for front ends of a vhost-user interface: who may connect to its socket, and how much memory a front end may
//! share.

use std::fmt;
use std::str::FromStr;

use super::account::{Account, AccountError};
use vnet::interface::vhost_user::AllowedPeer;
use vnet::unix::SocketAccess;

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
    pub(crate) fn access(&self) -> Result<SocketAccess, AccountError> {
        Ok(SocketAccess {
            owner: self.socket_owner.as_ref().map(Account::uid).transpose()?,
            group: self.socket_group.as_ref().map(Account::gid).transpose()?,
            mode: self.socket_mode.map(|FileMode(mode)| mode),
        })
    }

    /// The user and group whose processes may be the front end, with names resolved to ids.
    pub(crate) fn peer(&self) -> Result<AllowedPeer, AccountError> {
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
    fn permissions_are_octal() {
        assert_eq!("0660".parse(), Ok(FileMode(0o660)));
        assert_eq!("600".parse::<FileMode>().unwrap().to_string(), "0600");
        for bad in ["", "66", "0888", "7777", "00660", "rw-"] {
            assert!(bad.parse::<FileMode>().is_err(), "{bad:?}");
        }
    }
}
