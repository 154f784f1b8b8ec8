//! Tests of the daemon as users run it: start, requests over its socket, signals, invalid files.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

const WAIT: Duration = Duration::from_secs(20);

/// The directory of one daemon's files.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a valid configuration with `more` appended, in which DIR stands for the directory.
    fn write(&self, more: &str) {
        let text = format!(
            "[host]\nname = \"h1\"\n[control]\nsocket = \"DIR/vnet.sock\"\n[bridge]\nlisten = \"127.0.0.1:0\"\n{more}"
        );
        fs::write(self.path("vnet.toml"), self.fill(&text)).unwrap();
    }

    fn fill(&self, text: &str) -> String {
        text.replace("DIR", self.0.path().to_str().unwrap())
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vnetd"));
        command
            .arg("--config")
            .arg(self.path("vnet.toml"))
            .env_remove("RUST_LOG")
            .env_remove("NOTIFY_SOCKET");
        command
    }

    /// Runs a daemon that must end by itself.
    fn run(&self, args: &[&str]) -> Output {
        self.command().args(args).output().unwrap()
    }

    /// Starts a daemon and waits until it is ready.
    fn start(&self) -> Daemon {
        self.start_command(self.command())
    }

    fn start_command(&self, mut command: Command) -> Daemon {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        let (sender, log) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            stderr.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let daemon = Daemon { child, ready, log, socket: self.path("vnet.sock") };
        if daemon.ready.is_empty() {
            let said: Vec<_> = daemon.log.iter().collect();
            panic!("vnetd did not start: {said:?}");
        }
        daemon
    }
}

struct Daemon {
    child: Child,
    ready: String,
    log: Receiver<String>,
    socket: PathBuf,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Daemon {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for a line in the log that contains `text`.
    fn logged(&self, text: &str) -> String {
        let end = Instant::now() + WAIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.log.recv_timeout(left) {
                Ok(line) if line.contains(text) => return line,
                Ok(_) => {}
                Err(_) => panic!("'{text}' was not logged"),
            }
        }
    }

    fn exit_code(&mut self) -> Option<i32> {
        let end = Instant::now() + WAIT;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("vnetd did not end");
    }

    fn request(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        request(&self.socket, method, path, body.as_bytes())
    }

    fn get(&self, path: &str) -> Value {
        let (status, answer) = self.request("GET", path, "");
        assert_eq!(status, 200, "{answer}");
        answer
    }

    fn names(&self, path: &str) -> Vec<String> {
        let names = self.get(path);
        names.as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().into()).collect()
    }
}

/// Sends one HTTP/1.1 request; returns the status and the body as JSON (null if there is none).
fn request(socket: &Path, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // vnetd refuses an oversized body before reading all of it, so the write may fail.
    let _ = stream.write_all(body);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    let status = answer.split(' ').nth(1).unwrap_or_else(|| panic!("no HTTP: {answer:?}")).parse().unwrap();
    let body = answer.split_once("\r\n\r\n").unwrap().1;
    (status, if body.is_empty() { Value::Null } else { serde_json::from_str(body).unwrap() })
}

fn errors(answer: &Value) -> Vec<&str> {
    answer["errors"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect()
}

fn vm(name: &str) -> String {
    format!("[[interface]]\nname = \"{name}\"\nkind = \"vhost-user\"\nsocket = \"DIR/{name}.sock\"\n")
}

const LINK: &str = "[[link]]\nname = \"h2\"\nremote = \"10.1.2.3:9000\"\ntrusted = true\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn it_reports_readiness_and_cleans_up() {
    for signal in [Signal::TERM, Signal::INT] {
        let folder = Folder::new();
        folder.write(&(vm("vm1") + LINK));
        let mut daemon = folder.start();
        assert!(
            daemon.ready.starts_with("vnetd 0.1.0 ready: host h1, links arrive at 127.0.0.1:"),
            "{}",
            daemon.ready
        );
        assert!(daemon.ready.ends_with("vnet.sock, 1 interface, 1 link, 0 routes\n"), "{}", daemon.ready);
        let mode = fs::metadata(&daemon.socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(folder.path("vm1.sock").exists());
        daemon.signal(signal);
        assert_eq!(daemon.exit_code(), Some(0));
        assert!(!daemon.socket.exists() && !folder.path("vm1.sock").exists());
    }
}

#[test]
fn requests_read_the_hosts_state() {
    let folder = Folder::new();
    folder.write(&(vm("vm1") + LINK + "[[route]]\ndst = \"any\"\nto = \"link h2\"\n"));
    let daemon = folder.start();
    let status = daemon.get("/v1/status");
    assert_eq!(
        (&status["host"], &status["interfaces"], &status["links"]),
        (&json!("h1"), &json!(1), &json!(1))
    );
    assert_eq!(status["pid"], json!(daemon.child.id()));
    let interfaces = daemon.get("/v1/interfaces");
    assert_eq!(interfaces[0]["state"], "down");
    assert_eq!(interfaces[0]["socket"], json!(folder.path("vm1.sock")));
    assert_eq!(daemon.get("/v1/links")[0]["remote"], "10.1.2.3:9000");
    let routes = daemon.get("/v1/routes");
    let want =
        json!([{"index": 1, "network": 1, "src": "any", "dst": "any", "from": "any", "to": "link h2"}]);
    assert_eq!(routes, want);
    let want = json!([{
        "id": 1, "learning": true, "ageing_s": 300, "interfaces": 1, "relay": false, "daemon_engine": false,
        "prefer_daemon_engine": false
    }]);
    assert_eq!(daemon.get("/v1/networks"), want);
    assert_eq!(daemon.get("/v1/learned"), json!([]));
    let stats = daemon.get("/v1/stats");
    let kinds: Vec<_> =
        stats["ports"].as_array().unwrap().iter().map(|port| port["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["interface", "link", "bridge", "removed"]);
    assert_eq!(stats["ports"][0]["drops"]["no_route"], 0);
    assert_eq!(stats["ports"][2]["discards"]["unknown_source"], 0);
    assert_eq!(stats["balance"], json!({"in": 0, "copies": 0, "out": 0, "drops": 0}));
}

#[test]
fn requests_change_the_host() {
    let folder = Folder::new();
    folder.write("");
    let daemon = folder.start();
    let add = json!({"name": "vm1", "kind": "vhost-user", "socket": folder.path("s")}).to_string();
    let (status, answer) = daemon.request("POST", "/v1/interfaces", &add);
    assert_eq!((status, &answer["name"], &answer["mtu"]), (201, &json!("vm1"), &json!(1500)));
    assert!(folder.path("s").exists());
    let (status, _) =
        daemon.request("POST", "/v1/links", r#"{"name":"h2","remote":"10.1.2.3:9000","trusted":true}"#);
    assert_eq!(status, 201);
    let route = r#"{"dst":"52:54:00:00:00:02","to":"link h2"}"#;
    let (status, answer) = daemon.request("POST", "/v1/routes", route);
    assert_eq!((status, &answer["index"]), (201, &json!(1)));

    let (status, answer) = daemon.request("DELETE", "/v1/links/h2", "");
    assert_eq!(status, 409);
    assert!(errors(&answer)[0].starts_with("link h2 is named by route 1 ("), "{answer}");
    for (path, status) in
        [("/v1/routes/1", 204), ("/v1/links/h2", 204), ("/v1/interfaces/vm1", 204), ("/v1/links/h2", 404)]
    {
        assert_eq!(daemon.request("DELETE", path, "").0, status, "{path}");
    }
    assert!(!folder.path("s").exists());
    assert_eq!(daemon.get("/v1/interfaces"), json!([]));
}

#[test]
fn bad_requests_change_nothing_and_are_explained() {
    let folder = Folder::new();
    folder.write(&vm("vm1"));
    let daemon = folder.start();
    let tap = |more: &str| format!(r#"{{"name":"t","kind":"tap","device":"t0"{more}}}"#);
    for (method, path, body, status, want) in [
        ("POST", "/v1/interfaces", "{", 400, "the request is not valid JSON: "),
        ("POST", "/v1/interfaces", "[]", 400, "the request is not a JSON object"),
        ("POST", "/v1/interfaces", "{}", 400, "[[interface]] has no 'name'"),
        ("POST", "/v1/interfaces", &tap(r#","mtu":1"#), 400, "mtu 1 is beyond the limits; use 68 to 65535"),
        ("POST", "/v1/interfaces", &tap(r#","mac":"x""#), 400, "mac: 'x' is not a MAC address"),
        ("POST", "/v1/interfaces", &tap(r#","colour":1"#), 400, "unknown key 'colour' in [[interface]]"),
        (
            "POST",
            "/v1/interfaces",
            &tap("").replace("\"t\"", "\"vm1\""),
            400,
            "the name 'vm1' is already used by an interface (",
        ),
        (
            "POST",
            "/v1/links",
            r#"{"name":"a","remote":"b"}"#,
            400,
            "remote 'b' is not an address with a port",
        ),
        (
            "POST",
            "/v1/routes",
            r#"{"dst":"any","to":"link x"}"#,
            400,
            "the route names link 'x', which does not exist",
        ),
        ("DELETE", "/v1/routes/x", "", 400, "a route is removed by its index"),
        ("DELETE", "/v1/routes/7", "", 404, "there is no route 7"),
        ("POST", "/v1/apply", "[host", 400, "request:1: not valid TOML"),
        ("POST", "/v1/apply?name=my.toml", "", 400, "my.toml:1: [host] has no 'name'"),
        ("POST", "/v1/apply?what=1", "", 400, "Failed to deserialize query string"),
        (
            "GET",
            "/v1/trace?src=52:54:00:00:00:01&dst=52:54:00:00:00:02",
            "",
            404,
            "it is not known where 52:54:00:00:00:01 is",
        ),
        ("GET", "/v2", "", 404, "there is nothing at this path"),
        ("PUT", "/v1/status", "", 405, "this path does not know this method"),
    ] {
        let (got, answer) = daemon.request(method, path, body);
        assert_eq!(got, status, "{method} {path} {body}: {answer}");
        assert!(errors(&answer)[0].starts_with(want), "{method} {path} {body}: {answer}");
    }
    assert_eq!(daemon.names("/v1/interfaces"), ["vm1"]);
}

#[test]
fn request_bodies_are_limited() {
    let folder = Folder::new();
    folder.write("");
    let daemon = folder.start();
    let body = " ".repeat((1 << 20) + 1);
    let (status, answer) = daemon.request("POST", "/v1/apply", &body);
    assert_eq!(status, 400);
    assert!(errors(&answer)[0].starts_with("the request's body is larger than 1048576 bytes"), "{answer}");
    // A body of exactly the maximum length is accepted.
    let config = fs::read_to_string(folder.path("vnet.toml")).unwrap();
    let body = format!("{config}#{}", " ".repeat((1 << 20) - config.len() - 1));
    assert_eq!(daemon.request("POST", "/v1/apply", &body).0, 200);
}

#[test]
fn a_configuration_is_applied_as_a_whole() {
    let folder = Folder::new();
    folder.write(&vm("vm1"));
    let daemon = folder.start();
    let config = fs::read_to_string(folder.path("vnet.toml")).unwrap();
    let wanted = config.clone() + &folder.fill(&(vm("vm2") + LINK));
    let (status, plan) = daemon.request("POST", "/v1/apply?dry_run=true", &wanted);
    assert_eq!((status, plan["changes"].as_array().unwrap().len()), (200, 2), "{plan}");
    assert_eq!(daemon.names("/v1/interfaces"), ["vm1"]);
    let (status, applied) = daemon.request("POST", "/v1/apply", &wanted);
    assert_eq!((status, &applied["changes"]), (200, &plan["changes"]));
    assert_eq!(daemon.names("/v1/interfaces"), ["vm1", "vm2"]);
    let (_, again) = daemon.request("POST", "/v1/apply", &wanted);
    assert_eq!(again["changes"], json!([]));

    fs::write(folder.path("vm4.sock"), "precious").unwrap();
    let bad = config.clone() + &folder.fill(&(vm("vm3") + &vm("vm4")));
    let (status, answer) = daemon.request("POST", "/v1/apply?name=f", &bad);
    assert_eq!(status, 409);
    assert!(errors(&answer)[0].contains("interface vm4 cannot be opened: "), "{answer}");
    assert!(errors(&answer)[0].starts_with("f:15: "), "{answer}");
    assert_eq!(daemon.names("/v1/interfaces"), ["vm1", "vm2"]);
    assert!(!folder.path("vm3.sock").exists());

    let restart = config.replace("name = \"h1\"", "name = \"h9\"") + "[dispatch]\nthreads = 2\n";
    let (status, answer) = daemon.request("POST", "/v1/apply", &restart);
    assert_eq!(status, 409);
    assert!(errors(&answer)[0].ends_with("which takes a restart of vnetd; nothing was changed"), "{answer}");
    assert_eq!(daemon.get("/v1/status")["host"], "h1");
}

#[test]
fn sighup_reloads_the_file() {
    let folder = Folder::new();
    folder.write(&vm("vm1"));
    let daemon = folder.start();
    folder.write(&(vm("vm2") + LINK));
    daemon.signal(Signal::HUP);
    daemon.logged("vnet.toml: applied");
    assert_eq!(daemon.names("/v1/interfaces"), ["vm2"]);
    assert_eq!(daemon.names("/v1/links"), ["h2"]);
    assert!(!folder.path("vm1.sock").exists() && folder.path("vm2.sock").exists());

    folder.write(&(vm("vm3") + "mtu = 1\n"));
    daemon.signal(Signal::HUP);
    daemon.logged("vnet.toml:11: mtu 1 is beyond the limits; use 68 to 65535");
    daemon.logged("vnet.toml: not applied, everything stays as it is");
    assert_eq!(daemon.names("/v1/interfaces"), ["vm2"]);

    fs::remove_file(folder.path("vnet.toml")).unwrap();
    daemon.signal(Signal::HUP);
    daemon.logged("cannot read the configuration: No such file");
    folder.write(&(vm("vm2") + LINK));
    daemon.signal(Signal::HUP);
    daemon.logged("vnet.toml: nothing to change");
}

#[test]
fn a_live_control_socket_is_kept_and_a_stale_one_replaced() {
    let folder = Folder::new();
    folder.write("");
    let mut first = folder.start();
    let second = folder.run(&[]);
    assert_eq!(second.status.code(), Some(1));
    let want = format!(
        "{}:3: socket '{}' is in use by a running process (it answered); stop that or choose another path\n",
        folder.path("vnet.toml").display(),
        first.socket.display()
    );
    assert_eq!(text(&second.stderr), want);
    assert_eq!(first.get("/v1/status")["host"], "h1");

    // A killed daemon leaves its socket behind; the next one replaces it.
    first.signal(Signal::KILL);
    first.exit_code();
    assert!(fs::symlink_metadata(&first.socket).unwrap().file_type().is_socket());
    let next = folder.start();
    assert_eq!(next.get("/v1/status")["pid"], json!(next.child.id()));
}

#[test]
fn obstacles_are_reported_in_one_line() {
    let folder = Folder::new();
    folder.write("");
    let one_line = |folder: &Folder, want: &str| {
        let output = folder.run(&[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = text(&output.stderr);
        assert_eq!((said.lines().count(), said.contains(want)), (1, true), "{said}");
        assert_eq!(text(&output.stdout), "");
    };
    fs::write(folder.path("vnet.sock"), "precious").unwrap();
    one_line(&folder, "vnet.sock' exists and is not a socket; remove it or choose another path");
    assert_eq!(fs::read_to_string(folder.path("vnet.sock")).unwrap(), "precious");
    fs::remove_file(folder.path("vnet.sock")).unwrap();

    let guest = UnixListener::bind(folder.path("vm1.sock")).unwrap();
    folder.write(&vm("vm1"));
    let daemon = folder.start();
    daemon.logged("interface vm1 is down: ");
    let vm1 = &daemon.get("/v1/interfaces")[0];
    assert_eq!(vm1["state"], "down", "{vm1}");
    drop(guest);
    daemon.logged("interface vm1 is up");
    drop(daemon);
    for stale in ["vnet.sock", "vnet.sock.take-over"] {
        fs::remove_file(folder.path(stale)).unwrap();
    }

    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    folder.write("");
    let config = fs::read_to_string(folder.path("vnet.toml")).unwrap().replace("127.0.0.1:0", &address);
    fs::write(folder.path("vnet.toml"), config).unwrap();
    one_line(&folder, &format!("vnet.toml:5: cannot listen on {address}: address already in use"));

    folder.write("[dispatch]\ncpus = [1000]\n");
    one_line(&folder, "vnet.toml:7: cannot pin a dispatcher to CPU 1000");
    let config = fs::read_to_string(folder.path("vnet.toml")).unwrap();
    let token = folder.path("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o644)).unwrap();
    let public = format!("vnet.sock\"\ntoken_file = \"{}\"\nhttp = \"127.0.0.1:0\"", token.display());
    fs::write(folder.path("vnet.toml"), config.replace("vnet.sock\"", &public)).unwrap();
    one_line(&folder, "vnet.toml:3: [control] token_file '");
    fs::write(folder.path("vnet.toml"), config.replace("vnet.sock", "none/a/vnet.sock")).unwrap();
    one_line(&folder, "none/a' is not there; make it: mkdir -p ");
    assert!(!folder.path("none").exists());
}

#[test]
fn all_mistakes_of_a_file_are_reported() {
    let folder = Folder::new();
    folder.write(&(vm("vm1") + "mac = \"x\"\nmtu = 1\n"));
    for args in [&[][..], &["--check"]] {
        let output = folder.run(args);
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        let file = folder.path("vnet.toml").display().to_string();
        let lines: Vec<_> = said.lines().map(|line| line.strip_prefix(&file).unwrap()).collect();
        let want = [
            ":11: mac: 'x' is not a MAC address; write six hexadecimal bytes, as in 52:54:00:12:34:56",
            ":12: mtu 1 is beyond the limits; use 68 to 65535",
        ];
        assert_eq!(lines, want);
        assert!(!folder.path("vnet.sock").exists());
    }
}

#[test]
fn a_check_opens_nothing() {
    let folder = Folder::new();
    let tap = "[[interface]]\nname = \"c1\"\nkind = \"tap\"\ndevice = \"none\"\ninterrupts = \"direct\"\n";
    folder.write(&(vm("vm1") + tap));
    let output = folder.run(&["--check"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).ends_with("vnet.toml: good, 2 interfaces, 0 links, 0 routes\n"));
    let warning = "warning: interrupts has no effect on kind tap: the kernel hands frames over at once\n";
    assert!(text(&output.stderr).ends_with(&format!("vnet.toml:15: {warning}")));
    assert!(!folder.path("vm1.sock").exists());
}

#[test]
fn wrong_usage_is_status_two() {
    let output = Command::new(env!("CARGO_BIN_EXE_vnetd")).arg("--no-such-option").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = Command::new(env!("CARGO_BIN_EXE_vnetd")).arg("--version").output().unwrap();
    assert_eq!((output.status.code(), &*text(&output.stdout)), (Some(0), "vnetd 0.1.0\n"));
}

/// The service manager's side of NOTIFY_SOCKET.
struct Notifications(UnixDatagram);

impl Notifications {
    fn new(folder: &Folder) -> Notifications {
        let socket = UnixDatagram::bind(folder.path("notify")).unwrap();
        socket.set_read_timeout(Some(WAIT)).unwrap();
        Notifications(socket)
    }

    /// Waits for the notification `want`.
    fn wait_for(&self, want: &str) {
        let mut buffer = [0; 4096];
        let end = Instant::now() + WAIT;
        while Instant::now() < end {
            let length = self.0.recv(&mut buffer).unwrap();
            if text(&buffer[..length]).lines().any(|line| line == want) {
                return;
            }
        }
        panic!("no notification {want}");
    }

    /// Forgets what has arrived so far.
    fn forget(&self) {
        self.0.set_nonblocking(true).unwrap();
        while self.0.recv(&mut [0; 4096]).is_ok() {}
        self.0.set_nonblocking(false).unwrap();
    }
}

#[test]
fn the_service_manager_is_notified() {
    let folder = Folder::new();
    folder.write("");
    let notifications = Notifications::new(&folder);
    let mut command = folder.command();
    command.env("NOTIFY_SOCKET", folder.path("notify"));
    let mut daemon = folder.start_command(command);
    notifications.wait_for("READY=1");
    daemon.signal(Signal::HUP);
    notifications.wait_for("RELOADING=1");
    notifications.wait_for("READY=1");
    daemon.signal(Signal::TERM);
    notifications.wait_for("STOPPING=1");
    assert_eq!(daemon.exit_code(), Some(0));
}

/// A thread of another process that is stopped as long as this value lives.
struct StoppedThread(libc::pid_t);

impl StoppedThread {
    fn stop(process: u32, name: &str) -> StoppedThread {
        let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap().map(|task| task.unwrap().path());
        let is_it = |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap().trim() == name;
        let task = tasks.into_iter().find(is_it).unwrap();
        let thread: libc::pid_t = task.file_name().unwrap().to_str().unwrap().parse().unwrap();
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            // SAFETY: neither request reads or writes memory of this process.
            let done = unsafe { libc::ptrace(request, thread, 0, 0) };
            assert!(done >= 0, "{}", std::io::Error::last_os_error());
        }
        // SAFETY: the kernel accepts a null status.
        assert_eq!(unsafe { libc::waitpid(thread, std::ptr::null_mut(), libc::__WALL) }, thread);
        StoppedThread(thread)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // SAFETY: the request reads and writes no memory of this process.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0, 0, 0) };
    }
}

#[test]
fn the_service_manager_gets_no_signs_of_life_while_a_dispatcher_hangs() {
    let folder = Folder::new();
    folder.write("");
    let notifications = Notifications::new(&folder);
    let mut command = folder.command();
    command.env("NOTIFY_SOCKET", folder.path("notify")).env("WATCHDOG_USEC", "6000000");
    let daemon = folder.start_command(command);
    notifications.wait_for("WATCHDOG=1");
    let stopped = StoppedThread::stop(daemon.child.id(), "dispatch-0");
    assert!(daemon.logged("has hung").contains("dispatcher 0"));
    notifications.forget();
    assert!(daemon.logged("has hung").contains("dispatcher 0"));
    notifications.0.set_nonblocking(true).unwrap();
    assert!(notifications.0.recv(&mut [0; 4096]).is_err(), "a sign of life");
    notifications.0.set_nonblocking(false).unwrap();
    drop(stopped);
    notifications.wait_for("WATCHDOG=1");
}

/// Whoever asks first, before the agent has tried to reach the store.
#[test]
fn the_overlay_is_shown_from_the_first_answer_on() {
    let folder = Folder::new();
    folder.write("[overlay]\netcd = [\"http://127.0.0.1:1\"]\naddress = \"10.0.0.1:9000\"\ntrusted = true\n");
    let daemon = folder.start();
    let state = daemon.get("/v1/overlay")["state"].as_str().unwrap().to_owned();
    assert!(["starting", "away"].contains(&state.as_str()), "{state}");
}
