"""Switches between vhost-user ports (vnetd, Open vSwitch on DPDK), and the load on them.

    testpmd, processor 1                        the switch, processor 0
    virtio-user port 0 --- socket v0.sock --- interface v0 --.
                                                             |  on one host, or across a link
    virtio-user port 1 --- socket v1.sock --- interface v1 --'

testpmd is the server of both sockets for every switch, and sends 64-byte frames of 16 flows from each port to the
other. Its flow generator uses the same two Ethernet addresses in both directions, which defeats MAC learning: every
switch gets static rules from port to port instead. The stream of TCP super-frames runs between two instances of
`vnet/examples/guest.rs`, a sender and a receiver.
"""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vnetlab import daemon, process, remote
from vnetlab.bench import environment, usage
from vnetlab.bench.contenders import Vnet, absent, running
from vnetlab.bench.result import Sample
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import PORT, Node, Topology

MACS = ("02:00:00:00:00:10", "02:00:00:00:00:11")
SWITCH_CPU, LOAD_CPU = 0, 1
PAGES = 512
"""Huge pages of 2 MiB: 512 MiB for the switch, 256 for testpmd, and some for vhost."""
PAGES_FILE = Path("/proc/sys/vm/nr_hugepages")
PAGES_FOLDER = Path("/run/vnet-bench-hugepages")
PAGES_BEFORE = Path("/run/vnet-bench-hugepages.before")
START_S = 30
RX_PPS = re.compile(r"Rx-pps:\s+(\d+)")
PMD_CYCLES = re.compile(r"avg processing cycles per packet: ([\d.]+)")
PMD_ALL_CYCLES = re.compile(r"avg cycles per packet: ([\d.]+)")
SUPER_FRAME_BYTES = 65_226
"""Linux's super-frame of a long stream at an MSS of 1448: 45 segments and one header."""
VSWITCHD = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"


class Switching(Protocol):
    """A running switch."""

    processes: dict[str, int]

    def begin(self) -> None:
        """Starts counting cycles and frames."""

    def cycles(self) -> Sample:
        """Cycles per frame since `begin`."""


class Switch(Protocol):
    """A means to connect the two sockets."""

    name: str

    def missing(self) -> str | None:
        """Why the switch cannot run on this machine; None if it can."""

    def up(self, topology: Topology, sockets: list[Path]) -> contextlib.AbstractContextManager[Switching]:
        """Connects the sockets while the context lasts."""


@dataclass
class RunningVnet:
    """One vnetd, or two with a link between them."""

    hosts: list[Node]
    processes: dict[str, int]
    before: tuple[float, float, int] = (0, 0, 0)

    def begin(self) -> None:
        """Starts counting cycles and frames."""
        self.before = self._now()

    def cycles(self) -> Sample:
        """Cycles of all dispatchers per delivered frame: counting only turns with work, and counting all turns."""
        seconds, busy, frames = (now - then for now, then in zip(self._now(), self.before, strict=True))
        if frames <= 0:
            raise LabError("vnetd forwarded no frame", self.hosts[0].file(".log"))
        clock = environment.clock_hz()
        return {"cycles_a_frame": busy * clock / frames, "thread_cycles_a_frame": seconds * clock / frames}

    def _now(self) -> tuple[float, float, int]:
        """CPU seconds of the dispatchers, their busy seconds, and frames delivered to guests."""
        seconds = 0.0
        for pid in self.processes.values():
            seconds += sum(usage.thread_s(pid, thread) for thread in usage.named_threads(pid, "dispatch"))
        frames, busy_ns = 0, 0
        for host in self.hosts:
            stats = daemon.ask(host, "stats")
            frames += sum(port["out_frames"] for port in stats["ports"] if port["kind"] == "interface")
            # Earlier revisions, under comparison, have no such counter.
            busy_ns += sum(dispatcher["busy_ns"] for dispatcher in stats.get("dispatchers", []))
        return seconds, busy_ns / 1e9, frames


@dataclass(frozen=True)
class VnetSwitch:
    """vnetd, on one host or two."""

    vnet: Vnet
    link: bool = False
    server: bool = False
    """True if vnetd listens on the sockets, false if it connects."""
    pinned: bool = True

    @property
    def name(self) -> str:
        """Name of the settings."""
        return self.vnet.name

    def missing(self) -> str | None:
        """The reason if the load generator is missing."""
        return None if self.server else absent("dpdk-testpmd", "dpdk-dev")

    @contextlib.contextmanager
    def up(self, topology: Topology, sockets: list[Path]) -> Iterator[RunningVnet]:
        """Runs vnetd on one host, or on both ends of a link."""
        hosts = topology.hosts if self.link else topology.hosts[:1]
        with self.vnet.own_binaries():
            try:
                for host in hosts:
                    host.file(".toml").write_text(self.configuration(host, sockets))
                    daemon.start(topology, host)
                yield RunningVnet(hosts, running(".pid", hosts))
            finally:
                for host in hosts:
                    process.stop(host.file(".pid"))
                    host.file(".toml").unlink(missing_ok=True)

    def configuration(self, host: Node, sockets: list[Path]) -> str:
        """A host's vnet.toml: one or both interfaces, the link if there is one, and rules between the two ports."""
        count = self.vnet.dispatchers
        # Earlier revisions, under comparison, have no ports key.
        bridge_ports = f"ports = {count}\n" if count > 1 else ""
        dispatch = dict(self.vnet.dispatch) | {"threads": count}
        if self.pinned:
            dispatch |= {"cpus": [SWITCH_CPU] * count}
        parts = [
            f'[host]\nname = "{host.name}"\n',
            f'[control]\nsocket = "{host.file(".sock")}"\n',
            f'[bridge]\nlisten = "[::]:{PORT}"\n{bridge_ports}',
            "\n".join(["[dispatch]", *(f"{key} = {json.dumps(value)}" for key, value in dispatch.items()), ""]),
            "[[network]]\nid = 1\nlearning = false\n",
        ]
        ports = []
        for number, (socket, mac) in enumerate(zip(sockets, MACS, strict=True)):
            if self.link and number != host.host - 1:
                ports.append("link there")
                remote = f"10.78.0.{number + 1}:{PORT}"
                parts.append(
                    f'[[link]]\nname = "there"\nremote = "{remote}"\n'
                    f'encapsulation = "{self.vnet.encapsulation}"\ntrusted = true\n{bridge_ports}'
                )
            else:
                ports.append(f"interface v{number}")
                parts.append(
                    f'[[interface]]\nname = "v{number}"\nkind = "vhost-user"\nmac = "{mac}"\n'
                    f'socket = "{socket}"\nserver = {json.dumps(self.server)}\n'
                )
        for one, other in (ports, ports[::-1]):
            parts.append(f'[[route]]\ndst = "any"\nfrom = "{one}"\nto = "{other}"\n')
        return "\n".join(parts)


@dataclass
class RunningOvs:
    """A running Open vSwitch with one polling thread."""

    folder: Path
    processes: dict[str, int]

    def begin(self) -> None:
        """Starts counting cycles and frames."""
        self._ask("dpif-netdev/pmd-stats-clear")

    def cycles(self) -> Sample:
        """Cycles per frame as counted by the polling thread: of iterations with work, and of all iterations."""
        text = self._ask("dpif-netdev/pmd-stats-show")
        busy, everything = PMD_CYCLES.search(text), PMD_ALL_CYCLES.search(text)
        if not busy or not everything:
            raise LabError(f"Open vSwitch forwarded no frame: {' '.join(text.split())[:200]}")
        return {"cycles_a_frame": float(busy[1]), "thread_cycles_a_frame": float(everything[1])}

    def _ask(self, *words: str) -> str:
        return run(["ovs-appctl", "-t", str(self.folder / "vswitchd.ctl"), *words])


@dataclass(frozen=True)
class Ovs:
    """Open vSwitch with its DPDK datapath on one host, with a separate directory."""

    name: str = "OVS-DPDK"

    def missing(self) -> str | None:
        """The reason if Debian's packages are not installed."""
        return (
            absent("ovsdb-server", "openvswitch-switch")
            or (None if Path(VSWITCHD).exists() else f"{VSWITCHD} is not installed: run 'make bench-packages'")
            or absent("dpdk-testpmd", "dpdk-dev")
        )

    @contextlib.contextmanager
    def up(self, topology: Topology, sockets: list[Path]) -> Iterator[RunningOvs]:
        """Runs database and switch in the first host's namespace, and stops them."""
        host = topology.hosts[0]
        folder = topology.state / "ovs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        names = {"ovsdb": host.file(".ovsdb.pid"), "OVS": host.file(".ovs.pid")}
        own = {f"OVS_{word}": str(folder) for word in ("RUNDIR", "DBDIR", "LOGDIR", "SYSCONFDIR")}
        inside = ["ip", "netns", "exec", host.namespace]
        database, log = f"unix:{folder}/db.sock", host.file(".ovs.log")
        control = ["ovs-vsctl", f"--db={database}", "--timeout=20"]
        try:
            run(["ovsdb-tool", "create", f"{folder}/conf.db", "/usr/share/openvswitch/vswitch.ovsschema"])
            words = ["ovsdb-server", f"{folder}/conf.db", f"--remote=p{database}", f"--unixctl={folder}/ovsdb.ctl"]
            process.start([*inside, *words], names["ovsdb"], log, own)
            wait_until("Open vSwitch's database", (folder / "db.sock").exists, START_S, log)
            run([*control, "--no-wait", "init"])
            run([*control, "--no-wait", "set", "Open_vSwitch", ".", *self._options()])
            words = [VSWITCHD, database, f"--unixctl={folder}/vswitchd.ctl"]
            process.start([*inside, *words], names["OVS"], log, own)
            wait_until("Open vSwitch", (folder / "vswitchd.ctl").exists, START_S, log)
            run([*control, "add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"])
            for number, socket in enumerate(sockets):
                port = ["add-port", "br0", f"v{number}", "--", "set", "Interface", f"v{number}"]
                client = ["type=dpdkvhostuserclient", f"options:vhost-server-path={socket}"]
                client.append(f"ofport_request={number + 1}")
                run([*control, *port, *client])
            bridge = f"{folder}/br0.mgmt"
            run(["ovs-ofctl", "del-flows", bridge])
            for rule in ("in_port=1,actions=output:2", "in_port=2,actions=output:1"):
                run(["ovs-ofctl", "add-flow", bridge, rule])
            pids = {name: process.find(file) for name, file in names.items()}
            yield RunningOvs(folder, {name: pid for name, pid in pids.items() if pid})
        finally:
            for file in reversed(names.values()):
                process.stop(file)

    def _options(self) -> list[str]:
        mask = f"{1 << SWITCH_CPU:#x}"
        values = {
            "dpdk-init": "true",
            "dpdk-socket-mem": "512",
            "dpdk-lcore-mask": mask,
            "pmd-cpu-mask": mask,
            "dpdk-hugepage-dir": PAGES_FOLDER,
        }
        return [f"other_config:{key}={value}" for key, value in values.items()]


def small_frames(switch: Switch, topology: Topology, seconds: float) -> Sample:
    """64-byte frames from testpmd, both directions at once: delivered frames per second, and their cost."""
    sockets = [topology.state / f"v{number}.sock" for number in range(2)]
    pid, log = topology.state / "testpmd.pid", topology.state / "testpmd.log"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_huge_pages())
        _remove(*sockets, log)
        running_switch = stack.enter_context(switch.up(topology, sockets))
        stack.callback(_end_testpmd, pid)
        process.start(_testpmd(sockets), pid, log)
        wait_until("frames to flow", lambda: _flows(pid, log), START_S, log)
        time.sleep(1)
        skip = len(_received(log)) + len(sockets)
        running_switch.begin()
        with usage.measured(running_switch.processes) as used:
            # testpmd's main thread shares the switch's CPU: reports come late, but each is correct for its own
            # interval.
            wanted = skip + len(sockets) * round(seconds)
            wait_until("testpmd's reports", lambda: len(_received(log)) >= wanted, START_S + 3 * seconds, log)
        sample = running_switch.cycles()
        rates = _received(log)[skip:]
        sample["frames_per_s"] = len(sockets) * sum(rates) / len(rates)
        busiest = max(used.processes_s.values()) / used.seconds
        return sample | {"frames_per_s_a_core": sample["frames_per_s"] / busiest} | used.sample()


def super_frames(switch: VnetSwitch, topology: Topology, seconds: float) -> Sample:
    """A stream of 64 KB TCP super-frames from guest to guest: goodput, in total and per core of the busier vnetd."""
    guest = example("guest")
    sockets = [topology.state / f"v{number}.sock" for number in range(2)]
    with switch.up(topology, sockets) as running_switch:
        sink = [guest, sockets[1], "sink", "--mac", MACS[1], "--seconds", seconds]
        send = [guest, sockets[0], "send", "--mac", MACS[0], "--to", MACS[1], "--seconds", seconds + 1]
        send += ["--bytes", SUPER_FRAME_BYTES]
        pid, log = topology.state / "guest.pid", topology.state / "guest.log"
        try:
            with spawn(sink) as taking:
                process.start([str(word) for word in send], pid, log)
                time.sleep(0.2)
                with usage.measured(running_switch.processes) as used:
                    report = receiver_report(taking, seconds + 40)
        finally:
            process.stop(pid)
    if report["wrong"] or report["tso_frames"] != report["frames"]:
        raise LabError(f"frames arrived changed: {report}")
    busiest = max(used.processes_s.values()) / used.seconds
    return {"tso_bps": report["bps"], "tso_bps_a_core": report["bps"] / busiest} | used.sample()


def bare_stream(topology: Topology, seconds: float) -> Sample:
    """Datagrams of the same sizes over bare UDP sockets between the hosts; CPU time is the sender's."""
    report, sender, _work = bare_transfer(topology, seconds)
    cores = sender.processes_s["h1"] / (report["bytes"] * 8 / report["bps"])
    return {"tso_bps": report["bps"], "tso_bps_a_core": report["bps"] / cores} | sender.sample()


def bare_transfer(topology: Topology, seconds: float) -> tuple[dict, usage.Usage, usage.Work]:
    """Datagrams over bare UDP sockets between the hosts: the receiver's report, CPU time of sender and machine.

    The CPU time is that from the sender's start until the receiver's end, between which all datagrams are received.
    """
    source, destination = topology.hosts
    where = [f"10.78.0.{destination.host}:{PORT}", "--mtu", topology.settings.underlay_mtu, "--seconds"]
    inside = {host: ["ip", "netns", "exec", host.namespace, example("sockets")] for host in topology.hosts}
    pid, log = topology.state / "sockets.pid", topology.state / "sockets.log"
    try:
        with spawn([*inside[destination], "take", *where, seconds]) as taking:
            bound = ["ip", "netns", "exec", destination.namespace, "ss", "-Hlun", f"sport = :{PORT}"]
            wait_until("the bare sockets' receiver", lambda: run(bound).strip(), 20)
            with usage.split() as work:
                process.start([str(word) for word in (*inside[source], "send", *where, seconds + 1)], pid, log)
                # The receiver exits after its report, so its CPU time cannot be read.
                sender = process.find(pid)
                if sender is None:
                    raise LabError("the bare sockets' sender exited at once", log)
                with usage.measured({"h1": sender}) as used:
                    report = receiver_report(taking, seconds + 40)
    finally:
        process.stop(pid)
    return report, used, work


def example(name: str) -> Path:
    """A program of a crate's examples; raises LabError if it is not built."""
    path = daemon.binaries() / "examples" / name
    if not path.exists():
        raise LabError(f"{path} is not there: run 'cargo build --release -p vnet -p vnetd -p vnet-rdma --examples'")
    return path


def pps(text: str) -> list[int]:
    """Frames per second that each port received, in the order of testpmd's periodic reports."""
    return [int(rate) for rate in RX_PPS.findall(text)]


def _testpmd(sockets: list[Path]) -> list[str]:
    """Command line of testpmd: one core that generates flows from either port to the other."""
    ports = [
        f"--vdev=net_virtio_user{number},path={socket},server=1,queues=1,mac={mac}"
        for number, (socket, mac) in enumerate(zip(sockets, MACS, strict=True))
    ]
    cores = ("-l", f"{SWITCH_CPU},{LOAD_CPU}", "--main-lcore", str(SWITCH_CPU))
    memory = ("--single-file-segments", "--iova-mode=va", "--socket-mem", "256", f"--huge-dir={PAGES_FOLDER}")
    flows = ("--forward-mode=flowgen", "--flowgen-flows=16", f"--eth-peer=0,{MACS[1]}", f"--eth-peer=1,{MACS[0]}")
    rest = ("--nb-cores=1", "--stats-period", "1", "--burst=64", "--no-lsc-interrupt", "--total-num-mbufs=16384")
    eal = ["dpdk-testpmd", *cores, "--no-pci", "--no-telemetry", "--file-prefix=vnet-bench", *memory, *ports]
    return ["stdbuf", "-oL", *eal, "--", *flows, *rest, "--auto-start"]


def _end_testpmd(pid: Path) -> None:
    process.stop(pid)
    shutil.rmtree("/run/dpdk/vnet-bench", ignore_errors=True)


def _flows(pid: Path, log: Path) -> bool:
    if process.find(pid) is None:
        raise LabError("testpmd exited at once", log)
    return any(rate > 0 for rate in _received(log))


def _received(log: Path) -> list[int]:
    return pps(log.read_text(errors="replace"))


@contextlib.contextmanager
def _huge_pages() -> Iterator[None]:
    """Reserves huge pages and mounts them while the context lasts, then restores the previous number.

    A file stores the previous number, so that the next run can restore it after a run that was killed.
    """
    if not PAGES_BEFORE.exists():
        PAGES_BEFORE.write_text(PAGES_FILE.read_text())
    before = int(PAGES_BEFORE.read_text())
    try:
        _unmount()
        PAGES_FILE.write_text(str(before + PAGES))
        got = int(PAGES_FILE.read_text()) - before
        if got < PAGES:
            raise LabError(f"only {got} of {PAGES} huge pages of 2 MiB are available: free some memory")
        PAGES_FOLDER.mkdir(exist_ok=True)
        run(["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "nodev", str(PAGES_FOLDER)])
        yield
    finally:
        _unmount()
        PAGES_FILE.write_text(str(before))
        PAGES_BEFORE.unlink()


def _unmount() -> None:
    if PAGES_FOLDER.is_mount():
        run(["umount", str(PAGES_FOLDER)])
    if PAGES_FOLDER.exists():
        PAGES_FOLDER.rmdir()


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def spawn(words: list[object]) -> Iterator[subprocess.Popen[str]]:
    """Runs a program on its namespace's machine and captures its output; kills it at the end of the context."""
    command = remote.wrap([str(word) for word in words])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def receiver_report(child: subprocess.Popen[str], timeout_s: float) -> dict:
    """Waits until a receiver exits and reads its report."""
    try:
        text, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise LabError("the receiver of the stream did not exit") from error
    if child.returncode:
        raise LabError(f"the receiver of the stream failed: {errors.strip()[-200:]}")
    return json.loads(text)
