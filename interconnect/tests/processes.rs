//! Processes on this host over real sockets: the measuring program, the ring in Rust and in C, and what a peer's death does.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_linger;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketType, connect, recv, sendmsg, socket,
};
use vnet_rdma::meeting::{
    Host, KeyRequest, Keys, Message, Place, Question, Reach, Role, Sealer, Token, listen,
};
use vnet_rdma::{Access, Attachment, Endpoint, Kind, Node, Options, Peer, Region, Status};

const PERF: &str = env!("CARGO_BIN_EXE_vnet-rdma-perf");
const BOTH: Access = Access { read: true, write: true };

/// Names of endpoints at ports that were free a moment ago.
fn names(count: usize) -> Vec<String> {
    let sockets: Vec<UdpSocket> = (0..count).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    sockets.iter().map(|socket| format!("{}/0", socket.local_addr().unwrap())).collect()
}

/// Ends the process with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The folder of this test's binary, where cargo also puts the shared object.
fn built() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn ring(program: &Path) {
    let names = names(3);
    let start = |place: usize| {
        let mut command = Command::new(program);
        command.arg(place.to_string()).args(&names).env("LD_LIBRARY_PATH", built());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let running: Vec<Child> = (0..3).map(start).collect();
    for process in running {
        let Output { status, stdout, stderr } = process.wait_with_output().unwrap();
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        let packets = stdout
            .strip_prefix("10 rounds of 1048576 bytes: ")
            .and_then(|rest| rest.strip_suffix(" repeated\n")?.split_once(" packets, "))
            .map(|(sent, resent)| (sent.parse::<u64>(), resent.parse::<u64>()));
        // Ten writes and eleven messages at least.
        let is_counted = matches!(packets, Some((Ok(sent), Ok(_))) if sent >= 21);
        assert!(status.success() && is_counted, "{status} {stdout} {stderr}");
    }
}

#[test]
fn a_ring_of_rust_programs() {
    ring(Path::new(example("ring", &[]).get_program()));
}

#[test]
fn a_ring_of_c_programs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = built().join("ring-in-c");
    let mut compile = Command::new("cc");
    compile.args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&program);
    compile.arg(root.join("examples/ring.c")).arg("-I").arg(root.join("include"));
    compile.arg("-L").arg(built()).arg("-lvnet_rdma");
    assert!(compile.status().unwrap().success());
    ring(&program);
}

/// A program of examples/.
fn example(name: &str, words: &[&str]) -> Command {
    let mut command = Command::new(built().parent().unwrap().join("examples").join(name));
    command.args(words).stdout(Stdio::piped());
    command
}

/// The process, and its first line.
fn started(mut command: Command) -> (Running, String) {
    let mut running = Running(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(running.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    (running, line.trim().to_owned())
}

#[test]
fn checked_writes_pass_a_relay_that_loses_and_delays() {
    let [server, relay] = names(2).try_into().unwrap();
    let [server, relay] = [server, relay].map(|name| name.trim_end_matches("/0").to_owned());
    let (mut serving, name) = started(example("faults", &["serve", &server]));
    assert_eq!(name, format!("{server}/0"));
    let (_relaying, ready) = started(example("faults", &["relay", &relay, &server, "10", "10"]));
    assert_eq!(ready, "ready");
    let checked = example("faults", &["check", &format!("{relay}/0"), "0.5"]).output().unwrap();
    let text = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success() && text.contains("\"wrong_bytes\": 0"), "{text}");
    assert!(!text.contains("\"resent\": 0"), "lost packets were sent again: {text}");
    assert!(serving.0.wait().unwrap().success());
}

#[test]
fn copies_by_shared_memory_are_timed() {
    let output = example("copies", &["65536", "0.1"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let rate: f64 = text.trim().trim_start_matches("{\"bps\": ").trim_end_matches('}').parse().unwrap();
    assert!(output.status.success() && rate > 1e6, "{text}");
}

#[test]
fn the_measuring_program_measures() {
    let server =
        Command::new(PERF).args(["server", "127.0.0.1:0", "once"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = Running(server);
    let mut name = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut name).unwrap();
    let output = Command::new(PERF).args(["client", name.trim(), "1000000", "0.2"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    assert!(
        text.starts_with("latency_us ")
            && text.contains("\ngbit_s ")
            && text.ends_with(" attachment udp streams 0 bounces 0\n"),
        "{text}"
    );
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn a_killed_peer_is_named() {
    kill_a_peer("", Attachment::Udp);
}

#[test]
fn a_killed_peer_on_this_host_is_named() {
    with_daemon(|name| kill_a_peer(name, Attachment::SameHost));
}

fn await_attachment(endpoint: &Endpoint, peer: Peer, attachment: Attachment) {
    let begin = Instant::now();
    while endpoint.attachment(peer) != attachment && begin.elapsed() < Duration::from_secs(60) {
        endpoint.poll();
    }
    assert_eq!(endpoint.attachment(peer), attachment);
}

/// Runs `test` with the name of a daemon's socket.
fn with_daemon(test: impl FnOnce(&str) + std::panic::UnwindSafe) {
    with_host(None, test);
}

/// The same with a daemon that may know sealed links.
fn with_host(sealer: Option<Box<dyn Sealer>>, test: impl FnOnce(&str) + std::panic::UnwindSafe) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vnet-test-processes-{}-{number}", std::process::id());
    let mut host = Host::new().unwrap();
    let mut listener = Some(listen(&name).unwrap());
    host.set_places(&[Place { id: (1, 1), networks: vec![1] }], |_| listener.take());
    sealer.into_iter().for_each(|sealer| host.seal(sealer));
    let stopper = host.stopper();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !host.is_stopped() {
                host.turn(Duration::from_secs(60)).unwrap();
            }
        });
        let result = std::panic::catch_unwind(|| test(&name));
        stopper.stop();
        result.unwrap();
    });
}

/// One of two hosts with a sealed link between them, behind which all peers are.
struct Behind;

impl Sealer for Behind {
    fn reach(&mut self, _: &Place, _: &Question) -> Reach {
        Reach::Sealed
    }

    fn gone(&mut self, _: Token) {}

    fn keys(&mut self, _: Token, _: &Place, request: &KeyRequest) -> Result<Keys, Reach> {
        let (mine, theirs) = (request.nonce, request.peer_nonce);
        let [first, second] = if request.role == Role::Opener { [mine, theirs] } else { [theirs, mine] };
        let keys =
            std::array::from_fn(|place| first[place % 16] ^ second[place / 5].wrapping_add(place as u8));
        Ok(Keys { epoch: request.epoch.unwrap_or(2), keys })
    }
}

#[test]
fn the_measuring_program_seals_across_a_sealed_link() {
    with_host(Some(Box::new(Behind)), |near| {
        with_host(Some(Box::new(Behind)), |far| {
            let mut command = Command::new(PERF);
            command.args(["server", "127.0.0.1:0", "once"]).env("VNET_RDMA_MEETING", far);
            let (mut server, name) = started({
                command.stdout(Stdio::piped());
                command
            });
            let client = Command::new(PERF)
                .args(["client", &name, "1000000", "0.2"])
                .env("VNET_RDMA_MEETING", near)
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&client.stdout);
            assert!(client.status.success(), "{text} {}", String::from_utf8_lossy(&client.stderr));
            assert!(text.ends_with(" attachment sealed streams 0 bounces 0\n"), "{text}");
            assert!(server.0.wait().unwrap().success());
        });
    });
}

/// `meeting`: name of the daemon's socket, or empty.
fn kill_a_peer(meeting: &str, attachment: Attachment) {
    let mut command = Command::new(PERF);
    command.args(["server", "127.0.0.1:0"]).env("VNET_RDMA_MEETING", meeting).stdout(Stdio::piped());
    let mut server = Running(command.spawn().unwrap());
    let mut name = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut name).unwrap();
    let mut options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
    options.config.dead_after_ns = 1_000_000_000;
    options.meeting = Some(meeting.to_owned()).filter(|name| !name.is_empty());
    let node = Node::open(&options).unwrap();
    let endpoint = node.endpoint(None).unwrap();
    let region = Region::new(&endpoint, 1 << 20, BOTH).unwrap();
    let peer = vnet_rdma::resolve(name.trim()).unwrap();
    endpoint.send(peer, region.span(0, 8).unwrap(), None, 1).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Success);
    await_attachment(&endpoint, peer, attachment);
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    endpoint.send(peer, region.span(0, 1 << 20).unwrap(), None, 2).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Unreachable);
    assert_eq!(endpoint.attachment(peer), Attachment::Udp);
}

fn wait(endpoint: &Endpoint, kind: Kind) -> vnet_rdma::Completion {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if let Some(completion) = endpoint.wait(Some(Duration::from_secs(1))).filter(|c| c.kind == kind) {
            return completion;
        }
    }
    panic!("no {kind:?} in a minute");
}

fn node() -> (Node, Endpoint, Peer) {
    let options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
    let node = Node::open(&options).unwrap();
    let endpoint = node.endpoint(Some(0)).unwrap();
    let peer = Peer { address: node.address(), endpoint: 0 };
    (node, endpoint, peer)
}

/// Neither side polls while the other needs it: the threads answer.
#[test]
fn peers_are_served_while_the_application_computes() {
    let ((_a, endpoint, _), (_b, other, peer)) = (node(), node());
    let local = Region::new(&endpoint, 3 << 20, BOTH).unwrap();
    let remote = Region::new(&other, 3 << 20, BOTH).unwrap();
    remote.fill((3 << 20) - 5, b"bytes").unwrap();
    endpoint.read(peer, local.span(0, 3 << 20).unwrap(), (remote.key(), 0), 5).unwrap();
    let read = wait(&endpoint, Kind::Read);
    assert_eq!((read.status, read.len, read.context), (Status::Success, 3 << 20, 5));
    let mut bytes = [0; 5];
    local.copy_to((3 << 20) - 5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"bytes");
}

/// The library thread sleeps without a timer when the program posts and then blocks without a call of the library, so the call that
/// posts has to wake it: otherwise nobody repeats the lost handshake.
#[test]
fn packets_are_sent_again_while_the_program_blocks() {
    let (_a, endpoint, _) = node();
    let region = Region::new(&endpoint, 8, BOTH).unwrap();
    let descriptor = endpoint.descriptor().unwrap();
    let gone = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    std::thread::sleep(Duration::from_millis(100));
    endpoint.send(Peer { address, endpoint: 0 }, region.span(0, 8).unwrap(), None, 1).unwrap();
    endpoint.pause(Duration::ZERO);
    drop(gone);
    let options = Options { bind: address.into(), ..Options::default() };
    let node = Node::open(&options).unwrap();
    let _other = node.endpoint(Some(0)).unwrap();
    let mut polled = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: the entry outlives the call.
    assert_eq!(unsafe { libc::poll(&mut polled, 1, 60_000) }, 1);
    assert_eq!(endpoint.wait(Some(Duration::from_secs(60))).unwrap().status, Status::Success);
}

/// One thread sleeps in `wait` without a timer; another one posts on another endpoint and then calls no more.
#[test]
fn a_sleeping_thread_wakes_for_the_timer_of_another_ones_operation() {
    let options = Options { bind: "127.0.0.1:0".parse().unwrap(), has_thread: false, ..Options::default() };
    let a = Node::open(&options).unwrap();
    let (sleeps, posts) = (a.endpoint(Some(0)).unwrap(), a.endpoint(Some(1)).unwrap());
    let (region, inbox) = (Region::new(&posts, 8, BOTH).unwrap(), Region::new(&sleeps, 8, BOTH).unwrap());
    sleeps.receive(inbox.span(0, 8).unwrap(), 2).unwrap();
    let gone = UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(sleeps.wait(Some(Duration::from_secs(60))).is_some());
            // Only calls acknowledge, because this node has no thread of its own.
            let begin = Instant::now();
            while !is_over.load(Ordering::Relaxed) && begin.elapsed() < Duration::from_secs(60) {
                sleeps.wait(Some(Duration::from_millis(10)));
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        posts.send(Peer { address, endpoint: 0 }, region.span(0, 8).unwrap(), None, 1).unwrap();
        drop(gone);
        let node = Node::open(&Options { bind: address.into(), ..Options::default() }).unwrap();
        let other = node.endpoint(Some(0)).unwrap();
        // The peer gets the message only if the sleeping thread repeats the handshake; its answer ends that thread.
        let target = Region::new(&other, 8, BOTH).unwrap();
        other.receive(target.span(0, 8).unwrap(), 0).unwrap();
        let from = wait(&other, Kind::Receive).peer;
        other.send(Peer { endpoint: 0, ..from }, target.span(0, 8).unwrap(), None, 0).unwrap();
        let status = wait(&other, Kind::Send).status;
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(status, Status::Success);
    });
}

/// The thread that polls one endpoint receives the packets of another endpoint, whose thread sleeps.
#[test]
fn a_thread_that_polls_wakes_the_one_that_sleeps() {
    let ((a, first, peer), (_b, other, _)) = (node(), node());
    let second = a.endpoint(Some(1)).unwrap();
    let (target, source) = (Region::new(&first, 8, BOTH).unwrap(), Region::new(&other, 8, BOTH).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                assert!(second.poll().is_none());
            }
        });
        let begin = Instant::now();
        for context in 0..10 {
            first.receive(target.span(0, 8).unwrap(), context).unwrap();
            let sleeper = scope.spawn(|| first.wait(Some(Duration::from_secs(60))));
            std::thread::sleep(Duration::from_millis(20));
            other.send(peer, source.span(0, 8).unwrap(), None, 0).unwrap();
            let received = sleeper.join().unwrap().map(|received| received.context);
            if received != Some(context) || begin.elapsed() > Duration::from_secs(50) {
                is_over.store(true, Ordering::Relaxed);
                panic!("{received:?} after {:?}", begin.elapsed());
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

/// Runs this test in a process of its own. Returns true in that process.
fn is_alone(test: &str) -> bool {
    const CHILD: &str = "VNET_RDMA_TEST_CHILD";
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let status = child.args(["--exact", test]).env(CHILD, "1").stdout(Stdio::null()).status();
    assert!(status.unwrap().success());
    false
}

/// A hostile process passes the daemon a TCP socket whose close takes a minute. In a process of its own, whose thread waits for that.
#[test]
fn the_daemon_waits_for_no_hostile_descriptor() {
    if !is_alone("the_daemon_waits_for_no_hostile_descriptor") {
        return;
    }
    let name = format!("vnet-test-hostile-{}", std::process::id());
    let mut host = Host::new().unwrap();
    let mut listener = Some(listen(&name).unwrap());
    host.set_places(&[Place { id: (1, 1), networks: vec![1] }], |_| listener.take());
    let process = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&process, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    pass_a_lingering_socket(&process);
    let begin = Instant::now();
    while recv(&process, &mut [0; 64], RecvFlags::DONTWAIT) != Ok((0, 0)) {
        host.turn(Duration::ZERO).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(30), "disconnected without waiting");
    }
    drop(host);
    assert!(begin.elapsed() < Duration::from_secs(30));
}

fn pass_a_lingering_socket(process: &OwnedFd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut passed = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    set_socket_linger(&passed, Some(Duration::from_secs(60))).unwrap();
    passed.set_nonblocking(true).unwrap();
    // Nobody reads: bytes stay in the socket.
    while passed.write(&[0; 1 << 16]).is_ok() {}
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [passed.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let (bytes, len) = Message::Join([0; 16], [1; 16]).encode();
    let vector = [IoSlice::new(&bytes[..len])];
    assert_eq!(sendmsg(process, &vector, &mut control, SendFlags::empty()), Ok(len));
    // While the other end is open, the close waits.
    std::mem::forget(listener);
}

/// All processor time of this process, in hundredths of a second.
fn cpu() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// In a process of its own, because it measures the process.
#[test]
fn an_idle_node_sleeps() {
    if !is_alone("an_idle_node_sleeps") {
        return;
    }
    idle("", Attachment::Udp);
    with_daemon(|name| idle(name, Attachment::SameHost));
}

fn idle(meeting: &str, attachment: Attachment) {
    let open = || {
        let mut options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
        options.meeting = Some(meeting.to_owned()).filter(|name| !name.is_empty());
        let node = Node::open(&options).unwrap();
        let (endpoint, address) = (node.endpoint(Some(0)).unwrap(), node.address());
        (node, endpoint, Peer { address, endpoint: 0 })
    };
    let ((_a, endpoint, _), (_b, other, peer)) = (open(), open());
    let region = Region::new(&endpoint, 8, BOTH).unwrap();
    endpoint.send(peer, region.span(0, 8).unwrap(), None, 0).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Success);
    await_attachment(&endpoint, peer, attachment);
    let before = cpu();
    // One thread waits, the others have nothing to do.
    let waiting = Duration::from_secs(2);
    let begin = Instant::now();
    while begin.elapsed() < waiting {
        other.wait(Some(waiting.saturating_sub(begin.elapsed())));
    }
    assert!(cpu() - before <= 20, "{} hundredths of a second of two seconds", cpu() - before);
}

/// What the header declares is what the shared object has.
#[test]
fn the_header_and_the_library_agree() {
    let header = include_str!("../include/vnet_rdma.h");
    let source = concat!(
        include_str!("../src/c_api.rs"),
        include_str!("../src/c_counters.rs"),
        include_str!("../src/c_settings.rs"),
        include_str!("../src/c_wait.rs")
    );
    let named = |text: &str, before: &str| -> Vec<String> {
        let found = text.split(before).skip(1);
        let mut names: Vec<String> =
            found.filter_map(|rest| rest.split('(').next()).map(|name| format!("vnet_rdma_{name}")).collect();
        names.sort();
        names
    };
    let code: String = header
        .lines()
        .filter(|line| !line.starts_with("/*") && !line.starts_with(" *"))
        .map(|line| format!("{line}\n"))
        .collect();
    let mut declared: Vec<String> = code
        .split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '('))
        .filter_map(|word| word.split_once('('))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("vnet_rdma_"))
        .collect();
    declared.sort();
    assert_eq!(declared, named(source, "extern \"C\" fn vnet_rdma_"));
    assert!(declared.len() > 15);
}
