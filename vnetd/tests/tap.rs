//! TAP interfaces of a running daemon, in a network namespace of the test. Creating TAP devices needs root.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A named network namespace, removed at the end.
struct Netns(String);

impl Netns {
    fn new() -> Netns {
        let netns = Netns(format!("vnetd-test-{}", std::process::id()));
        ip(&["netns", "add", &netns.0]);
        netns
    }

    /// The output of `ip link` for a device, if it exists.
    fn device(&self, device: &str) -> Option<String> {
        let output = Command::new("ip").args(["-n", &self.0, "link", "show", device]).output().unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "ip {args:?}; these tests need root");
}

struct Daemon(Child);

impl Daemon {
    /// Starts vnetd; returns it with its ready line.
    fn start(file: &Path) -> (Daemon, String) {
        let child = Command::new(env!("CARGO_BIN_EXE_vnetd"))
            .arg("--config")
            .arg(file)
            .stdout(Stdio::piped())
            .spawn();
        let mut daemon = Daemon(child.unwrap());
        let mut ready = String::new();
        BufReader::new(daemon.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        (daemon, ready)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn until(what: &str, done: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn taps_follow_the_file() {
    let netns = Netns::new();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vnet.toml");
    let write = |more: &str| {
        let text = format!(
            "[host]\nname = \"h1\"\n[control]\nsocket = \"{}/s\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n{more}",
            dir.path().display()
        );
        fs::write(&file, text).unwrap();
    };
    let tap = |device: &str, mtu: u32| {
        format!(
            "[[interface]]\nname = \"{device}\"\nkind = \"tap\"\ndevice = \"{device}\"\nnetns = \"{}\"\nmtu = {mtu}\n",
            netns.0
        )
    };
    write(&tap("t0", 9000));
    let (mut daemon, ready) = Daemon::start(&file);
    assert!(ready.contains("1 interface"), "{ready}");
    assert!(netns.device("t0").unwrap().contains("mtu 9000"));

    // The same device with another MTU, and a second device: the first must be closed before it is reopened.
    let pid = rustix::process::Pid::from_child(&daemon.0);
    write(&(tap("t0", 1400) + &tap("t1", 1500)));
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    until("t1 to appear", || netns.device("t1").is_some());
    until("the MTU of t0 to change", || netns.device("t0").is_some_and(|line| line.contains("mtu 1400")));

    write(&tap("t1", 1500));
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    until("t0 to be removed", || netns.device("t0").is_none());
    assert!(netns.device("t1").is_some());

    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.0.wait().unwrap().success());
    let waits = netns.device("t1").unwrap();
    assert!(waits.contains("NO-CARRIER") && waits.contains("alias vnetd at "), "{waits}");

    // The next vnetd adopts it, and one whose file does not name it removes it.
    let number = waits.split(':').next().unwrap().to_owned();
    let (daemon, _) = Daemon::start(&file);
    let adopted = netns.device("t1").unwrap();
    assert!(adopted.starts_with(&format!("{number}:")) && !adopted.contains("NO-CARRIER"), "{adopted}");
    drop(daemon);
    assert!(netns.device("t1").is_some(), "killed");
    write("");
    let (_daemon, _) = Daemon::start(&file);
    assert!(netns.device("t1").is_none());
}

/// A host starts without the container, and serves it once its namespace is there.
#[test]
fn a_namespace_that_is_missing_is_waited_for() {
    let netns = Netns(format!("vnetd-later-{}", std::process::id()));
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vnet.toml");
    let text = format!(
        "[host]\nname = \"h1\"\n[control]\nsocket = \"{}/s\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n[[interface]]\nname = \
         \"c\"\nkind = \"tap\"\ndevice = \"t0\"\nnetns = \"{}\"\n",
        dir.path().display(),
        netns.0
    );
    fs::write(&file, text).unwrap();
    let (_daemon, ready) = Daemon::start(&file);
    assert!(ready.contains("1 interface"), "{ready}");
    ip(&["netns", "add", &netns.0]);
    until("t0 to appear", || netns.device("t0").is_some());
}
