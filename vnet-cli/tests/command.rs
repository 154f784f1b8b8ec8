//! Tests of the command with a real vnetd: output, effects and errors.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

/// A vnetd with an empty configuration, and its directory.
struct Host {
    daemon: Child,
    dir: tempfile::TempDir,
}

impl Host {
    fn start() -> Host {
        let dir = tempfile::tempdir().unwrap();
        let host = "[host]\nname = \"h1\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n";
        let text = format!("{host}[control]\nsocket = \"{}/s\"\n", dir.path().display());
        std::fs::write(dir.path().join("vnet.toml"), text).unwrap();
        let mut daemon = Command::new(vnetd())
            .arg("--config")
            .arg(dir.path().join("vnet.toml"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.contains("ready"), "{ready}");
        Host { daemon, dir }
    }

    fn vnet(&self, args: &[&str]) -> Output {
        vnet(&self.dir.path().join("s"), args)
    }

    /// The output of a command that must succeed.
    fn output_of(&self, args: &[&str]) -> String {
        let output = self.vnet(args);
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{args:?}");
        text(&output.stdout)
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.output_of(&[args, &["--json"]].concat())).unwrap()
    }

    /// The error of a command that must fail.
    fn refused(&self, args: &[&str]) -> String {
        let output = self.vnet(args);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), String::new()), "{args:?}");
        text(&output.stderr)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Path of vnetd: `$VNETD`, which `make test` sets, or a build of this workspace. Cargo inside a test blocks on any other cargo that
/// uses the same target directory, so CI must not start it.
fn vnetd() -> PathBuf {
    if let Some(path) = std::env::var_os("VNETD") {
        return path.into();
    }
    let here = Path::new(env!("CARGO_BIN_EXE_vnet"));
    let target = here.ancestors().nth(2).unwrap();
    // With the features of the whole workspace's tests, like this test: otherwise half of vnetd would be built twice.
    let mut build = Command::new(env!("CARGO"));
    build.args(["test", "--quiet", "--workspace", "--no-run", "--target-dir"]).arg(target);
    if here.parent().unwrap().ends_with("release") {
        build.arg("--release");
    }
    assert!(build.status().unwrap().success(), "vnetd cannot be built");
    here.with_file_name("vnetd")
}

fn vnet(socket: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vnet")).env("VNET_SOCKET", socket).args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn commands_add_list_and_remove() {
    let host = Host::start();
    let socket = host.dir.path().join("vm1.sock").display().to_string();
    let add = [
        "interface",
        "add",
        "vm1",
        "--kind",
        "vhost-user",
        "--socket",
        &socket,
        "--mac",
        "52:54:00:00:00:01",
    ];
    assert_eq!(host.output_of(&add), "interface vm1 added\n");
    assert_eq!(
        host.output_of(&["link", "add", "h2", "--remote", "10.1.2.3:9000", "--trusted"]),
        "link h2 added\n"
    );
    let add = ["route", "add", "--dst", "52:54:00:00:00:02", "--from", "interface vm1", "--to", "link h2"];
    assert_eq!(host.output_of(&add), "route 1 added\n");

    let list = host.output_of(&["interface", "list"]);
    let words: Vec<Vec<_>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0][..4], ["NAME", "KIND", "STATE", "NETWORK"]);
    assert_eq!(words[1][..7], ["vm1", "vhost-user", "down", "1", "52:54:00:00:00:01", "1500", "1"]);
    assert_eq!(
        host.output_of(&["route", "list"]),
        "INDEX  NETWORK  SRC  DST                FROM           TO\n    1        1  any  52:54:00:00:00:02  interface vm1  link h2\n"
    );
    let set = ["interface", "set", "vm1", "mode=vmm-driven", "window_us=100", "interrupts=optimistic"];
    assert!(
        host.output_of(&set).contains("vmm-driven")
            && host.output_of(&["interface", "list"]).contains("vmm-driven")
    );
    let listed = &host.json(&["interface", "list"])[0];
    assert_eq!((&listed["mode"], &listed["interrupts"]), (&json!("vmm-driven"), &json!("optimistic")));
    assert_eq!((&listed["rate_high"], &listed["window_us"]), (&json!(10_000), &json!(100)));
    for counter in ["rate", "switches", "early", "early_discarded", "coalesced_withheld"] {
        assert!(listed[counter].is_u64(), "{counter}");
    }
    assert!(host.refused(&["interface", "set", "vm1", "mtu=9000"]).starts_with("unknown key 'mtu'"));
    assert!(host.refused(&["interface", "set", "vm1", "rate_low=20000"]).contains("exceeds rate_high 10000"));
    assert!(host.refused(&["interface", "set", "vm9", "mode=adaptive"]).contains("no interface vm9"));
    assert_eq!(host.json(&["link", "list"])[0]["name"], "h2");
    assert_eq!(host.json(&["status"])["routes"], 1);
    assert!(host.output_of(&["status"]).starts_with("host         h1\n"));
    let stats = host.output_of(&["stats"]);
    assert!(stats.contains("interface vm1") && stats.contains("no_route"), "{stats}");
    assert!(stats.ends_with("in 0 + copies 0 = out 0 + drops 0\n"), "{stats}");
    assert_eq!(host.json(&["stats"])["balance"]["drops"], 0);
    assert_eq!(host.output_of(&["version"]), "vnet 0.1.0\nvnetd 0.1.0\n");

    let refused = host.refused(&["interface", "del", "vm1"]);
    assert!(refused.starts_with("interface vm1 is named by route 1 ("), "{refused}");
    assert_eq!(host.output_of(&["route", "del", "1"]), "route 1 removed\n");
    assert_eq!(host.output_of(&["interface", "del", "vm1"]), "interface vm1 removed\n");
    assert_eq!(host.json(&["link", "del", "h2"]), json!({ "removed": { "object": "link", "name": "h2" } }));
    assert_eq!(host.json(&["interface", "list"]), json!([]));
}

#[test]
fn the_console_reads_files_and_standard_input() {
    let host = Host::start();
    let links = host.dir.path().join("links");
    std::fs::write(&links, "# a remark\nADD 10.1.2.3 9000 udp\n").unwrap();
    let links = links.to_str().unwrap();
    assert_eq!(host.output_of(&["console", links]), "OK link 1\n");
    assert_eq!(host.json(&["link", "list"])[0]["encapsulation"], "vnet");
    let refused = host.refused(&["console", links]);
    assert!(refused.starts_with(&format!("{links}:2: remote 10.1.2.3:9000 is already used")), "{refused}");
    let other = host.dir.path().join("commands");
    std::fs::write(&other, "DEL 1\n").unwrap();
    let other = other.to_str().unwrap();
    assert!(host.refused(&["console", other]).contains("'DEL' is not a command"));
    assert_eq!(host.output_of(&["console", "--as", "links", other]), "OK link 1 removed\n");
    let answers = host.json(&["console", "--as", "console", "/dev/null"]);
    assert_eq!(answers, json!([]));
}

#[test]
fn a_file_is_applied() {
    let host = Host::start();
    let file = host.dir.path().join("vnet.toml");
    let link = "[[link]]\nname = \"h2\"\nremote = \"10.1.2.3:9000\"\ntrusted = true\n";
    std::fs::write(&file, std::fs::read_to_string(&file).unwrap() + link).unwrap();
    let file = file.to_str().unwrap();
    let step = "+ link h2: native to 10.1.2.3:9000, trusted\n";
    assert_eq!(host.output_of(&["apply", file, "--dry-run"]), format!("{step}1 change would be made\n"));
    assert_eq!(host.json(&["link", "list"]), json!([]));
    assert_eq!(host.output_of(&["apply", file]), format!("{step}1 change made\n"));
    assert_eq!(host.output_of(&["apply", file]), "nothing to change\n");
    assert_eq!(host.json(&["apply", file])["changes"], json!([]));
    std::fs::write(file, "[host]\nname = 1\n").unwrap();
    let want = format!("{file}:2: 'name' is a whole number, but must be a text; write name = \"…\"\n");
    assert_eq!(host.refused(&["apply", file]), want);
    assert_eq!(host.json(&["link", "list"])[0]["name"], "h2");
}

#[test]
fn a_frame_is_traced() {
    let host = Host::start();
    let socket = host.dir.path().join("vm1.sock").display().to_string();
    host.output_of(&[
        "interface",
        "add",
        "vm1",
        "--kind",
        "vhost-user",
        "--socket",
        &socket,
        "--mac",
        "52:54:00:00:00:01",
    ]);
    host.output_of(&["link", "add", "h2", "--remote", "10.1.2.3:9000", "--trusted"]);
    host.output_of(&["route", "add", "--dst", "52:54:00:00:00:02", "--to", "link h2"]);
    let trace = |dst: &str| host.output_of(&["trace", "52:54:00:00:00:01", dst]);
    assert_eq!(
        trace("52:54:00:00:00:02").lines().next().unwrap(),
        "52:54:00:00:00:01 -> 52:54:00:00:00:02 in network 1, from interface vm1: to link h2, because route 1 of \
         priority 6"
    );
    assert!(trace("52:54:00:00:00:02").contains("\n  copy to link h2 at 10.1.2.3:9000: "));
    assert!(
        trace("ff:ff:ff:ff:ff:ff")
            .contains(": to link h2, because ff:ff:ff:ff:ff:ff is a group address or unknown")
    );
    let from_link = host.json(&["trace", "52:54:00:00:00:09", "52:54:00:00:00:01", "--from", "link h2"]);
    assert_eq!((&from_link["by"], &from_link["to"]), (&json!("configured"), &json!(["interface vm1"])));
}

#[test]
fn stations_and_networks_are_listed_and_traced_by_name() {
    let host = Host::start();
    let socket = host.dir.path().join("vm1.sock").display().to_string();
    let add = ["interface", "add", "vm1", "--kind", "vhost-user", "--socket", &socket, "--mac"];
    host.output_of(&[&add[..], &["52:54:00:00:00:01", "--addresses", "10.0.0.1"]].concat());
    assert_eq!(
        host.output_of(&["network", "list"]),
        "ID  LEARNING  AGEING  RELAY  INTERFACES\n 1  yes       300 s   no              1\n"
    );
    assert_eq!(
        host.output_of(&["addresses"]),
        "NETWORK  ADDRESS            AT             HELD        HEARD\n      1  52:54:00:00:00:01  interface vm1  configured  -\n"
    );
    assert_eq!(host.json(&["addresses"])[0]["at"], "interface vm1");
    for name in ["vm1", "interface vm1", "10.0.0.1", "52:54:00:00:00:01"] {
        let trace = host.json(&["trace", name, "52:54:00:00:00:02"]);
        assert_eq!(
            (&trace["src"], &trace["from"]),
            (&json!("52:54:00:00:00:01"), &json!("interface vm1")),
            "{name}"
        );
    }
    let refused = |args: &[&str]| host.refused(&[&["trace"], args].concat());
    assert!(refused(&["vm1", "vm1", "--network", "9"]).starts_with("there is no network 9;"));
    assert!(
        refused(&["10.0.0.7", "vm1"]).starts_with("which MAC address has 10.0.0.7 in network 1 is not known")
    );
}

#[test]
fn the_running_state_is_saved_as_a_file() {
    use std::os::unix::fs::PermissionsExt;
    let host = Host::start();
    host.output_of(&[
        "link",
        "add",
        "h2",
        "--remote",
        "10.1.2.3:9000",
        "--trusted",
        "--macs",
        "52:54:00:00:00:07",
    ]);
    host.output_of(&["route", "add", "--dst", "52:54:00:00:00:02", "--to", "link h2"]);
    let file = host.dir.path().join("saved.toml");
    let name = file.to_str().unwrap();
    assert_eq!(host.output_of(&["save", name]), format!("{name}: saved\n"));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(host.output_of(&["save"]), std::fs::read_to_string(&file).unwrap());
    assert_eq!(host.output_of(&["check", name]), format!("{name}: good\n"));
    assert_eq!(host.output_of(&["apply", name]), "nothing to change\n");
    assert!(host.refused(&["save", name]).contains("is there already; --force replaces it"));
    host.output_of(&["link", "add", "h3", "--remote", "10.1.2.4:9000", "--trusted"]);
    assert!(host.output_of(&["apply", name, "--dry-run"]).starts_with("- link h3"));
    host.output_of(&["save", name, "--force"]);
    assert_eq!(host.output_of(&["apply", name]), "nothing to change\n");
}

#[test]
fn events_are_followed() {
    let host = Host::start();
    let mut follower = Command::new(env!("CARGO_BIN_EXE_vnet"))
        .env("VNET_SOCKET", host.dir.path().join("s"))
        .args(["events", "--count", "1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The follower may not have subscribed yet: repeat the change until it has received an event.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while follower.try_wait().unwrap().is_none() {
        assert!(std::time::Instant::now() < deadline, "no event arrives");
        host.output_of(&["link", "add", "h2", "--remote", "10.1.2.3:9000", "--trusted"]);
        host.output_of(&["link", "del", "h2"]);
    }
    let output = follower.wait_with_output().unwrap();
    // The first event is the configuration change or the new link's state.
    let line = text(&output.stdout);
    assert!(line.contains("link h2") && line.lines().count() == 1 && output.status.success(), "{line}");
}

#[test]
fn a_check_needs_no_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("f.toml");
    let name = file.to_str().unwrap();
    let nobody = dir.path().join("nobody");
    std::fs::write(&file, "[host]\nname = \"h1\"\n").unwrap();
    let output = vnet(&nobody, &["check", name]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(0), format!("{name}: good\n")));
    std::fs::write(&file, "[host]\nname = \"h1\"\nx = 1\n[bridge]\ny = 1\n").unwrap();
    let output = vnet(&nobody, &["check", name, "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let lines = [
        format!("{name}:3: unknown key 'x' in [host]; known here: name"),
        format!(
            "{name}:5: unknown key 'y' in [bridge]; known here: listen, ports, vxlan_listen, stream_listen, zero_copy, trusted, rekey_s, meetings"
        ),
    ];
    assert_eq!(text(&output.stderr), format!("{}\n{}\n", lines[0], lines[1]));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer, json!({ "file": name, "good": false, "errors": lines, "warnings": [] }));
    let token = dir.path().join("token");
    let control = format!("[host]\nname = \"h1\"\n[control]\ntoken_file = \"{}\"\n", token.display());
    std::fs::write(&file, control).unwrap();
    let output = vnet(&nobody, &["check", name]);
    let want = format!("{name}:3: cannot read [control] token_file '{}': No such file", token.display());
    assert!(output.status.code() == Some(1) && text(&output.stderr).starts_with(&want), "{output:?}");
    assert_eq!(vnet(&nobody, &["check", name, "--text-only"]).status.code(), Some(0));
}

#[test]
fn failures_are_one_line_and_exit_1_and_wrong_usage_exits_2() {
    let dir = tempfile::tempdir().unwrap();
    let nobody = dir.path().join("nobody");
    let output = vnet(&nobody, &["status"]);
    assert_eq!(output.status.code(), Some(1));
    let want = format!(
        "cannot reach vnetd at '{}': No such file or directory (os error 2); is it running, and is this its socket? \
         (--socket, $VNET_SOCKET)\n",
        nobody.display()
    );
    assert_eq!(text(&output.stderr), want);
    let output = vnet(&nobody, &["version"]);
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(0), "vnet 0.1.0\nvnetd not reached\n".into())
    );
    for args in [&["no-such-command"][..], &["route", "del", "x"], &["link", "add", "x"], &[]] {
        assert_eq!(vnet(&nobody, args).status.code(), Some(2), "{args:?}");
    }
    for (args, want) in [
        (&["--mtu", "9k"][..], "write a whole number of bytes from 68 to 65535, without a unit"),
        (&["--rate-limit", "1g"], "write a whole number of Mbit/s, without a unit"),
        (&["--memory-limit", "4G"], "write a whole number of MiB from 1 to 67108864, without a unit"),
    ] {
        let add = ["interface", "add", "t", "--kind", "veth", "--device", "t0"];
        let said = text(&vnet(&nobody, &[&add[..], args].concat()).stderr);
        assert!(said.contains(want), "{said}");
    }
    let said =
        text(&vnet(&nobody, &["link", "add", "x", "--remote", "10.0.0.2:1", "--networks", "x"]).stderr);
    assert!(said.contains("write a whole number from 0 to 16777215"), "{said}");
    let said = text(&vnet(&nobody, &["route", "del", "52:54:00:00:00:01"]).stderr);
    assert!(said.contains("write the number that 'vnet route list' shows as INDEX"), "{said}");
    // A shell evaluates the output: it must fail, too.
    let output = vnet(&nobody, &["mpi-env", "--provider-path", "/proc"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), "false\n".into()));
    let host = Host::start();
    let refused = host.refused(&["interface", "add", "t", "--kind", "tap", "--device", "t0", "--mac", "x"]);
    assert_eq!(
        refused,
        "mac: 'x' is not a MAC address; write six hexadecimal bytes, as in 52:54:00:12:34:56\n"
    );
    let refused = host.refused(&["link", "del", "h9"]);
    assert_eq!(refused, "there is no link h9; see 'vnet link list'\n");
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let host = Host::start();
    let mut child = Command::new(env!("CARGO_BIN_EXE_vnet"))
        .env("VNET_SOCKET", host.dir.path().join("s"))
        .args(["stats", "--watch"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    // Read one line, then close the pipe.
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("PORT"), "{line}");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}
