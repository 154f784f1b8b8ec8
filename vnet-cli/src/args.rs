//! The command line.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args as Group, CommandFactory, Parser, Subcommand, ValueEnum};
use serde_json::Value;
use vnet::wire::ethernet::Mac;
use vnet_control::desired::Target;
use vnet_control::language::Dialect;

use crate::client::encode;
use crate::keys::KeysCommand;
use crate::mpi::MpiEnv;
use crate::settings::{Interface, Link, New, Route};
use crate::top::model::Top;

/// Queries and changes a running vnetd.
#[derive(Parser)]
#[command(name = "vnet", version, long_about = LONG_ABOUT, after_long_help = AFTER_HELP)]
pub struct Args {
    /// Control socket of vnetd
    #[arg(long, value_name = "SOCKET", env = "VNET_SOCKET", default_value = vnet_control::desired::CONTROL_SOCKET)]
    pub socket: PathBuf,

    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,

    #[command(subcommand)]
    pub command: Command,
}

const LONG_ABOUT: &str = "\
Queries and changes a running vnetd, the daemon that puts this host's virtual machines and containers on one Ethernet \
LAN with those of other hosts.

Changes take effect at once, without disturbing other traffic. They last until vnetd stops or rereads its configuration \
file (SIGHUP). To keep them, edit the file or use 'vnet save'.";

const AFTER_HELP: &str = "\
Environment:
  VNET_SOCKET   control socket, unless --socket is given

Exit status:
  0   done
  1   refused or failed; one line on standard error for each reason
  2   wrong usage

Examples:
  vnet interface add c1 --kind veth --device eth0 --netns box --mtu 9000
  vnet interface add vm1 --kind vhost-user --socket /run/vnet/vm1.sock --mac 52:54:00:00:00:01
  vnet interface set vm1 mode=vmm-driven
  vnet link add h2 --remote 10.10.0.2:9000 --sealed
  vnet keys init && vnet keys issue h1
  vnet route add --dst 52:54:00:00:00:02 --to 'link h2'
  vnet apply vnet.toml --dry-run
  vnet capture c1 tcp port 80
  vnet trace c1 52:54:00:00:00:02
  vnet save /etc/vnet/vnet.toml --force
  eval \"$(vnet mpi-env open-mpi)\" && mpirun --host 10.77.1.1,10.77.2.1 ./program
  vnet --json stats | jq .balance";

#[derive(Subcommand)]
pub enum Command {
    /// Overview of the host
    Status,
    /// Interfaces: virtual machines and containers of this host
    #[command(subcommand)]
    Interface(InterfaceCommand),
    /// Links to other hosts
    #[command(subcommand)]
    Link(LinkCommand),
    /// Routes: rules that take precedence over learned addresses
    #[command(subcommand)]
    Route(RouteCommand),
    /// Networks: isolated LANs, by number
    #[command(subcommand)]
    Network(NetworkCommand),
    /// Known MAC addresses: the place of each, and the time since it was last seen
    Addresses,
    /// Flows that the kernel forwards by itself, those that have carried most first
    Flows,
    /// The distributed overlay: its store, the other hosts, alarms
    Overlay,
    /// Apply a configuration file; only objects that differ are changed
    Apply {
        /// Configuration file; - for standard input. At most 1 MiB: reload larger files with SIGHUP
        file: PathBuf,
        /// Only show the changes, without making them
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the running state as a configuration file: the file's settings, with the changes that commands have made since
    Save(Save),
    /// Counters of every port, drops and discards by reason, and the balance of all frames
    Stats {
        /// Print again every SECONDS
        #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1",
              value_parser = clap::value_parser!(u32).range(1..=86_400))]
        watch: Option<u32>,
    },
    /// Check a configuration file, and the certificates and keys that it names; needs no vnetd
    Check {
        /// Configuration file; - for standard input
        file: PathBuf,
        /// Check only the text, for a file whose certificates and keys are on another host
        #[arg(long)]
        text_only: bool,
    },
    /// Trace a frame: where it would go, and which route or known address decides
    Trace(Trace),
    /// Follow events: changes of the configuration, states of interfaces and links, moves of addresses
    Events {
        /// End after N events
        #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        count: Option<u64>,
    },
    /// The VNET control language: interactive with history and completion, or read from files or standard input
    #[command(after_long_help = CONSOLE_HELP)]
    Console {
        /// Files with one command per line; - for standard input, which is also read if it is not a terminal
        files: Vec<PathBuf>,
        /// Syntax of the lines: 'links' and 'routes' are VNET/P's files, recognized by these names [default: console]
        #[arg(long = "as", value_name = "DIALECT")]
        dialect: Option<Lines>,
    },
    /// Capture frames at an interface or a link: one line for each, or pcapng for Wireshark and tcpdump
    #[command(after_long_help = CAPTURE_HELP)]
    Capture(Capture),
    /// Check this host for problems and slow settings, with a remedy for each; needs no vnetd, but queries a running one
    Doctor,
    /// Live rates of interfaces and links
    #[command(after_long_help = TOP_HELP)]
    Top(Top),
    /// Certificates for sealed links, issued by a small certificate authority of your own; needs no vnetd
    #[command(subcommand)]
    Keys(KeysCommand),
    /// Environment in which an MPI library uses the interconnect: eval "$(vnet mpi-env)"; needs no vnetd
    MpiEnv(MpiEnv),
    /// Versions of this command and of vnetd
    Version,
    /// Print the completions of a shell; the Debian package installs them
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of this command, for packages
    #[command(hide = true)]
    Man {
        /// Existing folder for the pages
        folder: PathBuf,
    },
}

const CONSOLE_HELP: &str = "\
Commands (HELP describes them):
  LINK ADD IP PORT [udp|tcp]     LINK DEL INDEX         LINKS?
  ROUTE ADD SRC DST edge|interface ID any|edge|interface [ID]
                                 ROUTE DEL INDEX        ROUTES?
  ROUTE MOVE MAC edge|interface ID
  INTERFACE ADD NAME veth|tap|vhost-user|local KEY=VALUE ...
                                 INTERFACE DEL INDEX    INTERFACES?
  STATS?  HELP  HELLO  DONE

Examples:
  echo 'LINK ADD 10.10.0.2 9000 udp' | vnet console
  vnet console links routes      VNET/P's own files";

/// Syntax of the console's lines.
#[derive(Clone, Copy, ValueEnum)]
pub enum Lines {
    /// Each line begins with its noun
    Console,
    /// ADD and DEL refer to links
    Links,
    /// ADD and DEL refer to routes
    Routes,
}

impl From<Lines> for Dialect {
    fn from(lines: Lines) -> Dialect {
        match lines {
            Lines::Console => Dialect::Console,
            Lines::Links => Dialect::Links,
            Lines::Routes => Dialect::Routes,
        }
    }
}

const CAPTURE_HELP: &str = "\
Filter, a part of tcpdump's language; as one argument or the words behind PORT:
  arp, ip, ip6, icmp, icmp6, tcp, udp     by protocol
  host 10.0.0.1, net 10.0.0.0/24          by IP address, also ARP's; with src or dst before
  port 80, tcp dst port 8000-8080         by port; with tcp or udp, src or dst before
  ether host 52:54:00:00:00:01            by MAC address; also ether src, ether dst
  ether proto 0x88b5, vlan [7]            by EtherType, by tag
  broadcast, multicast, network 7         by destination, by network
  inbound, outbound                       into vnet (from the guest or the other host), out of it
  less 100, greater 1500                  by length in bytes, the bound included
  and, or, not, ( )                       'not' binds tightest, then 'and'

Frames are shown as vnet carries them: super-frames uncut, checksums partial where the sender left them so. Frames that the
client reads too slowly are missed, and counted; forwarding never waits. Ctrl-C ends the capture.

Examples:
  vnet capture c1                          both directions of interface c1, a line each; times are UTC
  vnet capture any --drops                 what is dropped anywhere, and why
  vnet capture link h2 -w h2.pcapng tcp port 80
  vnet capture c1 -w - | tcpdump -nr -";

#[derive(Group)]
pub struct Capture {
    /// Where to capture: interface NAME, link NAME, the NAME of either, or any
    port: String,
    /// Write pcapng into this file; - for standard output
    #[arg(short, long, value_name = "FILE")]
    pub write: Option<PathBuf>,
    /// Frames to capture; see below [default: all]
    #[arg(long, value_name = "EXPRESSION")]
    filter: Option<String>,
    /// Only dropped frames, each with the reason
    #[arg(long)]
    drops: bool,
    /// Bytes to keep of each frame [default: all]
    #[arg(short, long, value_name = "BYTES")]
    snap: Option<u32>,
    /// End after N frames
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Words of the filter
    #[arg(value_name = "EXPRESSION")]
    words: Vec<String>,
}

impl Capture {
    /// The path of the request. The error is a usage error.
    pub fn path(&self) -> Result<String, clap::Error> {
        let Capture { port, filter, drops, snap, count, words, .. } = self;
        // The two words `link h2` are a port: no filter begins with a name.
        let (port, words) = match (port.as_str(), &words[..]) {
            ("interface" | "link", [name, words @ ..]) => (format!("{port} {name}"), words),
            (_, words) => (port.clone(), words),
        };
        if filter.is_some() && !words.is_empty() {
            let text = "the filter is given twice: by --filter, and by the words behind PORT";
            return Err(Args::command().error(ErrorKind::ArgumentConflict, text));
        }
        let filter = filter.clone().unwrap_or_else(|| words.join(" "));
        let mut path = format!("/v1/capture?port={}&filter={}&drops={drops}", encode(&port), encode(&filter));
        path += &snap.map(|snap| format!("&snap={snap}")).unwrap_or_default();
        path += &count.map(|count| format!("&count={count}")).unwrap_or_default();
        Ok(path)
    }
}

const TOP_HELP: &str = "\
Keys: s sorts by the next column, r reverses the order, space freezes the display, + and - change the interval, arrows and
page keys move, h or ? shows help, q leaves. Where standard output is no terminal, one table is printed.";

#[derive(Group)]
pub struct Trace {
    /// Source: a MAC address, an IP address of the overlay, or an interface's name
    src: String,
    /// Destination, in the same forms as SRC
    dst: String,
    /// Where the frame enters: 'interface NAME' or 'link NAME' [default: where SRC is known to be]
    #[arg(long, value_name = "PLACE")]
    from: Option<String>,
    /// Network [default: that of an interface named as SRC or DST, else 1]
    #[arg(long, value_name = "ID")]
    network: Option<u32>,
    /// Also query the hosts behind native links, hop by hop
    #[arg(long)]
    pub follow: bool,
}

impl Trace {
    /// The path of the request.
    pub fn path(&self) -> String {
        let Trace { src, dst, from, network, .. } = self;
        let from = from.as_ref().map(|from| format!("&from={}", encode(from))).unwrap_or_default();
        let network = network.map(|network| format!("&network={network}")).unwrap_or_default();
        format!("/v1/trace?src={}&dst={}{network}{from}", encode(src), encode(dst))
    }
}

#[derive(Group)]
pub struct Save {
    /// File to write, readable only by its owner because it may contain passwords of proxies [default: standard output]
    pub file: Option<PathBuf>,
    /// Replace an existing file, including its comments
    #[arg(long, requires = "file")]
    pub force: bool,
}

#[derive(Subcommand)]
pub enum NetworkCommand {
    /// List networks
    List,
}

#[derive(Subcommand)]
pub enum InterfaceCommand {
    /// List interfaces
    List,
    /// Add an interface
    Add(New<Interface>),
    /// Change an open interface: polling mode, guest notifications, limits
    #[command(after_long_help = crate::settings::set_help())]
    Set {
        /// Name of the interface
        name: String,
        /// Settings to change, as in mode=vmm-driven
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = setting)]
        settings: Vec<(String, Value)>,
    },
    /// Record when the guest is notified of what arrives, and when it reacts
    #[command(after_long_help = crate::timeline::HELP)]
    Timeline(Timeline),
    /// Remove an interface that no route names; its guest sees the link go down
    Del {
        /// Name of the interface
        name: String,
    },
}

#[derive(clap::Args)]
pub struct Timeline {
    /// Name of the interface
    name: String,
    /// Duration of the recording, 1 to 50
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=50))]
    seconds: u16,
}

impl Timeline {
    /// Path and query of the request.
    pub fn path(&self) -> String {
        format!("/v1/interfaces/{}/timeline?seconds={}", encode(&self.name), self.seconds)
    }
}

#[derive(Subcommand)]
pub enum LinkCommand {
    /// List links
    List,
    /// Add a link
    Add(New<Link>),
    /// Remove a link that no route names
    Del {
        /// Name of the link
        name: String,
    },
}

#[derive(Subcommand)]
pub enum RouteCommand {
    /// List routes
    List,
    /// Add a route
    Add(New<Route>),
    /// Make all routes to an address lead elsewhere, from one frame to the next: for a machine that has moved
    #[command(after_help = "Example:\n  vnet route move 52:54:00:00:00:02 'link h3'")]
    Move {
        /// MAC address of the machine
        mac: Mac,
        /// Where its frames go now: 'link NAME' or 'interface NAME'
        to: Target,
        /// The network
        #[arg(long, default_value_t = 1)]
        network: u32,
    },
    /// Remove a route
    Del {
        /// Index of the route, as shown by 'route list'
        #[arg(value_parser = index)]
        index: u32,
    },
}

/// Parses the index of a route.
fn index(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "write the number that 'vnet route list' shows as INDEX".into())
}

/// Parses KEY=VALUE; a value that looks like a number or boolean becomes one.
fn setting(text: &str) -> Result<(String, Value), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() && !value.is_empty() => {
            let value = match (value.parse::<i64>(), value.parse::<bool>()) {
                (Ok(number), _) => number.into(),
                (_, Ok(flag)) => flag.into(),
                _ => value.into(),
            };
            Ok((key.into(), value))
        }
        _ => Err("write KEY=VALUE, as in mode=vmm-driven".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_request_has_the_keys_that_were_given() {
        let args = ["vnet", "interface", "add", "c1", "--kind", "tap", "--device", "vnet0", "--mtu", "9000"];
        let Command::Interface(InterfaceCommand::Add(add)) = Args::parse_from(args).command else {
            panic!("interface add")
        };
        let want = serde_json::json!({ "name": "c1", "kind": "tap", "device": "vnet0", "mtu": 9000 });
        assert_eq!(add.request(), want);
    }

    #[test]
    fn settings_have_the_type_they_look_like() {
        let args = ["vnet", "interface", "set", "c1", "mode=vmm-driven", "rate_low=5", "port_security=true"];
        let Command::Interface(InterfaceCommand::Set { settings, .. }) = Args::parse_from(args).command
        else {
            panic!("interface set")
        };
        let want = serde_json::json!({ "mode": "vmm-driven", "rate_low": 5, "port_security": true });
        assert_eq!(settings.into_iter().collect::<Map<_, _>>(), *want.as_object().unwrap());
        for bad in [vec![], vec!["mode"], vec!["=5"], vec!["mode="]] {
            assert!(Args::try_parse_from([&["vnet", "interface", "set", "c1"], &bad[..]].concat()).is_err());
        }
    }

    #[test]
    fn a_capture_takes_its_port_as_one_word_or_two() {
        let path = |args: &[&str]| {
            let Command::Capture(capture) = Args::parse_from([&["vnet", "capture"], args].concat()).command
            else {
                panic!("capture")
            };
            capture
                .path()
                .map(|path| path.trim_start_matches("/v1/capture?").to_string())
                .map_err(|e| e.kind())
        };
        for (args, want) in [
            (&["h2"][..], "port=h2&filter=&drops=false"),
            (&["link h2"], "port=link%20h2&filter=&drops=false"),
            (&["link", "h2"], "port=link%20h2&filter=&drops=false"),
            (
                &["interface", "c1", "tcp", "port", "80"],
                "port=interface%20c1&filter=tcp%20port%2080&drops=false",
            ),
            (&["link", "h2", "--filter", "arp"], "port=link%20h2&filter=arp&drops=false"),
            (&["h2", "arp"], "port=h2&filter=arp&drops=false"),
        ] {
            assert_eq!(path(args).as_deref(), Ok(want), "{args:?}");
        }
        assert_eq!(path(&["h2", "arp", "--filter", "ip"]), Err(ErrorKind::ArgumentConflict));
    }

    #[test]
    fn watch_takes_an_interval_or_none() {
        for (args, want) in [(vec![], None), (vec!["--watch"], Some(1)), (vec!["--watch=5"], Some(5))] {
            let args = [vec!["vnet", "stats"], args].concat();
            let Command::Stats { watch } = Args::parse_from(args).command else { panic!("stats") };
            assert_eq!(watch, want);
        }
    }
}
