//! `GET /metrics`: counters as OpenMetrics text for Prometheus.
//!
//! Names and units are stable, because users build alerts on them. A scrape reads the engine's counters and
//! [`vnet::dispatch::counters`]; no counter exists only for metrics.

use std::fmt;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use vnet::dispatch::dispatcher_stats::{BATCH_BOUNDS, Counts, LATENCY_BOUNDS_US};
use vnet::route::LearnedStats;
use vnet_control::api::{self, Counters};
use vnet_control::engine::Engine;
use vnet_control::overlay::Alarm;
use vnet_rdma::daemon::{ContainerCounters, EndpointReport};

use crate::rdma_engine::RdmaEngine;
use crate::shared::{Refused, Shared, with_engine};

const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A snapshot of all values that one scrape reports.
#[derive(Debug)]
pub struct Reading {
    status: api::Status,
    ports: Vec<api::Port>,
    interfaces: Vec<(String, bool)>,
    kernel_paths: Vec<(String, bool)>,
    link_kernel_paths: Vec<(String, bool)>,
    links: Vec<(String, bool)>,
    /// Seconds until certificates expire, by host name.
    certificates: Vec<(String, u64)>,
    learned: LearnedStats,
    overlay: Option<api::Overlay>,
    dispatchers: Vec<Dispatcher>,
    /// Applications whose interconnect engine runs here, by container.
    rdma: Vec<(String, ContainerCounters)>,
}

#[derive(Debug)]
struct Dispatcher {
    frames: u64,
    batches: Counts,
    latency_ns: Counts,
}

impl Reading {
    /// Takes a snapshot.
    pub fn of(engine: &Engine, rdma: Vec<(String, ContainerCounters)>) -> Reading {
        let up = |name: String, state: &str| (name, state == "up");
        let dispatcher = |stats: &std::sync::Arc<vnet::dispatch::dispatcher_stats::DispatcherStats>| {
            Dispatcher { frames: stats.frames(), batches: stats.batches(), latency_ns: stats.latency_ns() }
        };
        let (status, interfaces, links) = (engine.status(), engine.interfaces(), engine.links());
        let own = status.certificate_s.map(|left_s| (status.host.clone(), left_s));
        let peer = |link: &api::Link| Some((link.settings.text("peer"), link.certificate_s?));
        Reading {
            certificates: own.into_iter().chain(links.iter().filter_map(peer)).collect(),
            status,
            ports: engine.stats().ports,
            kernel_paths: interfaces.iter().map(|i| (i.name.clone(), i.path == "kernel")).collect(),
            link_kernel_paths: links.iter().map(|link| (link.name.clone(), link.path == "kernel")).collect(),
            interfaces: interfaces.into_iter().map(|i| up(i.name, &i.state)).collect(),
            links: links.into_iter().map(|link| up(link.name, &link.state)).collect(),
            learned: engine.learned_stats(),
            overlay: engine.overlay(),
            dispatchers: engine.dispatcher_stats().iter().map(dispatcher).collect(),
            rdma,
        }
    }
}

/// A port's counter: name, unit, help, value.
type PortCounter = (&'static str, Option<Unit>, &'static str, fn(&Counters) -> u64);

const PORT_COUNTERS: [PortCounter; 20] = [
    ("port_in_frames", None, "Frames received from this port, dropped ones included", |c| c.in_frames),
    ("port_in", Some(Unit::Bytes), "Bytes of frames received from this port", |c| c.in_bytes),
    ("port_out_frames", None, "Frames delivered to this port", |c| c.out_frames),
    ("port_out", Some(Unit::Bytes), "Bytes of frames delivered to this port", |c| c.out_bytes),
    ("port_copies", None, "Extra copies of frames from this port that went to several destinations", |c| {
        c.copies
    }),
    (
        "port_answers",
        None,
        "ARP and neighbour discovery requests from this port answered by vnet instead of flooded",
        |c| c.answers,
    ),
    ("port_notifications", None, "Notifications (interrupts) sent to the guest", |c| c.notifications),
    ("port_early_interrupts", None, "Notifications sent to the guest before its frames were copied", |c| {
        c.interrupts.early
    }),
    (
        "port_early_at_arrival",
        None,
        "Early notifications sent when data arrived, before it was received",
        |c| c.interrupts.early_at_arrival,
    ),
    (
        "port_early_mispredicted",
        None,
        "Early notifications at arrival after which no frame came for the guest",
        |c| c.interrupts.early_mispredicted,
    ),
    ("port_kicks", None, "Notifications (kicks) received from the guest", |c| c.kicks),
    ("port_zero_copy_sent", None, "Messages sent on this link without a copy (MSG_ZEROCOPY)", |c| {
        c.zero_copy_sent
    }),
    ("port_zero_copy_copied", None, "Zero-copy messages that the kernel copied after all", |c| {
        c.zero_copy_copied
    }),
    ("port_zero_copy_fallen_back", None, "Messages meant for zero copy that vnet copied instead", |c| {
        c.zero_copy_fallen_back
    }),
    ("port_direct_in_place", None, "Frames from this link received directly into a guest's buffers", |c| {
        c.direct_in_place
    }),
    (
        "port_direct_copied_out",
        None,
        "Messages received into a guest's buffers that had to be copied out again",
        |c| c.direct_copied_out,
    ),
    ("port_direct_refused", None, "Direct ports that the other host announced and this host refused", |c| {
        c.direct_refused
    }),
    (
        "port_translations_refused",
        None,
        "Conversations to translate that the other host offered and this host refused",
        |c| c.translations_refused,
    ),
    ("port_in_datagrams", None, "Datagrams received for this link", |c| c.in_datagrams),
    ("port_out_datagrams", None, "Datagrams sent on this link", |c| c.out_datagrams),
];

type Label = (&'static str, String);

/// Encoder that writes metric families in order.
struct Families<'a>(DescriptorEncoder<'a>);

impl Families<'_> {
    fn family<L>(
        &mut self,
        (name, unit, help): (&str, Option<Unit>, &str),
        kind: MetricType,
        members: impl IntoIterator<Item = (Vec<Label>, L)>,
        write: impl Fn(&mut MetricEncoder<'_>, L) -> fmt::Result,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in members {
            write(&mut family.encode_family(&labels)?, value)?;
        }
        Ok(())
    }

    fn counter(
        &mut self,
        what: (&str, Option<Unit>, &str),
        members: impl IntoIterator<Item = (Vec<Label>, u64)>,
    ) -> fmt::Result {
        self.family(what, MetricType::Counter, members, |member, value| {
            member.encode_counter::<NoLabelSet, u64, f64>(&value, None)
        })
    }

    fn gauge(
        &mut self,
        what: (&str, Option<Unit>, &str),
        members: impl IntoIterator<Item = (Vec<Label>, u64)>,
    ) -> fmt::Result {
        let write = |member: &mut MetricEncoder<'_>, value: u64| member.encode_gauge(&value);
        self.family(what, MetricType::Gauge, members, write)
    }

    /// Writes a histogram of `counts`; `unit` converts them to the metric's unit, in which `bounds` are given.
    fn histogram<'c>(
        &mut self,
        what: (&str, Option<Unit>, &str),
        unit: f64,
        bounds: &[f64],
        members: impl IntoIterator<Item = (Vec<Label>, &'c Counts)>,
    ) -> fmt::Result {
        self.family(what, MetricType::Histogram, members, |member, counts| {
            let bounds = bounds.iter().copied().chain([f64::INFINITY]);
            let buckets: Vec<_> = bounds.zip(counts.buckets.iter().copied()).collect();
            let count = counts.buckets.iter().sum();
            member.encode_histogram::<NoLabelSet>(counts.sum as f64 * unit, count, &buckets, None)
        })
    }
}

fn alone(value: u64) -> [(Vec<Label>, u64); 1] {
    [(vec![], value)]
}

/// A value of a container whose applications use the interconnect's engine here: name, unit, help, whether it may fall, value.
type RdmaValue = (&'static str, Option<Unit>, &'static str, bool, fn(&ContainerCounters) -> u64);

const RDMA_VALUES: [RdmaValue; 20] = [
    ("rdma_processes", None, "Applications whose interconnect engine vnetd runs", true, |c| c.processes),
    ("rdma_endpoints", None, "Their open endpoints", true, |c| c.endpoints.len() as u64),
    ("rdma_regions", None, "Pieces of memory that they have registered", true, |c| c.mappings),
    ("rdma_registered", Some(Unit::Bytes), "Memory that they have registered", true, |c| c.mapped_bytes),
    ("rdma_submissions", None, "Entries taken from their queues", false, |c| c.submissions),
    (
        "rdma_refusals",
        None,
        "Entries with an address outside the registered memory, and memory that was not mapped",
        false,
        |c| c.refused,
    ),
    ("rdma_broken", None, "Applications that were cut off because they wrote nonsense", false, |c| c.broken),
    ("rdma_out_packets", None, "Packets sent for them", false, |c| c.packets_out),
    ("rdma_out", Some(Unit::Bytes), "Bytes of packets sent for them", false, |c| c.bytes_out),
    (
        "rdma_same_host_packets",
        None,
        "Those that went straight to another application of vnetd",
        false,
        |c| c.same_host_packets,
    ),
    ("rdma_same_host", Some(Unit::Bytes), "Bytes of these packets", false, |c| c.same_host_bytes),
    ("rdma_in_packets", None, "Packets received for them", false, |c| c.packets_in),
    (
        "rdma_relayed_packets",
        None,
        "Packets that the helper of their virtual machine relayed to and from applications with the process engine",
        false,
        |c| c.relay.relayed,
    ),
    (
        "rdma_relay_drops",
        None,
        "Packets that it did not relay: too long, or beyond the rate limit",
        false,
        |c| c.relay.dropped,
    ),
    (
        "rdma_spoofed_drops",
        None,
        "Packets from the network that were dropped because their source address is one of their virtual machine",
        false,
        |c| c.relay.spoofed,
    ),
    ("rdma_throttled_turns", None, "Turns after which they had used up their rate", false, |c| c.throttled),
    (
        "rdma_endpoint_throttles",
        None,
        "Times that the rate of one of their endpoints began to hold packets back",
        false,
        |c| c.held_back,
    ),
    ("rdma_seal_sessions", None, "Sessions with peers behind sealed links that began", false, |c| {
        c.seal.sessions
    }),
    ("rdma_sealed_out_packets", None, "Packets that were sealed", false, |c| c.seal.packets_out),
    ("rdma_sealed_in_packets", None, "Packets that were opened", false, |c| c.seal.packets_in),
];

/// A value of an endpoint of such an application, as above. The engine has at most 512 of them: 16 of each of 32 applications.
type EndpointValue = (&'static str, Option<Unit>, &'static str, bool, fn(&EndpointReport) -> u64);

const ENDPOINT_VALUES: [EndpointValue; 5] = [
    ("rdma_endpoint_packets", None, "Packets that an endpoint has sent", false, |e| e.counters.packets),
    ("rdma_endpoint_sent", Some(Unit::Bytes), "Bytes of packets that an endpoint has sent", false, |e| {
        e.counters.bytes
    }),
    (
        "rdma_endpoint_holds",
        None,
        "Times that an endpoint's rate began to hold its packets back",
        false,
        |e| e.counters.held_back,
    ),
    ("rdma_endpoint_weight", None, "Weight of an endpoint in what its application sends", true, |e| {
        e.share.weight.into()
    }),
    ("rdma_endpoint_rate", None, "Bytes per second that an endpoint may send; 0: no limit", true, |e| {
        e.share.rate
    }),
];

impl Collector for Reading {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut families = Families(encoder);
        self.encode_host(&mut families)?;
        self.encode_overlay(&mut families)?;
        self.encode_ports(&mut families)?;
        self.encode_dispatchers(&mut families)?;
        self.encode_rdma(&mut families)
    }
}

impl Reading {
    fn encode_host(&self, families: &mut Families<'_>) -> fmt::Result {
        let api::Status { version, host, uptime_s, routes, networks, .. } = &self.status;
        let labels: Vec<Label> = vec![("version", version.clone()), ("host", host.clone())];
        families
            .gauge(("host_info", None, "Always 1; version and host name are in the labels"), [(labels, 1)])?;
        families.gauge(("uptime", Some(Unit::Seconds), "Time since vnetd was ready"), alone(*uptime_s))?;
        families.gauge(("routes", None, "Routing rules"), alone(*routes as u64))?;
        families.gauge(("networks", None, "Networks"), alone(*networks as u64))?;
        let up = |objects: &[(String, bool)], label: &'static str| {
            objects.iter().map(|(name, up)| (vec![(label, name.clone())], u64::from(*up))).collect::<Vec<_>>()
        };
        let interfaces = up(&self.interfaces, "interface");
        families.gauge(("interface_up", None, "1 when the interface is up"), interfaces)?;
        let help = "1 when the kernel forwards known flows of the interface by itself";
        families.gauge(("interface_kernel_path", None, help), up(&self.kernel_paths, "interface"))?;
        let kernel = |value: fn(&api::KernelSummary) -> u64| {
            self.status.kernel.iter().map(move |k| (vec![], value(k)))
        };
        let help = "Flows that the kernel forwards by itself";
        families.gauge(("kernel_flows", None, help), kernel(|kernel| kernel.flows as u64))?;
        let help = "Connections and UDP flows of guests whose packets leave for other hosts without a tunnel";
        families.gauge(("kernel_translated", None, help), kernel(|kernel| kernel.translated as u64))?;
        let help = "Times a flow was refused at a limit of the kernel's own path; vnetd forwards it";
        families.counter(("kernel_flow_refusals", None, help), kernel(|kernel| kernel.refused))?;
        let links = up(&self.links, "link");
        families.gauge(("link_up", None, "1 when the link is up"), links)?;
        let help = "1 when the kernel forwards known flows to the link's other host by itself";
        families.gauge(("link_kernel_path", None, help), up(&self.link_kernel_paths, "link"))?;
        let left = self.certificates.iter().map(|(host, left_s)| (vec![("host", host.clone())], *left_s));
        let help =
            "Time until the certificate of this host, or of a sealed link's peer, ends; 0 when it has ended";
        families.gauge(("certificate_expiry", Some(Unit::Seconds), help), left)?;
        let LearnedStats { entries, moves, frozen, refused, duplicates } = self.learned;
        families.gauge(("learned_addresses", None, "Learned MAC addresses"), alone(entries))?;
        families
            .counter(("learned_moves", None, "Times a MAC address moved to another port"), alone(moves))?;
        let help = "Times a MAC address was frozen because it moved too often";
        families.counter(("learned_freezes", None, help), alone(frozen))?;
        let help = "Times a MAC address was not learned because its port's share of the table was full";
        families.counter(("learned_refusals", None, help), alone(refused))?;
        let help =
            "Times a MAC address configured on an interface was heard from elsewhere: two stations use it";
        families.counter(("learned_duplicates", None, help), alone(duplicates))
    }

    fn encode_overlay(&self, families: &mut Families<'_>) -> fmt::Result {
        let shown = |value: fn(&api::Overlay) -> u64| self.overlay.iter().map(move |o| (vec![], value(o)));
        let help = "1 when the host is in sync with the overlay's store";
        families.gauge(("overlay_connected", None, help), shown(|o| u64::from(o.state == "connected")))?;
        families
            .gauge(("overlay_hosts", None, "Other hosts in the overlay"), shown(|o| o.hosts.len() as u64))?;
        let help = "Stations in the overlay's store, including this host's";
        families.gauge(("overlay_stations", None, help), shown(|o| o.stations as u64))?;
        let alarms = self.overlay.iter().flat_map(|overlay| {
            Alarm::ALL.iter().map(|kind| {
                let raised = overlay.alarms.iter().find(|alarm| alarm.name == kind.name());
                (vec![("alarm", kind.name().into())], raised.map_or(0, |alarm| alarm.count))
            })
        });
        families.counter(("overlay_alarms", None, "Alarms of the overlay, by kind"), alarms)
    }

    fn encode_ports(&self, families: &mut Families<'_>) -> fmt::Result {
        let labels = |port: &api::Port| vec![("kind", port.kind.clone()), ("port", port.name.clone())];
        for (name, unit, help, value) in PORT_COUNTERS {
            let members = self.ports.iter().map(|port| (labels(port), value(&port.counters)));
            families.counter((name, unit, help), members)?;
        }
        type Reasons = fn(&Counters) -> &std::collections::BTreeMap<String, u64>;
        let by_reason: [(&str, &str, Reasons); 2] = [
            ("port_drops", "Frames not delivered, by reason", |c| &c.drops),
            ("port_discards", "Datagrams that carried no frame into the core, by reason", |c| &c.discards),
        ];
        for (name, help, reasons) in by_reason {
            let members = self.ports.iter().flat_map(|port| {
                reasons(&port.counters).iter().map(move |(reason, count)| {
                    let mut labels = labels(port);
                    labels.push(("reason", reason.clone()));
                    (labels, *count)
                })
            });
            families.counter((name, None, help), members)?;
        }
        Ok(())
    }

    fn encode_rdma(&self, families: &mut Families<'_>) -> fmt::Result {
        for (name, unit, help, is_gauge, value) in RDMA_VALUES {
            let members =
                self.rdma.iter().map(|(netns, counters)| (vec![("netns", netns.clone())], value(counters)));
            if is_gauge {
                families.gauge((name, unit, help), members)?;
            } else {
                families.counter((name, unit, help), members)?;
            }
        }
        for (name, unit, help, is_gauge, value) in ENDPOINT_VALUES {
            let members = self.rdma.iter().flat_map(|(netns, counters)| {
                let labels = move |of: &EndpointReport| {
                    let (address, endpoint) = (of.address.to_string(), of.endpoint.to_string());
                    vec![("netns", netns.clone()), ("address", address), ("endpoint", endpoint)]
                };
                counters.endpoints.iter().map(move |of| (labels(of), value(of)))
            });
            if is_gauge {
                families.gauge((name, unit, help), members)?;
            } else {
                families.counter((name, unit, help), members)?;
            }
        }
        let drops = self.rdma.iter().flat_map(|(netns, counters)| {
            let labels = move |reason: &str| vec![("netns", netns.clone()), ("reason", reason.to_owned())];
            counters.seal.drops().map(move |(reason, count)| (labels(reason), count))
        });
        let help =
            "Packets that were not sealed and had to be, could not be opened, or had no keys, by reason";
        families.counter(("rdma_seal_drops", None, help), drops)
    }

    fn encode_dispatchers(&self, families: &mut Families<'_>) -> fmt::Result {
        let api::Threads { now, recruited, released, moves, .. } = self.status.threads;
        families.gauge(("dispatch_threads", None, "Threads that run the dispatchers"), alone(now as u64))?;
        let help = "Threads recruited because the load was high";
        families.counter(("dispatch_threads_recruited", None, help), alone(recruited))?;
        let help = "Threads released because the load was low";
        families.counter(("dispatch_threads_released", None, help), alone(released))?;
        families
            .counter(("dispatch_moves", None, "Moves of a dispatcher to another thread"), alone(moves))?;
        let each = || {
            let label = |(id, d)| (vec![("dispatcher", format!("{id}"))], d);
            self.dispatchers.iter().enumerate().map(label)
        };
        let frames = each().map(|(labels, d): (_, &Dispatcher)| (labels, d.frames));
        families
            .counter(("dispatch_frames", None, "Frames forwarded or dropped by the dispatcher"), frames)?;
        let bounds = BATCH_BOUNDS.map(f64::from);
        let batches = each().map(|(labels, d): (_, &Dispatcher)| (labels, &d.batches));
        families.histogram(("dispatch_batch_frames", None, "Frames in a batch"), 1.0, &bounds, batches)?;
        let bounds = LATENCY_BOUNDS_US.map(|us| f64::from(us) / 1e6);
        let latency = each().map(|(labels, d): (_, &Dispatcher)| (labels, &d.latency_ns));
        let help = "Time from a batch's arrival at the dispatcher until all of it is delivered; 1 batch in 16 is sampled";
        families.histogram(("dispatch_latency", Some(Unit::Seconds), help), 1e-9, &bounds, latency)
    }
}

/// Encodes a snapshot as OpenMetrics text.
pub fn write(reading: Reading) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("vnet");
    registry.register_collector(Box::new(reading));
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Metrics as OpenMetrics text, for Prometheus
#[utoipa::path(get, path = "/metrics", responses((status = 200, body = String, content_type = "application/openmetrics-text")))]
pub async fn text(State(shared): State<Shared>, State(rdma): State<RdmaEngine>) -> Result<Response, Refused> {
    let counters = rdma.counters();
    let reading = with_engine(shared, |engine| Ok(Reading::of(engine, counters))).await?;
    let text = write(reading).map_err(|error| Refused::Request(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response())
}

#[cfg(test)]
mod tests {
    use vnet_rdma::daemon::ShareSettings;
    use vnet_rdma::{EndpointCounters, SealCounters};

    use super::*;

    /// One of two interfaces and one of two links have the kernel's own path.
    fn reading() -> Reading {
        let status = serde_json::json!({
            "version": "1", "host": "h1", "pid": 1, "uptime_s": 1, "bridge": "[::]:9000", "dispatchers": 1, "yield": "block",
            "interfaces_up": 2, "interfaces": 2, "links": 2, "routes": 0, "networks": 1, "learned": 0,
            "kernel": {"interfaces": 1, "flows": 4096, "refused": 17},
            "balance": {"in": 0, "copies": 0, "out": 0, "drops": 0},
        });
        let seal = SealCounters { packets_out: 7, clear: 3, ..SealCounters::default() };
        let endpoint = EndpointReport {
            address: "10.77.1.1:7000".parse().unwrap(),
            endpoint: 3,
            share: ShareSettings { weight: 25, rate: 1_000 },
            counters: EndpointCounters { packets: 5, bytes: 600, held_back: 2 },
        };
        let of_container =
            ContainerCounters { seal, endpoints: vec![endpoint], ..ContainerCounters::default() };
        Reading {
            status: serde_json::from_value(status).unwrap(),
            ports: vec![],
            interfaces: vec![],
            kernel_paths: vec![("c1".into(), true), ("vm1".into(), false)],
            link_kernel_paths: vec![("h2".into(), true), ("h3".into(), false)],
            links: vec![],
            certificates: vec![],
            learned: LearnedStats::default(),
            overlay: None,
            dispatchers: vec![],
            rdma: vec![("c1".into(), of_container)],
        }
    }

    #[test]
    fn dropped_packets_of_sealed_links_have_one_reason() {
        let text = write(reading()).unwrap();
        for line in [
            "vnet_rdma_sealed_out_packets_total{netns=\"c1\"} 7",
            "vnet_rdma_seal_drops_total{netns=\"c1\",reason=\"clear\"} 3",
            "vnet_rdma_seal_drops_total{netns=\"c1\",reason=\"unsent\"} 0",
        ] {
            assert!(text.lines().any(|is| is == line), "no line '{line}' in:\n{text}");
        }
    }

    #[test]
    fn each_endpoint_has_its_figures() {
        let text = write(reading()).unwrap();
        let labels = "{netns=\"c1\",address=\"10.77.1.1:7000\",endpoint=\"3\"}";
        for (name, value) in [
            ("packets_total", 5),
            ("sent_bytes_total", 600),
            ("holds_total", 2),
            ("weight", 25),
            ("rate", 1_000),
        ] {
            let line = format!("vnet_rdma_endpoint_{name}{labels} {value}");
            assert!(text.lines().any(|is| is == line), "no line '{line}' in:\n{text}");
        }
        assert!(text.lines().any(|is| is == "vnet_rdma_endpoints{netns=\"c1\"} 1"), "{text}");
    }

    #[test]
    fn the_kernels_own_path_has_its_figures() {
        let text = write(reading()).unwrap();
        for line in [
            "vnet_interface_kernel_path{interface=\"c1\"} 1",
            "vnet_interface_kernel_path{interface=\"vm1\"} 0",
            "vnet_link_kernel_path{link=\"h2\"} 1",
            "vnet_link_kernel_path{link=\"h3\"} 0",
            "vnet_kernel_flows{} 4096",
            "vnet_kernel_flow_refusals_total{} 17",
        ] {
            assert!(text.lines().any(|is| is == line), "no line '{line}' in:\n{text}");
        }
        let mut without = reading();
        without.status.kernel = None;
        assert!(!write(without).unwrap().contains("\nvnet_kernel_flows{"), "a host without interfaces");
    }
}
