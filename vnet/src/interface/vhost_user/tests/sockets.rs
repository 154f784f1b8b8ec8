//! Ownership of the socket file, and stopping the control thread.

use std::io::Write;
use std::os::unix::net::UnixListener;

use super::*;
use crate::unix::ListenError;

fn start(options: VhostUserOptions) -> Result<Arc<VhostUser>, VhostUserError> {
    VhostUser::start(options, PortId(1), NetworkId::DEFAULT, Arc::new(PortStats::default()))
}

#[test]
fn replaces_a_stale_socket_but_not_a_live_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    // Dropping a listener leaves its socket file behind, as a killed process does.
    drop(UnixListener::bind(&path).unwrap());
    let first = start(options(&path, 1)).unwrap();
    let error = start(options(&path, 1)).err().unwrap();
    assert!(matches!(error, VhostUserError::Listen(ListenError::InUse(_))));
    assert!(error.to_string().contains("is in use by a running process (it answered)"));
    // Probing the socket does not disturb it, with or without a front end.
    let guest = Guest::connect(&path, 1);
    assert!(matches!(start(options(&path, 1)), Err(VhostUserError::Listen(ListenError::InUse(_)))));
    drop(guest);
    drop(Guest::connect(&path, 1));
    first.stop();
    assert!(!path.exists());
    // Another process has replaced the socket file, so vnetd does not remove it.
    let first = start(options(&path, 1)).unwrap();
    std::fs::remove_file(&path).unwrap();
    let _other = UnixListener::bind(&path).unwrap();
    first.stop();
    drop(first);
    assert!(path.exists());
}

#[test]
fn refuses_bad_paths_and_options() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(start(options(&path, 1)), Err(VhostUserError::Listen(ListenError::NotASocket(_)))));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let below = path.join("s");
    assert!(matches!(start(options(&below, 1)), Err(VhostUserError::Listen(ListenError::System { .. }))));
    let path = folder.path().join("x".repeat(108));
    assert!(matches!(start(options(&path, 1)), Err(VhostUserError::Listen(ListenError::PathTooLong(_)))));
    let path = folder.path().join("s");
    assert!(matches!(start(options(&path, 0)), Err(VhostUserError::Queues(0))));
    assert!(matches!(start(options(&path, 129)), Err(VhostUserError::Queues(129))));
    assert!(matches!(start(VhostUserOptions { mtu: 67, ..options(&path, 1) }), Err(VhostUserError::Mtu(67))));
}

#[test]
fn a_client_reconnects_whenever_the_front_end_comes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut host = Host::at(VhostUserOptions { server: false, ..options(&path, 1) });
    wait_for("an attempt", || host.reason().contains("cannot reach QEMU"));
    for round in 0..2 {
        let listener = UnixListener::bind(&path).unwrap();
        let mut guest = Guest::from_stream(listener.accept().unwrap().0, 1);
        guest.start();
        guest.transmit(&frame(60, round));
        assert_eq!(host.receive(), [frame(60, round)]);
        std::fs::remove_file(&path).unwrap();
        drop((listener, guest));
        wait_for("the end", || !host.is_up());
    }
    // A client does not remove the socket file.
    let _listener = UnixListener::bind(&path).unwrap();
    host.interface.stop();
    assert!(path.exists());
}

#[test]
fn stop_is_prompt_wherever_the_thread_blocks() {
    let prompt = |interface: Arc<VhostUser>| {
        let begin = Instant::now();
        interface.stop();
        assert!(begin.elapsed() < Duration::from_secs(2));
        assert_eq!(interface.state(), State::Down("stopped".into()));
        // Stopping twice is harmless.
        interface.stop();
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    prompt(start(options(&path, 1)).unwrap());
    prompt(start(VhostUserOptions { server: false, ..options(&path, 1) }).unwrap());

    let interface = start(options(&path, 1)).unwrap();
    let mut guest = Guest::connect(&path, 1);
    guest.start();
    prompt(interface);
    assert!(guest.is_closed());

    // Stops while the thread waits for the rest of a header, and of a message.
    for part in [&[1u8, 0, 0][..], &[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1]] {
        let interface = start(options(&path, 1)).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        prompt(interface);
    }
}

fn notes(host: &Host) -> String {
    host.interface.notes().join("; ")
}

/// A VM that is given another VM's socket is refused at once, and does not get the socket later.
#[test]
fn a_second_front_end_is_refused_at_once() {
    let mut host = Host::new(1);
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    assert_eq!(notes(&host), "");
    for _ in 0..3 {
        let mut second = UnixStream::connect(&host.path).unwrap();
        second.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(io::Read::read(&mut second, &mut [0]).unwrap(), 0, "it is closed");
    }
    let me = format!("process {} of user", std::process::id());
    assert!(notes(&host).contains(&me) && notes(&host).contains("a socket of its own"), "{}", notes(&host));
    // The first front end stays connected, and after it another one is served.
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
    drop(guest);
    wait_for("the end", || !host.is_up());
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    assert!(host.is_up());
}

#[test]
fn only_allowed_processes_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let uid = rustix::process::geteuid().as_raw();
    let peer = AllowedPeer { uid: Some(uid + 1), gid: None };
    let host = Host::at(VhostUserOptions { peer, ..options(&path, 1) });
    let mut stranger = UnixStream::connect(&path).unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(io::Read::read(&mut stranger, &mut [0]).unwrap(), 0, "it is closed");
    assert!(notes(&host).contains("may not connect; peer_user and peer_group"), "{}", notes(&host));
    drop(host);
    let peer = AllowedPeer { uid: Some(uid), gid: Some(rustix::process::getegid().as_raw()) };
    let host = Host::at(VhostUserOptions { peer, ..options(&path, 1) });
    Guest::connect(&path, 1).start();
    drop(host);
    // The same holds for a client interface.
    let listener = UnixListener::bind(&path).unwrap();
    let peer = AllowedPeer { uid: Some(uid + 1), gid: None };
    let host = Host::at(VhostUserOptions { server: false, peer, ..options(&path, 1) });
    let (mut stranger, _) = listener.accept().unwrap();
    stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(io::Read::read(&mut stranger, &mut [0]).unwrap(), 0, "it is closed");
    wait_for("the reason", || host.reason().contains("is refused"));
}

/// A socket whose last close blocks for a minute, because it lingers over unread data.
fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (unread, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 0x1_0000]).is_ok() {}
    socket.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).unwrap();
    (socket, unread)
}

/// Drops a reference that is the last one if vnetd was faster: then it blocks.
fn drop_elsewhere(socket: std::net::TcpStream) {
    std::thread::spawn(move || drop(socket));
}

/// SET_MEM_TABLE with one region.
fn memory_table() -> Vec<u8> {
    let words = [1u64, 0x1000, 0x1000, 0x1000, 0];
    let header: Vec<u8> = [5u32, 1, 40].iter().flat_map(|word| word.to_ne_bytes()).collect();
    [header, words.iter().flat_map(|word| word.to_ne_bytes()).collect()].concat()
}

#[test]
fn a_descriptor_that_blocks_when_closed_blocks_nobody() {
    use vmm_sys_util::sock_ctrl_msg::ScmSocket;
    let mut host = Host::new(1);
    let begin = Instant::now();
    let (socket, unread) = lingering();
    let mut guest = Guest::connect(&host.path, 1);
    guest.raw.send_with_fds(&[&memory_table()[..]], &[socket.as_raw_fd()]).unwrap();
    drop_elsewhere(socket);
    assert!(guest.is_closed(), "a socket is no memory");
    // The next front end is served.
    let mut guest = Guest::connect(&host.path, 1);
    guest.start();
    guest.transmit(&frame(60, 1));
    assert_eq!(host.receive(), [frame(60, 1)]);
    // Sends one more socket, which the control thread never receives: it is in flight when the connection ends.
    let (socket, more) = lingering();
    let half = &memory_table()[..8];
    guest.raw.send_with_fds(&[half], &[socket.as_raw_fd()]).unwrap();
    drop_elsewhere(socket);
    host.interface.stop();
    assert!(guest.is_closed());
    assert!(!host.path.exists());
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    drop((unread, more));
}

#[test]
fn bounds_the_memory_that_a_front_end_shares() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let host = Host::at(VhostUserOptions { memory_max: Some(4 << 20), ..options(&path, 1) });
    let guest = Guest::connect(&path, 1);
    let small = VhostUserMemoryRegionInfo { memory_size: 4 << 20, ..guest.region() };
    guest.frontend.set_mem_table(&[small]).unwrap();
    let next = VhostUserMemoryRegionInfo {
        guest_phys_addr: 1 << 30,
        userspace_addr: 1 << 40,
        memory_size: 0x1000,
        ..guest.region()
    };
    let mut guest = guest;
    assert!(guest.frontend.add_mem_region(&next).is_err(), "4 KiB more than the limit");
    assert!(guest.is_closed());
    let mut guest = Guest::connect(&path, 1);
    assert!(guest.frontend.set_mem_table(&[guest.region()]).is_err());
    assert!(guest.is_closed());
    drop(host);
    // Without a configured limit, the limit is this host's memory.
    let host = Host::new(1);
    let file = rustix::fs::memfd_create("vnet-huge", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 1 << 43).unwrap();
    let mut guest = Guest::connect(&host.path, 1);
    let huge =
        VhostUserMemoryRegionInfo { memory_size: 1 << 39, mmap_handle: file.as_raw_fd(), ..guest.region() };
    assert!(guest.frontend.set_mem_table(&[huge]).is_err());
    assert!(guest.is_closed());
}
