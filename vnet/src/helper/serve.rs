//! The helper's loop.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::message::{Kind, REQUEST_MAX, Request, encode_answer, receive, send};
use super::work::{
    disable_ipv6_here, entered, find_namespace, make_namespace, mount_bpffs, open_namespace, open_tun,
    unmount_bpffs,
};
use crate::loader::Loaded;

/// The helper: carries out requests that arrive at `socket`, until its other end is closed.
pub fn serve(socket: &OwnedFd) {
    let mut room = vec![0; REQUEST_MAX];
    let mut worker = Worker { programs: None };
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
struct Worker {
    /// The kernel programs, from the time when vnetd has asked for them.
    programs: Option<Loaded>,
}

impl Worker {
    /// Carries out a request. Returns the descriptors that answer it.
    fn carry_out(&mut self, request: Request, namespace: Option<OwnedFd>) -> io::Result<Vec<OwnedFd>> {
        let namespace = || namespace.map(File::from).ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        let one = |made: OwnedFd| vec![made];
        match request {
            Request::Namespace(path) => Ok(one(open_namespace(&path)?.into())),
            Request::NewNamespace => Ok(one(make_namespace()?.into())),
            Request::Socket(kind) => entered(&namespace()?, || kind.open())?.map(one),
            Request::OwnPackets => Kind::PACKETS.open().map(one),
            Request::Tun => Ok(one(entered(&namespace()?, open_tun)??.into())),
            Request::DisableIpv6(device) => {
                entered(&namespace()?, || disable_ipv6_here(&device))?.map(|()| vec![])
            }
            Request::Mount(folder) => mount_bpffs(&folder).map(|()| vec![]),
            Request::Unmount(folder) => unmount_bpffs(&folder).map(|()| vec![]),
            Request::NamespaceWith(device, inode) => Ok(one(find_namespace((device, inode))?.into())),
            Request::LoadPrograms(folder) => {
                let (programs, maps) = Loaded::load(folder.as_deref())?;
                self.programs = Some(programs);
                Ok(maps.into())
            }
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
