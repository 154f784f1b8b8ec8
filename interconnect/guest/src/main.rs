//! `vnet-rdma-guest`: the interconnect's helper in a virtual machine.
//!
//! It runs as root, and looks to the applications of the machine like the daemon of a container's host. It pins the memory that they share,
//! finds its guest physical addresses, and passes them to the host's vnetd in control frames on the interface of the overlay
//! (docs/interconnect.md). Processes of the machine also get shared memory between them.

mod interfaces;
mod loopback_filter;
mod machine;
mod neighbour;
mod pin;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::stat;
use vnet_rdma::meeting::{Host, Offer, Place, Presence, SOCKET, listen};
use vnet_rdma::vm::Helper;

use crate::machine::LinuxMachine;

const USAGE: &str = "usage: vnet-rdma-guest [--socket NAME]
Gives applications of this virtual machine the interconnect's engine of the host's vnetd (docs/interconnect.md).
  --socket NAME  abstract Unix socket at which applications ask (default: vnet-rdma)
Needs root: it reads physical addresses (CAP_SYS_ADMIN), locks memory (CAP_IPC_LOCK) and uses a packet socket (CAP_NET_RAW).";
/// Longest wait of the meeting point.
const TURN: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let socket = match arguments[..] {
        [] => SOCKET,
        ["--socket", name] => name,
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vnet-rdma-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(socket: &str) -> Result<(), String> {
    let failed = |what: &str, mend: &str, error: std::io::Error| format!("cannot {what}: {error}; {mend}");
    pin::check().map_err(|error| failed("find physical addresses", "run it as root", error))?;
    let machine = LinuxMachine::open()
        .map_err(|error| failed("open a packet socket", "run it as root, or with CAP_NET_RAW", error))?;
    let interfaces =
        interfaces::ethernet().map_err(|error| failed("list interfaces", "is /proc mounted?", error))?;
    let all: Vec<_> = interfaces.iter().map(|interface| (interface.index, interface.mac)).collect();
    let helper = Helper::new(Box::new(machine), &all).map_err(|error| error.to_string())?;
    let helper = Arc::new(helper);
    let listener = listen(socket).map_err(|error| {
        failed(
            &format!("listen at the abstract socket '{socket}'"),
            "does another helper or vnetd run here?",
            error,
        )
    })?;
    let mut host = Host::new().map_err(|error| error.to_string())?;
    let netns = stat("/proc/self/ns/net")
        .map_err(|error| failed("find the network namespace", "mount /proc", error.into()))?;
    let mut listener = Some(listener);
    host.set_places(&[Place { id: (netns.st_dev, netns.st_ino), networks: vec![] }], |_| listener.take());
    let own = Arc::clone(&helper);
    host.serve(Box::new(move |_, request| own.attach(request)));
    let meets = move || {
        let error = loop {
            if let Err(error) = host.turn(TURN) {
                break error;
            }
        };
        // The end of the program ends the attachments of its applications.
        eprintln!("vnet-rdma-guest: cannot wait for applications: {error}");
        std::process::exit(1);
    };
    let spawned = std::thread::Builder::new().name("meetings".into()).spawn(meets);
    spawned.map_err(|error| format!("cannot start a thread: {error}"))?;
    let _presence = Presence::new(socket, Offer::Vm).map_err(|error| {
        failed(
            &format!("listen at the abstract socket '{socket}-vm'"),
            "does another helper run here?",
            error,
        )
    })?;
    println!("vnet-rdma-guest: ready at the abstract socket '{socket}'");
    loop {
        helper.turn().map_err(|error| format!("cannot wait for frames: {error}"))?;
    }
}
