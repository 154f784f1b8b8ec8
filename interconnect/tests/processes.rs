//! Processes on this host over real sockets: the measuring program, the ring in Rust and in C, and what a peer's death does.

use std::io::{BufRead, BufReader};
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use vnet_rdma::{Access, Endpoint, Kind, Node, Options, Peer, Region, Status};

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
        assert!(status.success() && stdout == "10 rounds of 1048576 bytes\n", "{status} {stdout} {stderr}");
    }
}

#[test]
fn a_ring_of_rust_programs() {
    ring(&built().parent().unwrap().join("examples/ring"));
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
    assert!(text.starts_with("latency_us ") && text.contains("\ngbit_s "), "{text}");
    assert!(server.0.wait().unwrap().success());
}

#[test]
fn a_killed_peer_is_named() {
    let server = Command::new(PERF).args(["server", "127.0.0.1:0"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut server = Running(server);
    let mut name = String::new();
    BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut name).unwrap();
    let mut options = Options { bind: "127.0.0.1:0".parse().unwrap(), ..Options::default() };
    options.config.dead_after_ns = 1_000_000_000;
    let node = Node::open(&options).unwrap();
    let endpoint = node.endpoint(None).unwrap();
    let region = Region::new(&endpoint, 1 << 20, BOTH).unwrap();
    let peer = vnet_rdma::resolve(name.trim()).unwrap();
    endpoint.send(peer, region.span(0, 8).unwrap(), None, 1).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Success);
    server.0.kill().unwrap();
    server.0.wait().unwrap();
    endpoint.send(peer, region.span(0, 1 << 20).unwrap(), None, 2).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Unreachable);
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

/// All processor time of this process, in hundredths of a second.
fn cpu() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// In a process of its own, because it measures the process.
#[test]
fn an_idle_node_sleeps() {
    const CHILD: &str = "VNET_RDMA_IDLE_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let status =
            child.args(["--exact", "an_idle_node_sleeps"]).env(CHILD, "1").stdout(Stdio::null()).status();
        assert!(status.unwrap().success());
        return;
    }
    let ((_a, endpoint, _), (_b, other, peer)) = (node(), node());
    let region = Region::new(&endpoint, 8, BOTH).unwrap();
    endpoint.send(peer, region.span(0, 8).unwrap(), None, 0).unwrap();
    assert_eq!(wait(&endpoint, Kind::Send).status, Status::Success);
    let before = cpu();
    // One thread waits, the others have nothing to do.
    assert!(other.wait(Some(Duration::from_secs(2))).is_none());
    assert!(cpu() - before <= 20, "{} hundredths of a second of two seconds", cpu() - before);
}

/// What the header declares is what the shared object has.
#[test]
fn the_header_and_the_library_agree() {
    let header = include_str!("../include/vnet_rdma.h");
    let source = include_str!("../src/c_api.rs");
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
