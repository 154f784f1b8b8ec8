"""A vnetd on each host: configuration file, certificate, start, and queries."""

import contextlib
import json
import os
import shlex
import socket
from pathlib import Path

from vnetlab import process, remote, store
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import PORT, Kind, Node, Topology

REPOSITORY = Path(__file__).parent.parent.parent
START_S = 10
STREAM_PORT = 9002
"""TCP port; examples use 9001 for the console, and sealed links use the port of [bridge] listen for TCP, too."""
DIRECT_PORT = 9100
"""Base of virtual machines' own ports (`direct_port`)."""
PORTS = {"vxlan": 4789, "stream": STREAM_PORT}
"""Ports of encapsulations that do not use [bridge] listen."""
LISTEN = {
    "vxlan": f'vxlan_listen = "[::]:{PORTS["vxlan"]}"\n',
    "stream": f'stream_listen = "[::]:{PORTS["stream"]}"\n',
}
"""Additional lines of [bridge] by encapsulation."""


PROVIDER = "libvnet_fi.so"
"""The libfabric provider, beside `vnetd` and `vnet`."""


def binaries() -> Path:
    """The directory of `vnetd` and `vnet`: $VNET_BINARIES, or that of a release build of this repository by cargo.

    Raises LabError if they are missing.
    """
    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target"))
    directory = Path(os.environ.get("VNET_BINARIES", target / "release"))
    for name in ("vnetd", "vnet"):
        if not (directory / name).exists():
            raise LabError(f"{directory / name} is missing: run 'make build'")
    return directory


def configuration(topology: Topology, host: Node, interface: str = "") -> str:
    """A host's vnet.toml: its machines, each with the lines `interface`, and links to all hosts, or the store."""
    settings = topology.settings
    # Earlier revisions, under comparison, have no ports key.
    ports = f"ports = {settings.dispatchers}\n" if settings.dispatchers > 1 else ""
    security = f"{'sealed' if settings.sealed else 'trusted'} = true\n"
    names = identity(topology, host) if settings.sealed else ""
    parts = [
        f'[host]\nname = "{host.name}"\n',
        f'[control]\nsocket = "{host.file(".sock")}"\n',
        f"[dispatch]\nthreads = {settings.dispatchers}\n" if settings.dispatchers > 1 else "",
        f'[bridge]\nlisten = "[::]:{PORT}"\n{ports}{LISTEN.get(settings.encapsulation, "")}',
        "[[network]]\nid = 1\nlearning = true\n" + ("daemon_engine = true\n" if settings.rdma else ""),
    ]
    for machine in topology.machines(host=host.host):
        lines = [f'name = "{machine.name}"', f'mac = "{machine.mac}"', f"mtu = {topology.mtu(machine)}"]
        if topology.settings.store:
            lines.append(f'addresses = ["{machine.address}"]')
        kind = "vhost-user" if machine.kind is Kind.VM else topology.container_kind(machine)
        lines.append(f'kind = "{kind}"')
        if machine.kind is Kind.VM:
            lines.append(f'socket = "{machine.file(".vhost")}"')
        else:
            lines += ['device = "eth0"', f'netns = "{machine.namespace}"']
        # A veth has one.
        queues = 1 if kind == "veth" else settings.queues
        lines.append(f"queues = {queues}")
        parts.append("\n".join(["[[interface]]", *lines, interface]))
    if settings.store:
        endpoint = store.endpoint(topology, settings.ipv6)
        parts.append(f'[overlay]\netcd = ["{endpoint}"]\n{security}')
        return "\n".join(parts) + names
    for peer in topology.hosts:
        if peer != host:
            port = PORTS.get(settings.encapsulation, PORT)
            remote = f"[{peer.address6}]:{port}" if settings.ipv6 else f"{peer.address}:{port}"
            parts.append(
                f'[[link]]\nname = "{peer.name}"\nremote = "{remote}"\n'
                f'encapsulation = "{settings.encapsulation}"\n'
                f"{security}" + (ports if settings.encapsulation == "native" else "")
            )
    return "\n".join(parts) + names


def with_direct_ports(text: str, topology: Topology, host: Node) -> str:
    """Adds `direct_port` to a host's virtual machines, and the peer's ports to the link.

    For labs of two hosts: such a port receives from a single other host.
    """
    for machine in topology.machines(Kind.VM):
        port = DIRECT_PORT + machine.number
        if machine.host == host.host:
            peer = next(peer for peer in topology.hosts if peer != host)
            own = f'direct_port = {port}\ndirect_link = "{peer.name}"\n'
            text = text.replace(f'name = "{machine.name}"\n', f'name = "{machine.name}"\n{own}')
    for peer in topology.hosts:
        machines = topology.machines(Kind.VM, peer.host)
        guests = ", ".join(f'"{machine.mac}@{DIRECT_PORT + machine.number}"' for machine in machines)
        head = f'[[link]]\nname = "{peer.name}"\n'
        text = text.replace(head, f"{head}networks = [1]\ndirect = [{guests}]\n")
    return text


def on_the_lan(text: str, mtu: int) -> str:
    """Replaces a host's links by its underlay device itself, of this MTU: its machines' frames leave unencapsulated."""
    lan = f'[[interface]]\nname = "lan"\nkind = "local"\ndevice = "eth0"\nmtu = {mtu}\n'
    return text.partition("[[link]]")[0] + lan


def keys(topology: Topology) -> Path:
    """The folder of the lab's certificate authority."""
    return topology.state / "keys"


def issue(topology: Topology, host: Node, *options: str) -> None:
    """Issues a certificate to a host, or renews it; first creates the authority if necessary."""
    command = [str(binaries() / "vnet"), "keys"]
    folder = ["--dir", str(keys(topology))]
    if not keys(topology).exists():
        run([*command, "init", *folder])
    run([*command, "issue", host.name, *folder, *options])


def identity(topology: Topology, host: Node) -> str:
    """The [identity] section of a host's vnet.toml; issues a certificate if there is none."""
    folder = keys(topology)
    if not (folder / f"{host.name}.pem").exists():
        issue(topology, host)
    files = {"ca": "ca.pem", "certificate": f"{host.name}.pem", "key": f"{host.name}.key", "crl": "crl.pem"}
    return "\n".join(["", "[identity]", *(f'{key} = "{folder / file}"' for key, file in files.items()), ""])


def start(topology: Topology, host: Node) -> None:
    """Starts a host's vnetd and waits until it answers; writes its configuration file first if missing."""
    config = host.file(".toml")
    if not config.exists():
        config.write_text(configuration(topology, host))
    place = remote.machine_of(host.namespace)
    if place:
        run(remote.ssh(place, f"printf %s {shlex.quote(config.read_text())} >{config}"))
    command = ["ip", "netns", "exec", host.namespace, str(binaries() / "vnetd"), "--config", str(config)]
    # Like systemd: otherwise hosts of all labs would share the machine's default folder.
    state = {"STATE_DIRECTORY": str(topology.state / "state")}
    process.start(command, host.file(".pid"), host.file(".log"), state)

    def answers() -> bool:
        if process.find(host.file(".pid")) is None:
            raise LabError(f"vnetd on {host.name} exited at once", host.file(".log"))
        if place:
            return _answers(host)
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(host.file(".sock"))) == 0

    wait_until(f"vnetd on {host.name} to answer", answers, START_S, host.file(".log"))


def remove_taps(host: Node) -> None:
    """Removes TAP devices that a host's vnetd, which has ended, keeps for the next one. An older vnetd keeps none."""
    words = [str(binaries() / "vnetd"), "--remove-taps", "--config", str(host.file(".toml"))]
    with contextlib.suppress(LabError):
        run(["ip", "netns", "exec", host.namespace, *words])


def _answers(host: Node) -> bool:
    """Whether a host's vnetd on another machine answers."""
    with contextlib.suppress(LabError):
        return bool(vnet(host, "stats"))
    return False


def ask(host: Node, *arguments: str) -> dict:
    """Runs `vnet --json` against a host's vnetd; returns the parsed answer."""
    return json.loads(vnet(host, "--json", *arguments))


def vnet(host: Node, *arguments: str) -> str:
    """Runs `vnet` against a host's vnetd; returns its output. Raises LabError if it fails."""
    words = [str(binaries() / "vnet"), "--socket", str(host.file(".sock")), *arguments]
    if remote.machine_of(host.namespace):
        words = ["ip", "netns", "exec", host.namespace, *words]
    return run(words)
