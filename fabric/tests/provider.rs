//! Tests the provider with libfabric's tools, with a C program that checks each call, and with Open MPI.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// Creates a folder that contains the shared object under the file name that libfabric searches for.
fn providers(test: &str) -> PathBuf {
    let built = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(test);
    fs::create_dir_all(&folder).unwrap();
    let link = folder.join("libvnet-fi.so");
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(built.join("libvnet_fi.so"), &link).unwrap();
    folder
}

fn command(program: impl AsRef<std::ffi::OsStr>, providers: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg("100").arg(program).env("FI_PROVIDER_PATH", providers).stdin(Stdio::null());
    command
}

/// Returns the standard output of a program, and panics if the program failed.
fn text(output: Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{} {text} {}", output.status, String::from_utf8_lossy(&output.stderr));
    text
}

fn compile(compiler: &str, name: &str, folder: &Path, libraries: &[&str]) -> PathBuf {
    let program = folder.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
    let mut compile = Command::new(compiler);
    compile.args(["-std=gnu11", "-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).args(libraries);
    assert!(compile.status().unwrap().success());
    program
}

#[test]
fn fi_info_shows_the_provider() {
    let folder = providers("info");
    let shown = text(command("fi_info", &folder).args(["-p", "vnet"]).output().unwrap());
    assert!(shown.contains("provider: vnet\n") && shown.contains("type: FI_EP_RDM"), "{shown}");
    let mut none = command("fi_info", &folder);
    let none = none.args(["-p", "vnet"]).env("FI_PROVIDER", "vnet").env("FI_VNET_INTERFACE", "nowhere0");
    let none = none.output().unwrap();
    let error = String::from_utf8_lossy(&none.stderr);
    assert!(!none.status.success() && error.contains("FI_VNET_INTERFACE"), "{error}");
    let six = text(
        command("fi_info", &folder)
            .args(["-p", "vnet", "-v", "-a", "FI_SOCKADDR_IN6", "-s", "::1"])
            .output()
            .unwrap(),
    );
    assert!(six.contains("addr_format: FI_SOCKADDR_IN6"), "{six}");
}

#[test]
fn every_call_does_what_libfabric_promises() {
    let folder = providers("api");
    let program = compile("cc", "api", &folder, &["-lfabric", "-lpthread"]);
    for address in ["127.0.0.1", "::1"] {
        assert_eq!(text(command(&program, &folder).arg(address).output().unwrap()), "ok\n", "{address}");
    }
}

#[test]
fn ping_pong_with_checked_data() {
    let folder = providers("pingpong");
    for mode in ["msg", "tagged"] {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
        let options = ["-p", "vnet", "-e", "rdm", "-m", mode, "-c"];
        let server =
            command("fi_pingpong", &folder).args(options).args(["-B", &port]).stdout(Stdio::piped()).spawn();
        let server = server.unwrap();
        // fi_pingpong's client does not wait until the server listens, so the test waits.
        let listening = format!(":{:04X} 00000000:0000 0A", port.parse::<u16>().unwrap());
        let is_listening = || {
            let tables = ["/proc/net/tcp", "/proc/net/tcp6"]
                .map(|table| fs::read_to_string(table).unwrap_or_default());
            tables[0].contains(&listening)
                || tables[1].contains(&format!(":{:04X} ", port.parse::<u16>().unwrap()))
        };
        for _ in 0..600 {
            if is_listening() {
                break;
            }
            sleep(Duration::from_millis(50));
        }
        let client = command("fi_pingpong", &folder).args(options).args(["-P", &port, "127.0.0.1"]).output();
        let shown = text(client.unwrap());
        assert!(shown.contains("\n1m "), "{shown}");
        text(server.wait_with_output().unwrap());
    }
}

#[test]
fn open_mpi_runs_over_the_provider() {
    let folder = providers("mpi");
    let program = compile("mpicc", "mpi", &folder, &[]);
    let mut run = command("mpirun", &folder);
    run.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "3"]).arg(program);
    // These settings force even ranks on one host to use the provider: without it the run fails instead of using another transport.
    let settings = [
        ("OMPI_MCA_pml", "cm"),
        ("OMPI_MCA_mtl", "ofi"),
        ("OMPI_MCA_btl", "^uct,openib"),
        ("OMPI_MCA_osc", "^ucx"),
        ("OMPI_MCA_mpi_yield_when_idle", "1"),
        ("FI_PROVIDER", "vnet"),
    ];
    assert_eq!(text(run.envs(settings).output().unwrap()), "3 ranks agree\n");
}
