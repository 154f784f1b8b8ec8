"""Take-overs of the vnetds of a lab's two hosts, and what their link counts meanwhile."""

from pathlib import Path

from checks import port, settled

from vnetlab import daemon, process
from vnetlab.run import wait_until
from vnetlab.topology import Node, Topology


def take_over(topology: Topology, host: Node) -> None:
    """A new vnetd takes over from a host's."""
    old, log = process.find(host.file(".pid")), host.file(".log")
    assert old
    begin = len(log.read_text())
    command = ["ip", "netns", "exec", host.namespace, str(daemon.binaries() / "vnetd"), "--take-over"]
    command += ["--config", str(host.file(".toml"))]
    state = {"STATE_DIRECTORY": str(topology.state / "state")}
    process.start(command, host.file(".pid"), log, state)

    def done() -> bool:
        assert process.find(host.file(".pid")), log.read_text()[begin:]
        return "has taken over from process" in log.read_text()[begin:]

    wait_until("the new vnetd to take over", done, 20, log)

    def ended() -> bool:
        stat = Path(f"/proc/{old}/stat")
        return not stat.exists() or stat.read_text().rpartition(") ")[2].startswith("Z")

    wait_until("the old vnetd to end", ended, 10, log)
    wait_until("the new vnetd to be ready", lambda: " ready: " in log.read_text()[begin:], 20, log)


def peer(topology: Topology, host: Node) -> Node:
    return next(other for other in topology.hosts if other != host)


def counters(topology: Topology, host: Node) -> dict:
    """The counters of a host's link, once nothing moves."""
    return port(settled(host), "link", peer(topology, host).name)


def both(topology: Topology) -> dict[str, dict]:
    """The counters of the hosts' links, while no frame passes from one to the other."""
    found: dict[str, dict] = {}

    def still() -> bool:
        nonlocal found
        before, found = found, {host.name: counters(topology, host) for host in topology.hosts}
        keys = ("in_frames", "out_frames")
        return bool(before) and all(before[name][key] == found[name][key] for name in found for key in keys)

    wait_until("no frame to pass", still, 20)
    return found


def assert_none_lost_between(topology: Topology, before: dict[str, dict]) -> None:
    """Every frame that one host's link has sent since `before` has arrived at the other's, and none was refused."""
    after = both(topology)

    def grown(host: Node, key: str) -> int:
        return after[host.name][key] - before[host.name][key]

    for host in topology.hosts:
        other = peer(topology, host)
        assert grown(host, "out_frames") == grown(other, "in_frames") > 100, f"from {host.name} to {other.name}"
        assert after[host.name]["drops"] == before[host.name]["drops"]
        assert after[host.name]["discards"] == before[host.name]["discards"]
