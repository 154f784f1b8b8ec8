//! Hosts that meet at this relay go on to meet in the next vnetd (`vnetd --take-over`), without a new meeting.
//!
//! ```text
//!   running                                             next
//!   1 hand_over: sockets of all pairs             ----> Relay::start: holds them
//!   2 rest: no datagram is forwarded any more           (datagrams wait in the sockets)
//!   3 states: each pair that has met              ----> PairState::parse, Relay::resume: forwards
//! ```
//!
//! From step 1 on no pair is added or removed. TCP connections of hosts that are meeting end with the running vnetd, and their hosts ask
//! again, as after any handshake that fails (link/succession.rs). If the next vnetd fails, the running one goes on with [`Relay::go_on`].
//!
//! The encoded state of a pair, in the form of succession_bytes.rs:
//!
//! ```text
//!   version 1 | names of the hosts: length 2, name | UDP port 2 | for each host:
//!     id 8 | key 32 | number of the last registration 8 | address registered | ms since then 8 | its certificates; none: it has not met the other
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;

use super::client::{ID_LEN, KEY_LEN, NAME_MAX};
use super::relay::{Pair, Relay, RelayState, Side};
use crate::link::succession_bytes::{
    Reader, SealedBytes, SuccessionError, certificates_len, write_address, write_age, write_certificates,
};

const VERSION: u8 = 1;
/// Bytes of a side besides its certificates: the address takes at most 23.
const SIDE_LEN: usize = ID_LEN + KEY_LEN + 8 + 23 + 8;

/// Two hosts that meet at the running vnetd.
pub struct PairState {
    names: [String; 2],
    port: u16,
    sides: [Side; 2],
}

/// While it exists, the relay adds and removes no pair.
pub struct Frozen<'a>(&'a RelayState);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.frozen.store(false, Relaxed);
    }
}

impl Relay {
    /// Step 1: duplicates of the sockets of all pairs.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn hand_over(&self) -> io::Result<(Vec<OwnedFd>, Frozen<'_>)> {
        // Under the lock, so that no pair is being made.
        let pairs = self.state.pairs.lock();
        self.state.frozen.store(true, Relaxed);
        let frozen = Frozen(&self.state);
        let sockets = pairs.values().map(|pair| pair.socket.as_fd().try_clone_to_owned());
        Ok((sockets.collect::<io::Result<_>>()?, frozen))
    }

    /// Step 2: forwards nothing and admits no host, until [`Relay::go_on`].
    pub fn rest(&self) {
        self.state.resting.store(true, Relaxed);
        // Waits for the forwarding thread, which checks `resting` under this lock.
        drop(self.state.forwarding.lock());
    }

    /// Step 3, after [`Relay::rest`]: each pair that has met.
    pub fn states(&self) -> Vec<SealedBytes> {
        let pairs = self.state.pairs.lock();
        let state = |pair: &Arc<Pair>| {
            let sides = pair.sides.lock();
            let has_met = sides.iter().any(|side| !side.chain.is_empty());
            has_met.then(|| to_bytes(&pair.names, pair.port, &sides))
        };
        pairs.values().filter_map(state).collect()
    }

    /// The next vnetd has failed, and its process is dead.
    pub fn go_on(&self) {
        self.state.resting.store(false, Relaxed);
    }

    /// Goes on with a pair of the vnetd before. Its socket was handed over.
    pub fn resume(&self, pair: PairState) {
        let PairState { names, port, sides } = pair;
        let mut sockets = self.state.inherited.lock();
        let Some(at) = sockets.iter().position(|(_, other)| *other == port) else {
            return tracing::warn!(
                "{} and {} meet anew: their UDP port {port} was not handed over",
                names[0],
                names[1]
            );
        };
        let (socket, port) = sockets.swap_remove(at);
        let mut pair = Pair::new(names.clone(), socket, port);
        pair.sides = Mutex::new(sides);
        self.state.pairs.lock().insert(names, Arc::new(pair));
    }

    /// After the last pair: closes the sockets of pairs whose hosts had not met.
    pub fn resumed(&self) {
        self.state.inherited.lock().clear();
    }
}

fn to_bytes(names: &[String; 2], port: u16, sides: &[Side; 2]) -> SealedBytes {
    let certificates: usize = sides.iter().map(|side| certificates_len(&side.chain)).sum();
    let len = 1 + names.iter().map(|name| 2 + name.len()).sum::<usize>() + 2 + 2 * SIDE_LEN + certificates;
    // Written without growing: a vector that grows leaves its former bytes in freed memory.
    let mut out = SealedBytes::new(Vec::with_capacity(len));
    out.push(VERSION);
    for name in names {
        out.extend_from_slice(&(name.len() as u16).to_le_bytes());
        out.extend_from_slice(name.as_bytes());
    }
    out.extend_from_slice(&port.to_le_bytes());
    for side in sides {
        out.extend_from_slice(&side.id);
        out.extend_from_slice(&side.key);
        out.extend_from_slice(&side.number.to_le_bytes());
        write_address(side.at.map(|(at, _)| at), &mut out);
        write_age(side.at.map(|(_, since)| since), &mut out);
        write_certificates(&side.chain, &mut out);
    }
    debug_assert!(out.len() <= len);
    out
}

impl PairState {
    /// Decodes the state.
    ///
    /// # Errors
    /// It is not one, or it contradicts itself.
    pub fn parse(bytes: &[u8]) -> Result<PairState, SuccessionError> {
        let mut from = Reader::new(bytes)?;
        if from.u8()? != VERSION {
            return Err(SuccessionError("another version"));
        }
        let names = [from.name(NAME_MAX)?.to_owned(), from.name(NAME_MAX)?.to_owned()];
        let is_lower = |name: &String| !name.bytes().any(|byte| byte.is_ascii_uppercase());
        if names[0] >= names[1] || !names.iter().all(is_lower) {
            return Err(SuccessionError("the names of a pair"));
        }
        let port = from.u16()?;
        let sides = [read_side(&mut from)?, read_side(&mut from)?];
        from.end()?;
        Ok(PairState { names, port, sides })
    }

    /// Encodes it again.
    #[cfg(any(test, feature = "test-util"))]
    pub(in crate::link) fn to_bytes(&self) -> SealedBytes {
        to_bytes(&self.names, self.port, &self.sides)
    }
}

fn read_side(from: &mut Reader<'_>) -> Result<Side, SuccessionError> {
    let (id, key, number) = (from.array()?, from.array()?, from.u64()?);
    let (at, since) = (from.address()?, from.age()?);
    if at.is_some() != since.is_some() {
        return Err(SuccessionError("an address without a time"));
    }
    Ok(Side { id, key, number, at: at.zip(since), chain: from.certificates()? })
}
