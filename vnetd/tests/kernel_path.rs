//! The kernel's own path of a running daemon, in network namespaces of the test. Needs root.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Bytes of a ping's frame: Ethernet, IPv4, ICMP and 56 bytes.
const PING_LEN: u64 = 14 + 20 + 8 + 56;

/// A network namespace, removed at the end.
struct Netns(String);

impl Netns {
    fn new(name: &str) -> Netns {
        let netns = Netns(format!("vnetd-{name}-{}", std::process::id()));
        run(&["ip", "netns", "add", &netns.0]);
        for which in ["all", "default"] {
            let key = format!("net.ipv6.conf.{which}.disable_ipv6=1");
            run(&["ip", "netns", "exec", &netns.0, "sysctl", "-q", "-w", &key]);
        }
        netns.ip("link set lo up");
        netns
    }

    fn ip(&self, words: &str) {
        run(&[&["ip", "-n", &self.0][..], &words.split(' ').collect::<Vec<_>>()].concat());
    }

    /// A command in the namespace.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).args(words);
        command
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn run(words: &[&str]) {
    let status = Command::new(words[0]).args(&words[1..]).status().unwrap();
    assert!(status.success(), "{words:?}; these tests need root");
}

struct Daemon {
    child: Child,
    socket: PathBuf,
}

impl Daemon {
    /// Starts vnetd in `netns` by the command `by`, with these interfaces, and waits until it is ready.
    fn start(folder: &Path, netns: &Netns, by: &[&str], interfaces: &str) -> Daemon {
        let (socket, file) = (folder.join("s"), folder.join("vnet.toml"));
        // Nothing is pinned: no directory is there.
        let text = format!(
            "[host]\nname = \"h1\"\n[control]\nsocket = \"{}\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[dispatch]\nbpffs = \
             \"{}\"\n{interfaces}",
            socket.display(),
            folder.join("none/bpf").display()
        );
        fs::write(&file, text).unwrap();
        let vnetd = [env!("CARGO_BIN_EXE_vnetd"), "--config", file.to_str().unwrap()];
        let mut command = netns.command(&[by, &vnetd].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.contains("ready"), "{ready}");
        Daemon { child, socket }
    }

    fn text(&self, path: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        answer.split_once("\r\n\r\n").unwrap().1.into()
    }

    fn get(&self, path: &str) -> Value {
        serde_json::from_str(&self.text(path)).unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        // Stopped, not killed: it removes its devices.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}

#[test]
fn a_vnetd_without_the_capabilities_says_so_everywhere() {
    let netns = Netns::new("kernel-none");
    netns.ip("link add lan0 type veth peer name lan1");
    netns.ip("link set lan0 up");
    netns.ip("link set lan1 up");
    let folder = tempfile::tempdir().unwrap();
    let interfaces = "[[interface]]\nname = \"lan\"\nkind = \"local\"\ndevice = \"lan0\"\n";
    // CAP_SYS_ADMIN includes CAP_BPF.
    let by = ["setpriv", "--bounding-set", "-bpf,-sys_admin"];
    let daemon = Daemon::start(folder.path(), &netns, &by, interfaces);
    let interface = &daemon.get("/v1/interfaces")[0];
    assert_eq!((&interface["state"], &interface["path"]), (&json!("up"), &json!("vnetd")), "{interface}");
    let why = interface["path_reason"].as_str().unwrap();
    assert!(why.starts_with("the kernel takes no programs: "), "{why}");
    assert!(why.contains("Operation not permitted") && why.contains("CAP_BPF"), "{why}");
    assert_eq!(why.lines().count(), 1);
    let kernel = &daemon.get("/v1/status")["kernel"];
    assert_eq!(kernel["interfaces"], 0);
    assert_eq!(kernel["interface_reason"], format!("interface lan: {why}"));
    assert_eq!(daemon.get("/v1/flows"), json!([]));
    let metrics = daemon.text("/metrics");
    assert!(metrics.contains("\nvnet_interface_kernel_path{interface=\"lan\"} 0\n"), "{metrics}");
    assert!(metrics.contains("\nvnet_kernel_flows{} 0\n"), "{metrics}");
}

#[test]
fn flows_and_metrics_count_what_the_kernel_forwards() {
    const PINGS: u64 = 20;
    let (host, one, two) = (Netns::new("kernel-host"), Netns::new("kernel-one"), Netns::new("kernel-two"));
    let folder = tempfile::tempdir().unwrap();
    let interface = |name: &str, netns: &Netns, mac: u8| {
        format!(
            "[[interface]]\nname = \"{name}\"\nkind = \"veth\"\ndevice = \"eth0\"\nnetns = \"{}\"\nmac = \
             \"02:00:00:00:00:0{mac}\"\n",
            netns.0
        )
    };
    let interfaces = interface("c1", &one, 1) + &interface("c2", &two, 2);
    let daemon = Daemon::start(folder.path(), &host, &[], &interfaces);
    for (netns, address) in [(&one, "10.9.0.1/24"), (&two, "10.9.0.2/24")] {
        netns.ip(&format!("address add {address} dev eth0"));
        netns.ip("link set eth0 up");
    }
    let count = PINGS.to_string();
    let ping = ["ping", "-q", "-i", "0.05", "-c", &count, "-W", "5", "10.9.0.2"];
    // A flow ends a second or two after its last frame: on a busy machine that may be before the answer.
    let pinged = || {
        let pinged = one.command(&ping).output().unwrap();
        assert!(pinged.status.success(), "{}", String::from_utf8_lossy(&pinged.stdout));
        let flows = daemon.get("/v1/flows").as_array().unwrap().clone();
        (flows.len() == 2).then_some(flows)
    };
    let flows = (0..10).find_map(|_| pinged()).expect("two flows, one in each direction");
    for (from, to) in [(1, 2), (2, 1)] {
        let source = format!("02:00:00:00:00:0{from}");
        let flow = flows.iter().find(|flow| flow["src"] == source).unwrap();
        let has = |key: &str, want: String| assert_eq!(flow[key], want, "{flow}");
        has("dst", format!("02:00:00:00:00:0{to}"));
        has("from", format!("interface c{from}"));
        has("to", format!("interface c{to}"));
        let [network, frames, bytes, kernel_ms] =
            ["network", "frames", "bytes", "kernel_ms"].map(|key| flow[key].as_u64().unwrap());
        assert_eq!(network, 1);
        // The first frame of a flow comes up. Nothing else of this flow is sent within the second that it takes.
        assert!((PINGS / 2..=PINGS).contains(&frames), "{flow}");
        assert_eq!(bytes, frames * PING_LEN, "{flow}");
        // Two seconds, and a round of the thread that advances the leases' clock.
        assert!((1..=2250).contains(&kernel_ms), "{flow}");
    }
    let kernel = &daemon.get("/v1/status")["kernel"];
    assert_eq!(
        (&kernel["interfaces"], &kernel["flows"], &kernel["refused"]),
        (&json!(2), &json!(2), &json!(0))
    );
    assert_eq!(kernel.get("interface_reason"), None);
    let metrics = daemon.text("/metrics");
    for line in [
        "vnet_interface_kernel_path{interface=\"c1\"} 1",
        "vnet_interface_kernel_path{interface=\"c2\"} 1",
        "vnet_kernel_flows{} 2",
        "vnet_kernel_flow_refusals_total{} 0",
    ] {
        assert!(metrics.lines().any(|is| is == line), "no line '{line}' in:\n{metrics}");
    }
    // A flow that is not used any more ends.
    let end = Instant::now() + Duration::from_secs(20);
    while daemon.get("/v1/flows") != json!([]) {
        assert!(Instant::now() < end, "unused flows do not end");
        std::thread::sleep(Duration::from_millis(200));
    }
}
