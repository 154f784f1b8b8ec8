//! Tells control when to check interfaces again, because a device or namespace may have appeared, changed or disappeared.
//!
//! One thread waits for all events: rtnetlink notifications of devices, on one socket per namespace with interfaces; changes of
//! the folders that hold namespaces and sockets (inotify); and the exit of processes whose namespaces are used (pidfd). An event
//! only triggers a check, which reads the current state from the kernel. So lost events, and events that other programs provoke,
//! do no harm. A place that cannot be watched is checked when the wait times out.
//!
//! A socket keeps its namespace alive, so it is closed as soon as the namespace's name refers to another namespace.

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use super::Interface;
use super::netns::{NamespaceId, Netns, Process};
use crate::netlink::Notifications;
use crate::poll::Poller;

/// `RTMGRP_LINK` (linux/rtnetlink.h): devices created, deleted or changed.
const DEVICES: u32 = 1;
/// inotify events for a change of a folder's entries, or for its removal.
const ENTRIES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);
/// Token of the folders' event; tokens of namespaces follow it.
const FOLDERS: u64 = 0;

/// A place outside of vnetd on which an interface's state depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// A network namespace and its devices; vnetd's own if absent.
    Namespace(Option<Netns>),
    /// A folder in which a socket is to be created.
    Folder(PathBuf),
}

/// Ends the wait of a [`Watcher`] from another thread.
#[derive(Clone)]
pub struct Bell(Poller);

impl Bell {
    /// Ends the current wait, or the next one as soon as it begins.
    pub fn ring(&self) {
        self.0.ring();
    }
}

/// Watches places for changes.
pub struct Watcher {
    poller: Poller,
    folders: Folders,
    namespaces: HashMap<Option<Netns>, Namespace>,
    next_token: u64,
}

/// A watched namespace. It has no socket or process if it did not exist or may not be watched.
struct Namespace {
    token: u64,
    id: Option<NamespaceId>,
    devices: Option<Notifications>,
    /// Held open, because the end of the process is an event.
    _process: Option<Process>,
    /// True if an event has arrived since the namespace's interfaces were checked.
    stirred: bool,
}

impl Namespace {
    fn watch(netns: Option<&Netns>, token: u64, poller: &Poller) -> Namespace {
        let subscribe = || Notifications::subscribe(DEVICES);
        let (id, devices) = match netns.map(|netns| netns.run(subscribe)) {
            None => (None, subscribe().ok()),
            Some(Ok((id, devices))) => (Some(id), devices.ok()),
            Some(Err(_)) => (None, None),
        };
        let process = netns.and_then(Netns::process);
        let waker = poller.waker(token);
        let watched = |fd: &dyn AsFd| waker.watch(fd.as_fd()).is_ok();
        Namespace {
            token,
            id,
            devices: devices.filter(|socket| watched(socket)),
            _process: process.filter(|process| watched(process)),
            stirred: true,
        }
    }

    /// True if the name still refers to this namespace.
    fn is(&self, netns: Option<&Netns>) -> bool {
        netns.is_none_or(|netns| netns.identity() == self.id)
    }
}

impl Watcher {
    /// Creates a watcher that watches nothing yet.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn new() -> io::Result<Watcher> {
        let poller = Poller::new()?;
        let folders = Folders::new(&poller)?;
        Ok(Watcher { poller, folders, namespaces: HashMap::new(), next_token: FOLDERS + 1 })
    }

    /// A handle that ends a wait from another thread.
    pub fn bell(&self) -> Bell {
        Bell(self.poller.clone())
    }

    /// Watches exactly `places`. A name stands for the namespace that it refers to now.
    pub fn watch(&mut self, places: &HashSet<Place>) {
        self.namespaces.retain(|netns, namespace| {
            places.contains(&Place::Namespace(netns.clone())) && namespace.is(netns.as_ref())
        });
        let mut folders = HashSet::new();
        for place in places {
            match place {
                Place::Folder(folder) => _ = folders.insert(folder.clone()),
                Place::Namespace(netns) => {
                    // inotify reports no changes in procfs; a pidfd reports the end of the process.
                    let file = netns.as_ref().filter(|netns| netns.pid().is_none()).map(Netns::file);
                    folders.extend(file.as_deref().and_then(Path::parent).map(Path::to_owned));
                    if !self.namespaces.contains_key(netns) {
                        let namespace = Namespace::watch(netns.as_ref(), self.next_token, &self.poller);
                        self.next_token += 1;
                        self.namespaces.insert(netns.clone(), namespace);
                    }
                }
            }
        }
        self.folders.watch(&folders);
    }

    /// Reads the device state of `interfaces` in namespaces with events.
    pub fn look(&mut self, interfaces: &[Arc<dyn Interface>]) {
        for device in interfaces.iter().filter_map(|interface| interface.device()) {
            let namespace = device.netns().cloned();
            if let Some(Namespace { devices: Some(socket), stirred: true, .. }) =
                self.namespaces.get(&namespace)
            {
                device.look(socket.as_fd());
            }
        }
        self.namespaces.values_mut().for_each(|namespace| namespace.stirred = false);
    }

    /// Waits until a place may have changed, the bell rings, or `timeout` expires. Returns true for the first.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<bool> {
        let mut tokens = HashSet::new();
        self.poller.wait(Some(timeout), |token| _ = tokens.insert(token))?;
        if tokens.contains(&FOLDERS) {
            self.folders.drain();
        }
        for namespace in self.namespaces.values_mut().filter(|namespace| tokens.contains(&namespace.token)) {
            namespace.stirred = true;
            namespace.devices.iter().for_each(Notifications::drain);
        }
        Ok(!tokens.is_empty())
    }
}

/// Folders watched by inotify; for a folder that does not exist, its nearest existing ancestor.
struct Folders {
    inotify: OwnedFd,
    watched: HashMap<PathBuf, i32>,
}

impl Folders {
    fn new(poller: &Poller) -> io::Result<Folders> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        poller.waker(FOLDERS).watch(&inotify)?;
        Ok(Folders { inotify, watched: HashMap::new() })
    }

    fn watch(&mut self, wanted: &HashSet<PathBuf>) {
        // One path per folder: the kernel has one watch for a folder, whatever path names it.
        let there = |folder: &PathBuf| {
            folder.ancestors().find(|path| path.is_dir()).and_then(|path| path.canonicalize().ok())
        };
        let wanted: HashSet<PathBuf> = wanted.iter().filter_map(there).collect();
        self.watched.retain(|folder, watch| {
            let keep = wanted.contains(folder);
            if !keep {
                // Fails if the folder has been deleted, because the kernel deletes its watch, too.
                _ = inotify::remove_watch(&self.inotify, *watch);
            }
            keep
        });
        for folder in wanted {
            if !self.watched.contains_key(&folder)
                && let Ok(watch) = inotify::add_watch(&self.inotify, &folder, ENTRIES)
            {
                self.watched.insert(folder, watch);
            }
        }
    }

    /// Discards all events. A deleted folder is watched again after it reappears.
    fn drain(&mut self) {
        let mut room = [const { MaybeUninit::uninit() }; 4096];
        let mut events = inotify::Reader::new(&self.inotify, &mut room);
        while let Ok(event) = events.next() {
            let (watch, moved) = (event.wd(), event.events().contains(ReadFlags::MOVE_SELF));
            if moved {
                // The watch would follow the moved folder to another path.
                _ = inotify::remove_watch(&self.inotify, watch);
            }
            if moved || event.events().contains(ReadFlags::IGNORED) {
                self.watched.retain(|_, other| *other != watch);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    #[test]
    fn folders_that_come_and_go_end_the_wait() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("a/b");
        let places = HashSet::from([Place::Folder(folder.clone())]);
        let mut watcher = Watcher::new().unwrap();
        watcher.watch(&places);
        assert!(!watcher.wait(Duration::ZERO).unwrap());
        // The ancestors appear one by one; each time the nearest one is watched.
        for path in ["a", "a/b", "a/b/socket"] {
            std::fs::create_dir(top.path().join(path)).unwrap();
            assert!(watcher.wait(SOON).unwrap(), "{path}");
            watcher.watch(&places);
        }
        std::fs::remove_dir_all(top.path().join("a")).unwrap();
        assert!(watcher.wait(SOON).unwrap());
        watcher.watch(&places);
        while watcher.wait(Duration::ZERO).unwrap() {}
        std::fs::create_dir_all(&folder).unwrap();
        assert!(watcher.wait(SOON).unwrap());
        // A place that is no longer watched does not end a wait.
        watcher.watch(&HashSet::new());
        while watcher.wait(Duration::ZERO).unwrap() {}
        std::fs::create_dir(folder.join("socket")).unwrap();
        assert!(!watcher.wait(Duration::ZERO).unwrap());
        assert!(watcher.folders.watched.is_empty() && watcher.namespaces.is_empty());
    }

    #[test]
    fn the_end_of_a_process_and_the_bell_end_the_wait() {
        let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let netns: Netns = format!("pid:{}", process.id()).parse().unwrap();
        let places = HashSet::from([Place::Namespace(Some(netns))]);
        let mut watcher = Watcher::new().unwrap();
        watcher.watch(&places);
        while watcher.wait(Duration::ZERO).unwrap() {}
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(watcher.wait(SOON).unwrap());
        watcher.bell().ring();
        assert!(!watcher.wait(SOON).unwrap());
    }
}
