//! The kernel programs, which the helper loads and attaches, or a process without a helper itself.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use parking_lot::Mutex;

use super::message::Request;
use super::{HELPER, Helper};
use crate::loader::{Attach, Loaded, MAPS};

/// The programs, loaded.
pub(crate) struct Programs {
    /// `None`: the helper has them.
    own: Option<Mutex<Loaded>>,
}

impl Programs {
    /// Loads the programs, with the maps that are pinned in this host's `folder` of a bpffs, if there is one. The maps are in the order of
    /// [`MAPS`]. A helper has the programs that were loaded last.
    ///
    /// # Errors
    /// The reason in one line.
    pub(crate) fn load(folder: Option<&Path>) -> io::Result<(Programs, [OwnedFd; MAPS.len()])> {
        if let Some(helper) = HELPER.get() {
            return Ok((Programs { own: None }, load_by(helper, folder)?));
        }
        let (loaded, maps) = Loaded::load(folder)?;
        Ok((Programs { own: Some(Mutex::new(loaded)) }, maps))
    }

    /// Attaches one of them. Returns its link, unless it is pinned or a filter.
    ///
    /// # Errors
    /// The reason in one line.
    pub(crate) fn attach(&self, attach: &Attach) -> io::Result<Option<OwnedFd>> {
        match (&self.own, HELPER.get()) {
            (Some(loaded), _) => loaded.lock().attach(attach),
            (None, Some(helper)) => attach_by(helper, attach),
            (None, None) => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The programs of this process.
    #[cfg(test)]
    pub(crate) fn own(&self) -> parking_lot::MutexGuard<'_, Loaded> {
        self.own.as_ref().unwrap().lock()
    }
}

pub(super) fn load_by(helper: &Helper, folder: Option<&Path>) -> io::Result<[OwnedFd; MAPS.len()]> {
    let maps = helper.ask(&Request::LoadPrograms(folder.map(Path::to_owned)), None)?;
    maps.try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

pub(super) fn attach_by(helper: &Helper, attach: &Attach) -> io::Result<Option<OwnedFd>> {
    Ok(helper.ask(&Request::Attach(attach.clone()), None)?.pop())
}
