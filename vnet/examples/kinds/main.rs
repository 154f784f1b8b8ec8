//! Ways to pass a container's frames to a program: TAP devices, or packet sockets on veth pairs, with and without rings
//! (packet(7)). `lab/lab bench kinds` compares them between two containers of one host; all kinds move frames with virtio-net
//! headers and unsegmented super-frames one by one.
//!
//! Usage: `kinds tap|uring|packet|ring|rings DEVICE DEVICE spin|block`. TAP devices are created and may be moved to other
//! namespaces; the other kinds open devices of this namespace. Frames move in both directions until the program is killed.
//!
//! `uring`: TAP devices with io_uring. `ring`: receives through a ring and sends with write(2) from that ring. `rings`: also
//! sends through a ring, a burst at a time. That is not a zero-copy send: the kernel first copies frames that it sends to a veth
//! (since 4.20).

mod uring;

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::event::{PollFd, PollFlags, poll};

/// Length in bytes of the virtio-net header on all kinds.
const HEADER: usize = 10;
/// Size of a ring's slot in bytes: enough for the largest super-frame with its header.
const ROOM: usize = 1 << 17;
/// Number of slots in a ring.
const SLOTS: usize = 128;
/// Maximum number of frames moved in one direction before the other direction.
const BURST: usize = 32;
/// `PACKET_IGNORE_OUTGOING` (linux/if_packet.h).
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;

fn main() -> io::Result<()> {
    let words: Vec<String> = std::env::args().collect();
    let [_, kind, one, other, idle] = &words[..] else {
        panic!("usage: kinds tap|uring|packet|ring|rings DEVICE DEVICE spin|block");
    };
    let open = |device: &str| match kind.as_str() {
        "tap" => tap(device, libc::O_NONBLOCK),
        // io_uring keeps a read armed only on blocking files.
        "uring" => tap(device, 0),
        "packet" => packet(device, false, false),
        "ring" => packet(device, true, false),
        "rings" => packet(device, true, true),
        _ => panic!("'{kind}' is neither tap nor uring nor packet nor ring nor rings"),
    };
    let (mut one, mut other) = (open(one)?, open(other)?);
    if kind == "uring" {
        return uring::forward([&one.file, &other.file], idle == "block");
    }
    let mut room = vec![0; ROOM];
    loop {
        let moved = forward(&mut one, &mut other, &mut room)? + forward(&mut other, &mut one, &mut room)?;
        if moved == 0 && idle == "block" {
            let mut both = [PollFd::new(&one.file, PollFlags::IN), PollFd::new(&other.file, PollFlags::IN)];
            poll(&mut both, None)?;
        } else if moved == 0 {
            std::thread::yield_now();
        }
    }
}

/// Moves at most a burst. Returns the number of frames.
fn forward(from: &mut Device, to: &mut Device, room: &mut [u8]) -> io::Result<usize> {
    let mut moved = 0;
    while moved < BURST {
        match &mut from.received {
            Some(ring) => {
                let Some(frame) = ring.received() else { break };
                to.send(frame);
                ring.give_up(libc::TP_STATUS_KERNEL);
            }
            None => match from.file.read(room) {
                Ok(len) => to.send(&room[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // The device or its peer is still down.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENETDOWN)) => break,
                Err(error) => return Err(error),
            },
        }
        moved += 1;
    }
    if moved > 0 && to.sent.is_some() {
        // Makes the kernel send the ring's frames.
        let _ = to.file.write(&[]);
    }
    Ok(moved)
}

/// A TAP device or a packet socket: both prepend the virtio-net header.
struct Device {
    file: File,
    received: Option<Ring>,
    sent: Option<Ring>,
}

impl Device {
    /// Sends a frame. A frame that cannot be sent is lost, as on a network.
    fn send(&mut self, frame: &[u8]) {
        match &mut self.sent {
            Some(ring) => ring.send(frame),
            None => drop(self.file.write(frame)),
        }
    }
}

/// Creates a TAP device with virtio-net headers and TCP super-frames.
fn tap(device: &str, flags: libc::c_int) -> io::Result<Device> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open("/dev/net/tun")?;
    let mut request = request(device);
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `struct ifreq`: `request`, which this function owns.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })?;
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(offloads)) })?;
    Ok(Device { file, received: None, sent: None })
}

/// Opens a device of this namespace, with or without receive and send rings.
fn packet(device: &str, receive: bool, send: bool) -> io::Result<Device> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the call passes no pointers; the new descriptor is owned here.
    let socket = unsafe { OwnedFd::from_raw_fd(check(libc::socket(libc::AF_PACKET, kind, 0))?) };
    for option in [libc::PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING] {
        set(&socket, libc::SOL_PACKET, option, &1)?;
    }
    let (received, sent) = Ring::pair(&socket, receive, send)?;
    let buffer: libc::c_int = 8 << 20;
    set(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &buffer)?;
    set(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &buffer)?;
    let name = CString::new(device)?;
    // SAFETY: `name` is a zero-terminated string that lives across the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) } as libc::c_int;
    let mut all = packet_mreq(index);
    all.mr_type = libc::PACKET_MR_PROMISC as libc::c_ushort;
    set(&socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &all)?;
    // SAFETY: plain data, for which all zeros is a valid value.
    let mut address = unsafe { std::mem::zeroed::<libc::sockaddr_ll>() };
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = index;
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: `address` is a socket address of the stated length.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) })?;
    Ok(Device { file: File::from(socket), received, sent })
}

/// A TPACKET_V2 ring (packet_mmap), one frame per slot.
struct Ring {
    memory: NonNull<u8>,
    next: usize,
}

impl Ring {
    /// Creates the rings in one mapping: first the receive ring, then the send ring.
    fn pair(socket: &OwnedFd, receive: bool, send: bool) -> io::Result<(Option<Ring>, Option<Ring>)> {
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        set(socket, libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        let layout = libc::tpacket_req {
            tp_block_size: ROOM as u32,
            tp_block_nr: SLOTS as u32,
            tp_frame_size: ROOM as u32,
            tp_frame_nr: SLOTS as u32,
        };
        // Frames that the kernel refuses release their slots.
        set(socket, libc::SOL_PACKET, libc::PACKET_LOSS, &1)?;
        let wanted = [(receive, libc::PACKET_RX_RING), (send, libc::PACKET_TX_RING)];
        let options: Vec<_> =
            wanted.into_iter().filter_map(|(wanted, option)| wanted.then_some(option)).collect();
        for option in &options {
            set(socket, libc::SOL_PACKET, *option, &layout)?;
        }
        if options.is_empty() {
            return Ok((None, None));
        }
        let (len, access) = (ROOM * SLOTS * options.len(), libc::PROT_READ | libc::PROT_WRITE);
        let fd = socket.as_raw_fd();
        // SAFETY: a new mapping of the socket's rings, of the length just configured; it is never unmapped.
        let memory = unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, fd, 0) };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(memory.cast::<u8>()).expect("a mapping");
        // SAFETY: with two rings the mapping is twice as long; with one ring, the second is not created.
        let second = || unsafe { first.add(ROOM * SLOTS) };
        let ring = |memory| Ring { memory, next: 0 };
        Ok(match (receive, send) {
            (true, true) => (Some(ring(first)), Some(ring(second()))),
            (true, false) => (Some(ring(first)), None),
            (false, _) => (None, Some(ring(first))),
        })
    }

    /// Pointer to the header of the next slot: `struct tpacket2_hdr`.
    fn place(&self) -> *mut u8 {
        // SAFETY: `next` is less than SLOTS, and the mapping has SLOTS slots.
        unsafe { self.memory.as_ptr().add(self.next * ROOM) }
    }

    /// The status of the next slot, which identifies the slot's owner.
    fn status(&self) -> &AtomicU32 {
        // SAFETY: the status is the first member of a page-aligned slot; the kernel also writes it as one word.
        unsafe { AtomicU32::from_ptr(self.place().cast()) }
    }

    /// The next frame behind its virtio-net header, if any.
    fn received(&self) -> Option<&[u8]> {
        if self.status().load(Ordering::Acquire) & libc::TP_STATUS_USER == 0 {
            return None;
        }
        // SAFETY: this process owns the slot until its status changes, and the slot begins with this header.
        let header = unsafe { self.place().cast::<libc::tpacket2_hdr>().read() };
        let start = usize::from(header.tp_mac) - HEADER;
        let len = HEADER + header.tp_snaplen as usize;
        assert!(start + len <= ROOM, "the kernel keeps to the place");
        // SAFETY: within the slot, as asserted above, which this process owns.
        Some(unsafe { std::slice::from_raw_parts(self.place().add(start), len) })
    }

    /// Puts a frame into the next slot, or drops it if the ring is full.
    fn send(&mut self, frame: &[u8]) {
        /// Offset of an outgoing frame in its slot: `TPACKET2_HDRLEN` without the socket address.
        const START: usize = size_of::<libc::tpacket2_hdr>();
        if self.status().load(Ordering::Acquire) != libc::TP_STATUS_AVAILABLE || frame.len() > ROOM - START {
            return;
        }
        let header = self.place().cast::<libc::tpacket2_hdr>();
        // SAFETY: this process owns the slot until its status changes; the slot is large enough for the header and, as checked
        // above, the frame.
        unsafe {
            (&raw mut (*header).tp_len).write(frame.len() as u32);
            std::ptr::copy_nonoverlapping(frame.as_ptr(), self.place().add(START), frame.len());
        }
        self.give_up(libc::TP_STATUS_SEND_REQUEST);
    }

    /// Passes the slot to the kernel and moves on to the next one.
    fn give_up(&mut self, status: u32) {
        self.status().store(status, Ordering::Release);
        self.next = (self.next + 1) % SLOTS;
    }
}

fn request(device: &str) -> libc::ifreq {
    // SAFETY: plain data, for which all zeros is a valid value.
    let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
    assert!(device.len() < request.ifr_name.len(), "a device's name has at most 15 characters");
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn packet_mreq(index: libc::c_int) -> libc::packet_mreq {
    libc::packet_mreq { mr_ifindex: index, mr_type: 0, mr_alen: 0, mr_address: [0; 8] }
}

fn set<T>(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, value: &T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is readable for the stated length.
    let result =
        unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, std::ptr::from_ref(value).cast(), len) };
    check(result).map(drop)
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
