//! Stand-ins for rooms that are built on other branches; this file is deleted when they are merged.
#![allow(missing_docs)]

pub mod dispatch {
    use super::{link, route};
    use crate::frame::NetworkId;
    use crate::interface::Interface;
    use crate::stats::PortStats;
    use crate::wire::ethernet::Mac;
    use std::net::{SocketAddr, UdpSocket};
    use std::sync::Arc;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Yield {
        Block,
        Immediate,
        Timed,
        Adaptive,
    }

    pub struct CoreOptions {
        pub threads: usize,
        pub cpus: Vec<usize>,
        pub yield_strategy: Yield,
        pub sleep_us: u32,
        pub nowork_us: u32,
        pub listen: SocketAddr,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot listen on {0} (UDP): {1}; stop what uses it or change [bridge] listen")]
    pub struct CoreError(SocketAddr, std::io::Error);

    pub struct LearnedEntry {
        pub network: NetworkId,
        pub mac: Mac,
        pub port: crate::frame::PortId,
        pub age_s: u32,
    }

    pub struct Setup {
        pub networks: Vec<route::NetworkSpec>,
        pub interfaces: Vec<InterfacePort>,
        pub links: Vec<Arc<link::Link>>,
        pub rules: Vec<route::Rule>,
    }

    pub struct InterfacePort {
        pub member: route::Member,
        pub name: String,
        pub mtu: usize,
        pub stats: Arc<PortStats>,
        pub interface: Arc<dyn Interface>,
    }

    pub struct Core {
        socket: UdpSocket,
        stats: Arc<PortStats>,
        setup: std::sync::Mutex<Option<Setup>>,
    }

    impl Core {
        pub fn start(options: CoreOptions) -> Result<Core, CoreError> {
            let socket = UdpSocket::bind(options.listen).map_err(|e| CoreError(options.listen, e))?;
            Ok(Core { socket, stats: Arc::default(), setup: std::sync::Mutex::new(None) })
        }
        pub fn bridge_address(&self) -> SocketAddr {
            self.socket.local_addr().unwrap()
        }
        pub fn publish(&self, setup: Setup) {
            *self.setup.lock().unwrap() = Some(setup);
        }
        pub fn learned(&self) -> Vec<LearnedEntry> {
            vec![]
        }
        pub fn bridge_stats(&self) -> Arc<PortStats> {
            self.stats.clone()
        }
        pub fn shutdown(self) {}
    }
}

pub mod route {
    use crate::frame::{NetworkId, PortId};
    use crate::wire::ethernet::{Mac, MacError};

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Qualifier {
        None,
        Any,
        Not(Mac),
        Is(Mac),
    }

    impl std::str::FromStr for Qualifier {
        type Err = MacError;
        fn from_str(text: &str) -> Result<Qualifier, MacError> {
            match text {
                "any" => Ok(Qualifier::Any),
                "none" => Ok(Qualifier::None),
                _ => match text.strip_prefix("not-") {
                    Some(mac) => Ok(Qualifier::Not(mac.parse()?)),
                    None => Ok(Qualifier::Is(text.parse()?)),
                },
            }
        }
    }

    impl std::fmt::Display for Qualifier {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            match self {
                Qualifier::None => f.write_str("none"),
                Qualifier::Any => f.write_str("any"),
                Qualifier::Not(mac) => write!(f, "not-{mac}"),
                Qualifier::Is(mac) => mac.fmt(f),
            }
        }
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Source {
        Any,
        AnyInterface,
        AnyLink,
        Port(PortId),
    }

    #[derive(Clone, Debug)]
    pub struct Rule {
        pub index: u32,
        pub network: NetworkId,
        pub src: Qualifier,
        pub dst: Qualifier,
        pub from: Source,
        pub to: PortId,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        Interface,
        Link,
    }

    #[derive(Clone, Debug)]
    pub enum Networks {
        All,
        Some(Vec<NetworkId>),
    }

    #[derive(Clone, Debug)]
    pub struct Member {
        pub port: PortId,
        pub kind: Kind,
        pub networks: Networks,
        pub mac: Option<Mac>,
        pub storm_frames_per_s: Option<u32>,
        pub port_security: bool,
    }

    #[derive(Clone, Debug)]
    pub struct NetworkSpec {
        pub id: NetworkId,
        pub learning: bool,
        pub ageing_s: u32,
    }
}

pub mod link {
    use crate::frame::{NetworkId, PortId};
    use crate::stats::PortStats;
    use std::net::SocketAddr;
    use std::sync::Arc;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Encapsulation {
        Native,
        Vnet,
    }

    #[derive(Clone, Debug)]
    pub struct LinkOptions {
        pub name: String,
        pub remote: SocketAddr,
        pub encapsulation: Encapsulation,
        pub networks: Option<Vec<NetworkId>>,
        pub mtu: Option<u16>,
    }

    pub struct Link {
        pub options: LinkOptions,
        pub port: PortId,
        pub stats: Arc<PortStats>,
    }

    impl Link {
        pub fn new(options: LinkOptions, port: PortId, stats: Arc<PortStats>) -> Arc<Link> {
            Arc::new(Link { options, port, stats })
        }
    }
}

pub mod vhost_user {
    use crate::frame::{Batch, Origin};
    use crate::interface::{Interface, State};
    use crate::poll::Waker;
    use crate::stats::PortStats;
    use crate::wire::ethernet::Mac;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::PathBuf;
    use std::sync::Arc;

    #[derive(Clone, Debug)]
    pub struct VhostUserOptions {
        pub name: String,
        pub socket: PathBuf,
        pub server: bool,
        pub mac: Option<Mac>,
        pub mtu: usize,
        pub queues: usize,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("cannot listen on '{0}': {1}")]
    pub struct VhostUserError(PathBuf, String);

    pub struct VhostUser {
        socket: PathBuf,
        listener: Option<UnixListener>,
    }

    impl VhostUser {
        pub fn start(
            options: VhostUserOptions,
            _origin: Origin,
            _stats: Arc<PortStats>,
        ) -> Result<Arc<VhostUser>, VhostUserError> {
            let error = |text: String| VhostUserError(options.socket.clone(), text);
            let listener = if options.server {
                if UnixStream::connect(&options.socket).is_ok() {
                    return Err(error("in use by a live program".into()));
                }
                let _ = std::fs::remove_file(&options.socket);
                Some(UnixListener::bind(&options.socket).map_err(|e| error(e.to_string()))?)
            } else {
                None
            };
            Ok(Arc::new(VhostUser { socket: options.socket, listener }))
        }
    }

    impl Interface for VhostUser {
        fn queues(&self) -> usize {
            1
        }
        fn receive(&self, _: usize, _: &mut Batch, _: &mut dyn FnMut(&Batch)) -> usize {
            0
        }
        fn deliver(&self, _: usize, _: &Batch, _: &[u16]) {}
        fn attach(&self, _: usize, _: Waker) {}
        fn detach(&self, _: usize) {}
        fn arm(&self, _: usize) -> bool {
            true
        }
        fn disarm(&self, _: usize) {}
        fn polls(&self) -> bool {
            true
        }
        fn state(&self) -> State {
            State::Down("no guest is connected".into())
        }
        fn stop(&self) {
            if self.listener.is_some() {
                let _ = std::fs::remove_file(&self.socket);
            }
        }
    }
}
