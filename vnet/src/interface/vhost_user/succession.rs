//! A running vnetd hands a guest to another one: the connection with the front end, and everything that the front end has said so far.
//!
//! The guest's memory and eventfds are passed as descriptors. Positions in the rings are not: they are in the guest's memory, where the next
//! vnetd goes on at the used index. While a guest is handed over, no message of its front end is handled; they wait in the socket.
//!
//! Crate `vhost` keeps the acknowledged features of a connection for itself. So the next vnetd plays the two messages that set them on a
//! socket pair, and then puts the real connection in the place of its end.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::MutexGuard;
use vhost::vhost_user::message::{FrontendReq, VhostUserMemoryRegion, VhostUserVringAddrFlags};
use vhost::vhost_user::{Error, Result, VhostUserBackendReqHandlerMut};

use super::control::{Connection, Endpoint, Stop};
use super::features;
use super::queue_pairs::Device;
use super::session::{Session, refuse};
use crate::inherit::{self, GuestState, Inheritance, RegionState};
use crate::unix::Peer;

/// How long a message may be under way: then the front end has sent only a part of it.
const MESSAGE_WITHIN: Duration = Duration::from_millis(500);
/// Length of a message with a 64-bit payload in bytes.
const MESSAGE_LEN: usize = 20;
/// Flags of a message: version 1.
const VERSION: u32 = 1;

/// What another vnetd needs of a guest: descriptors, the front end's state, and the guard that keeps it from changing.
type Handed<'a> = (Vec<(&'static str, OwnedFd)>, GuestState, MutexGuard<'a, ()>);

/// Hands over the guest of `device`.
///
/// # Errors
/// Why it cannot be handed over now, in one line.
pub(super) fn hand_over<'a>(
    device: &'a Device,
    endpoint: &Endpoint,
    stop: &Stop,
) -> std::result::Result<Handed<'a>, String> {
    let turn =
        device.turn.try_lock_for(MESSAGE_WITHIN).ok_or("its front end has sent a part of a message")?;
    let failed = |error: io::Error| format!("cannot duplicate a descriptor: {error}");
    let (mut files, mut state) = (vec![], GuestState::default());
    if let Endpoint::Listen(listener) = endpoint {
        files.push(("listener", listener.as_fd().try_clone_to_owned().map_err(failed)?));
    }
    let connected = stop.served(|stream, session| {
        files.push(("stream", stream.as_fd().try_clone_to_owned().map_err(failed)?));
        session.hand_over(&mut state, &mut files)
    });
    if connected.transpose()?.is_some() {
        for index in 0..device.vrings() {
            let vring = device.look(index, |vring| vring.hand_over(&mut files)).transpose();
            state.vrings.extend(vring.map_err(failed)?);
        }
        state.departed = device.departed.load(Ordering::Acquire);
    }
    Ok((files, state, turn))
}

/// A guest that was handed over and whose rings have not started yet.
pub(super) struct Waiting {
    connection: Connection,
    /// Of each vring, if it was started: its kick, unless the guest does not notify.
    kicks: Vec<Option<Option<File>>>,
    enabled: Vec<bool>,
}

/// Takes over the connection of interface `name`, if a front end was connected. The rings start with [`Waiting::start`].
///
/// # Errors
/// A descriptor is missing, or something is invalid.
pub(super) fn take_over(
    device: &Arc<Device>,
    name: &str,
    inheritance: &Inheritance,
) -> Result<Option<Waiting>> {
    let take = |kind| inheritance.take(&inherit::interface(name, kind));
    let Some(stream) = take("stream").pop() else { return Ok(None) };
    let stream = UnixStream::from(stream);
    let state = inheritance.guest(name).ok_or_else(|| refuse("the state of its guest is missing"))?;
    let [mut regions, mut kicks, mut calls, mut errors] =
        ["region", "kick", "call", "error"].map(|kind| take(kind).into_iter().map(File::from));
    let next = |files: &mut dyn Iterator<Item = File>, wanted: bool| match wanted {
        true => files.next().map(Some).ok_or_else(|| refuse("a descriptor of its guest is missing")),
        false => Ok(None),
    };
    let peer = Peer::of(&stream).map_err(Error::SocketError)?;
    let connection = replay(device, stream, peer, &state)?;
    let (mut started, mut enabled) = (vec![], vec![]);
    {
        let mut session = connection.session();
        let files: Vec<File> = regions.by_ref().collect();
        if !state.regions.is_empty() {
            session.set_mem_table(&state.regions.iter().map(region).collect::<Vec<_>>(), files, None)?;
        }
        for (index, vring) in (0..).zip(&state.vrings) {
            if let Some(size) = vring.size {
                session.set_vring_num(index, size)?;
            }
            if let Some([descriptors, available, used]) = vring.addresses {
                let flags = match vring.used_log {
                    Some(_) => VhostUserVringAddrFlags::VHOST_VRING_F_LOG,
                    None => VhostUserVringAddrFlags::empty(),
                };
                let log = vring.used_log.unwrap_or(0);
                session.set_vring_addr(index, flags, descriptors, used, available, log)?;
            }
            session.set_vring_base(index, vring.base.into())?;
            let number = u8::try_from(index).map_err(|_| refuse("more vrings than an interface has"))?;
            session.set_vring_call(number, next(&mut calls, vring.call)?)?;
            session.set_vring_err(number, next(&mut errors, vring.error)?)?;
            started.push(match vring.kick {
                Some(notifies) => Some(next(&mut kicks, notifies)?),
                None => None,
            });
            enabled.push(vring.enabled);
        }
    }
    device.departed.store(state.departed, Ordering::Release);
    Ok(Some(Waiting { connection, kicks: started, enabled }))
}

fn region(state: &RegionState) -> VhostUserMemoryRegion {
    VhostUserMemoryRegion {
        guest_phys_addr: state.guest_addr,
        memory_size: state.len,
        user_addr: state.user_addr,
        mmap_offset: state.offset,
    }
}

impl Waiting {
    /// Starts the rings: the running vnetd stands still. Returns the connection, which the control thread serves from now on.
    pub(super) fn start(self) -> Connection {
        let Waiting { connection, kicks, enabled } = self;
        {
            let mut session = connection.session();
            for (index, (kick, enabled)) in (0..).zip(kicks.into_iter().zip(enabled)) {
                // The vrings exist: `take_over` has set other values of theirs.
                let _ = session.set_vring_enable(index, enabled);
                if let Some(kick) = kick {
                    let _ = session.set_vring_kick(index as u8, kick);
                }
            }
            // A signal may have waited for the other vnetd's own thread.
            session.notify();
        }
        connection
    }
}

/// A connection on `stream` with the acknowledged features of `state`.
fn replay(device: &Arc<Device>, stream: UnixStream, peer: Peer, state: &GuestState) -> Result<Connection> {
    let (mut front, back) = UnixStream::pair().map_err(Error::SocketError)?;
    let place = back.as_raw_fd();
    let mut connection = Connection::new(device.clone(), back, peer)?;
    let said = [
        (FrontendReq::GET_FEATURES, None),
        (FrontendReq::SET_FEATURES, Some(state.features)),
        (FrontendReq::SET_PROTOCOL_FEATURES, Some(state.protocol)),
    ];
    let has_protocol = state.features & features::PROTOCOL_FEATURES != 0;
    for (request, value) in said.into_iter().take(if has_protocol { 3 } else { 2 }) {
        front.write_all(&message(request, value)).map_err(Error::SocketError)?;
        if !connection.message()? {
            return Err(Error::Disconnected);
        }
    }
    connection.move_to(stream, place)?;
    Ok(connection)
}

/// A message of a front end (vhost-user, "Header").
fn message(request: FrontendReq, value: Option<u64>) -> Vec<u8> {
    let size = if value.is_some() { 8_u32 } else { 0 };
    let mut bytes = Vec::with_capacity(MESSAGE_LEN);
    for word in [request as u32, VERSION, size] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(value.into_iter().flat_map(u64::to_ne_bytes));
    bytes
}

impl Session {
    /// Adds what the front end has said about the device as a whole.
    fn hand_over(
        &self,
        state: &mut GuestState,
        files: &mut Vec<(&'static str, OwnedFd)>,
    ) -> std::result::Result<(), String> {
        if self.common().log.is_some() {
            return Err("its guest is being migrated; take over afterwards".into());
        }
        (state.features, state.protocol) = (self.common().features, self.protocol());
        for region in self.regions() {
            let spec = region.spec();
            let (guest_addr, user_addr, len, offset) =
                (spec.guest_addr, spec.user_addr, spec.len, spec.offset);
            state.regions.push(RegionState { guest_addr, user_addr, len, offset });
            let file = region.file().try_clone_to_owned();
            files.push(("region", file.map_err(|error| format!("cannot duplicate a descriptor: {error}"))?));
        }
        Ok(())
    }
}
