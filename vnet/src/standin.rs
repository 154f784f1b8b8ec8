//! Stand-ins for rooms that are built on other branches; this file is deleted when they are merged.
#![allow(missing_docs)]

pub mod dispatch {
    pub mod yielding {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        pub enum Strategy {
            Block,
            Immediate,
            Timed,
            #[default]
            Adaptive,
        }
    }

    pub mod setup {
        use crate::interface::Interface;
        use crate::link::Link;
        use crate::route::{Member, NetworkSpec, Rule};
        use crate::stats::PortStats;
        use std::sync::Arc;

        pub struct InterfacePort {
            pub member: Member,
            pub name: String,
            pub stats: Arc<PortStats>,
            pub interface: Arc<dyn Interface>,
        }

        pub struct LinkPort {
            pub member: Member,
            pub link: Arc<Link>,
        }

        #[derive(Default)]
        pub struct Parts {
            pub networks: Vec<NetworkSpec>,
            pub interfaces: Vec<InterfacePort>,
            pub links: Vec<LinkPort>,
            pub rules: Vec<Rule>,
        }
    }

    pub mod core {
        use super::setup::Parts;
        use super::yielding::Strategy;
        use crate::route::{Learned, Table};
        use crate::stats::PortStats;
        use std::net::{SocketAddr, UdpSocket};
        use std::sync::{Arc, Mutex};

        pub struct CoreOptions {
            pub threads: usize,
            pub cpus: Vec<usize>,
            pub yield_strategy: Strategy,
            pub sleep_us: u32,
            pub nowork_us: u32,
            pub listen: SocketAddr,
        }

        #[derive(Debug, thiserror::Error)]
        #[error("cannot listen on {0} (UDP): {1}; stop what uses it or change [bridge] listen")]
        pub struct CoreError(SocketAddr, std::io::Error);

        pub struct Core {
            socket: UdpSocket,
            stats: Arc<PortStats>,
            learned: Arc<Learned>,
            parts: Mutex<Parts>,
        }

        impl Core {
            pub fn start(options: &CoreOptions) -> Result<Core, CoreError> {
                let socket = UdpSocket::bind(options.listen).map_err(|e| CoreError(options.listen, e))?;
                Ok(Core {
                    socket,
                    stats: Arc::default(),
                    learned: Arc::new(Learned::new()),
                    parts: Mutex::default(),
                })
            }
            pub fn bridge_address(&self) -> SocketAddr {
                self.socket.local_addr().unwrap()
            }
            pub fn publish(&self, parts: Parts) {
                *self.parts.lock().unwrap() = parts;
            }
            pub fn learned(&self) -> &Arc<Learned> {
                &self.learned
            }
            pub fn table(&self) -> Arc<Table> {
                Arc::new(Table::build(vec![], &[], &[]))
            }
            pub fn now_ms(&self) -> u64 {
                0
            }
            pub fn bridge_stats(&self) -> &Arc<PortStats> {
                &self.stats
            }
        }
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

    #[derive(Clone, Debug, PartialEq, Eq)]
    pub enum LinkState {
        Up,
        Unreachable(String),
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
        pub fn path_mtu(&self) -> u16 {
            self.options.mtu.unwrap_or(1280)
        }
        pub fn state(&self) -> LinkState {
            LinkState::Up
        }
        pub fn heard_ms(&self) -> Option<u64> {
            None
        }
    }
}

pub mod vhost_user {
    use crate::frame::{Batch, NetworkId, PortId};
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

    pub const QUEUES_MAX: usize = 128;

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
            _port: PortId,
            _network: NetworkId,
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
