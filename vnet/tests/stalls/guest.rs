//! A guest in this process: a vhost-user front end and a driver that sleeps until it is notified.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost::VhostBackend;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vmm_sys_util::eventfd::EventFd;
use vnet::interface::virtqueue::{DESC_WRITE, Descriptor};
use vnet::wire::ethernet::Mac;

use super::ring::{Memory, RING_SPACE, Ring, SIZE};

/// MRG_RXBUF, EVENT_IDX, PROTOCOL_FEATURES, VERSION_1.
const FEATURES: u64 = 1 << 15 | 1 << 29 | 1 << 30 | 1 << 32;
const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
/// Size in bytes of the buffer of each chain, in both rings.
const BUFFER: usize = 256;
const BUFFERS: usize = 2 * RING_SPACE;
const MEMORY: usize = BUFFERS + 2 * SIZE as usize * BUFFER;
const HEADER: usize = 12;
const FRAME: usize = 60;
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

/// The buffer of a chain of queue `index`.
fn buffer(index: usize, chain: u16) -> usize {
    BUFFERS + (index * usize::from(SIZE) + usize::from(chain)) * BUFFER
}

/// A guest with one pair of queues.
pub struct Guest {
    rings: [Ring; 2],
    free: Vec<u16>,
    /// Keeps the connection open.
    _frontend: Frontend,
    memory: Memory,
}

impl Guest {
    /// Connects to an interface, starts both rings like QEMU, and offers every receive buffer.
    pub fn connect(socket: &Path) -> Guest {
        let memory = Memory::new("guest", MEMORY);
        let mut frontend = Frontend::from_stream(UnixStream::connect(socket).unwrap(), 2);
        frontend.set_owner().unwrap();
        assert_eq!(frontend.get_features().unwrap() & FEATURES, FEATURES);
        let protocol = frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(protocol).unwrap();
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        frontend.set_features(FEATURES).unwrap();
        frontend.set_mem_table(&[memory.region(0)]).unwrap();
        let rings = [RECEIVE, TRANSMIT].map(|index| Ring::new(index * RING_SPACE));
        for (index, ring) in rings.iter().enumerate() {
            for chain in 0..SIZE {
                let flags = if index == RECEIVE { DESC_WRITE } else { 0 };
                let len = if index == RECEIVE { BUFFER } else { HEADER + FRAME };
                let addr = buffer(index, chain) as u64;
                ring.describe(&memory, chain, Descriptor { addr, len: len as u32, flags, next: 0 });
            }
            ring.start(&mut frontend, index, &memory);
        }
        let mut guest = Guest { rings, free: (0..SIZE).collect(), _frontend: frontend, memory };
        (0..SIZE).for_each(|chain| guest.rings[RECEIVE].offer(&guest.memory, chain));
        guest
    }

    /// The descriptor by which the device notifies the guest of received frames.
    pub fn call(&self) -> EventFd {
        self.rings[RECEIVE].call.try_clone().unwrap()
    }

    /// Goes to sleep with no notification left over. Returns false if a frame has arrived already.
    pub fn sleeps(&self) -> bool {
        let _ = self.rings[RECEIVE].call.read();
        self.rings[RECEIVE].arm(&self.memory)
    }

    /// Sends one frame that carries `number`.
    pub fn send(&mut self, to: Mac, from: Mac, number: u64) {
        let ring = &mut self.rings[TRANSMIT];
        while let Some(chain) = ring.collect(&self.memory) {
            self.free.push(chain);
        }
        let chain = self.free.pop().expect("the device gives chains back before as many frames are sent");
        let mut bytes = [0; HEADER + FRAME];
        let frame = [&to.0[..], &from.0, &ETHERTYPE, &number.to_be_bytes()].concat();
        bytes[HEADER..HEADER + frame.len()].copy_from_slice(&frame);
        self.memory.write(buffer(TRANSMIT, chain), bytes);
        ring.offer(&self.memory, chain);
    }

    /// The number in the next frame; `None` if none arrives within `time`.
    pub fn take(&mut self, time: Duration) -> Option<u64> {
        let end = Instant::now() + time;
        loop {
            let ring = &mut self.rings[RECEIVE];
            while let Some(chain) = ring.collect(&self.memory) {
                let bytes: [u8; HEADER + FRAME] = self.memory.read(buffer(RECEIVE, chain));
                ring.offer(&self.memory, chain);
                let frame = &bytes[HEADER..];
                if frame[12..14] == ETHERTYPE {
                    return Some(u64::from_be_bytes(frame[14..22].try_into().unwrap()));
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            if ring.arm(&self.memory) {
                ring.sleep(left);
                if end <= Instant::now() {
                    return None;
                }
            }
        }
    }
}
