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
    // The probe does not disturb the live socket, with or without a front end.
    let guest = Guest::connect(&path, 1);
    assert!(matches!(start(options(&path, 1)), Err(VhostUserError::Listen(ListenError::InUse(_)))));
    drop(guest);
    drop(Guest::connect(&path, 1));
    first.stop();
    assert!(!path.exists());
    // Another process has replaced the socket file: it is not removed.
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

    // While waiting for the rest of a header, and of a message.
    for part in [&[1u8, 0, 0][..], &[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1]] {
        let interface = start(options(&path, 1)).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(part).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        prompt(interface);
    }
}
