//! The helper's loop.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

use super::mappings::maps_privately;
use super::message::{Kind, REQUEST_MAX, Request, encode_answer, receive, send};
use super::work::{
    disable_ipv6_here, entered, find_namespace, make_namespace, mount_bpffs, open_namespace, open_tun,
    unmount_bpffs,
};
use crate::loader::Loaded;

/// How long vnetd waits for a process's mappings: the process may block that. While the helper still reads them, other processes' are
/// unknown.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// The helper: carries out requests that arrive at `socket`, until its other end is closed.
pub fn serve(socket: &OwnedFd) {
    let mut room = vec![0; REQUEST_MAX];
    let mut worker = Worker::default();
    loop {
        let done = match receive(socket, &mut room) {
            Ok((0, _)) => return,
            Ok((len, descriptors)) => {
                let request = Request::decode(&room[..len]).ok_or(io::ErrorKind::InvalidInput.into());
                request.and_then(|request| worker.carry_out(request, descriptors.into_iter().next()))
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::EMFILE)) => Err(error),
            Err(_) => return,
        };
        let answer = encode_answer(done.as_ref().map(drop));
        let descriptors: Vec<_> = done.iter().flatten().map(AsFd::as_fd).collect();
        if send(socket, &answer, &descriptors).is_err() {
            return;
        }
    }
}

/// The helper's work, and what it remembers from one request to the next.
#[derive(Default)]
struct Worker {
    /// The last thread that has read mappings.
    reading: Option<JoinHandle<()>>,
    /// The kernel programs, from the time when vnetd has asked for them.
    programs: Option<Loaded>,
}

impl Worker {
    /// See [`super::maps_privately`]. Unknown, too, while a process blocks it.
    fn maps_privately(&mut self, pid: i32, file: File) -> Option<bool> {
        if self.reading.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return None;
        }
        let (found, is_found) = channel();
        let read = move || _ = found.send(maps_privately(pid, &file));
        self.reading = std::thread::Builder::new().spawn(read).ok();
        is_found.recv_timeout(READ_WITHIN).ok().flatten()
    }

    /// Carries out a request. Returns the descriptors that answer it.
    fn carry_out(&mut self, request: Request, passed: Option<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
        let passed = || passed.map(File::from).ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        let one = |made: OwnedFd| vec![made];
        match request {
            Request::Namespace(path) => Ok(one(open_namespace(&path)?.into())),
            Request::NewNamespace => Ok(one(make_namespace()?.into())),
            Request::Socket(kind) => entered(&passed()?, || kind.open())?.map(one),
            Request::OwnPackets => Kind::PACKETS.open().map(one),
            Request::Tun => Ok(one(entered(&passed()?, open_tun)??.into())),
            Request::DisableIpv6(device) => {
                entered(&passed()?, || disable_ipv6_here(&device))?.map(|()| vec![])
            }
            Request::Mount(folder) => mount_bpffs(&folder).map(|()| vec![]),
            Request::Unmount(folder) => unmount_bpffs(&folder).map(|()| vec![]),
            Request::NamespaceWith(device, inode) => Ok(one(find_namespace((device, inode))?.into())),
            Request::LoadPrograms(folder) => {
                let (programs, maps) = Loaded::load(folder.as_deref())?;
                self.programs = Some(programs);
                Ok(maps.into())
            }
            Request::MapsPrivately(pid) => match self.maps_privately(pid, passed()?) {
                Some(true) => Ok(vec![]),
                Some(false) => Err(io::Error::from_raw_os_error(libc::EEXIST)),
                None => Err(io::Error::from_raw_os_error(libc::ENOENT)),
            },
            Request::Attach(attach) => {
                let none = || io::Error::other("no programs are loaded");
                self.programs
                    .as_mut()
                    .ok_or_else(none)?
                    .attach(&attach)
                    .map(|link| link.into_iter().collect())
            }
        }
    }
}
