"""Take-overs of the vnetds of a lab's hosts."""

from pathlib import Path

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
