"""The store of a distributed overlay: a real etcd on host 1, reached over the underlay."""

import json
import shutil
from pathlib import Path

from vnetlab import process
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Topology

PORT = 2379
START_S = 20
PEERS = "http://127.0.0.1:2380"


def endpoint(topology: Topology, ipv6: bool = False) -> str:
    """URL of the store."""
    home = _home(topology)
    return f"http://[{home.address6}]:{PORT}" if ipv6 else f"http://{home.address}:{PORT}"


def start(topology: Topology, tls: bool = False, room_bytes: int = 0) -> None:
    """Starts the store with its existing data, if there is any, and waits until it answers.

    With `tls` it accepts only clients with a certificate from `certify`. `room_bytes` is its quota; 0 is etcd's
    default.
    """
    clients = ",".join(endpoint(topology, ipv6) for ipv6 in ([False, True] if topology.settings.ipv6 else [False]))
    arguments = {
        "name": "store",
        "data-dir": str(topology.state / "etcd"),
        "listen-client-urls": clients,
        "advertise-client-urls": clients,
        "listen-peer-urls": PEERS,
        "initial-advertise-peer-urls": PEERS,
        "initial-cluster": f"store={PEERS}",
        "quota-backend-bytes": str(room_bytes),
    }
    if tls:
        folder = topology.state / "tls"
        for name in ("listen-client-urls", "advertise-client-urls"):
            arguments[name] = clients.replace("http:", "https:")
        files = {"cert-file": "cert.pem", "key-file": "key.pem", "trusted-ca-file": "ca.pem"}
        arguments |= {name: str(folder / file) for name, file in files.items()} | {"client-cert-auth": "true"}
    words = ["etcd", *(f"--{name}={value}" for name, value in arguments.items())]
    log = topology.state / "etcd.log"
    process.start(inside(topology, *words), topology.state / "etcd.pid", log)

    def answers() -> bool:
        if find(topology) is None:
            raise LabError("etcd exited at once", log)
        try:
            control(topology, "get", "nothing", tls=tls)
        except LabError:
            return False
        return True

    wait_until("etcd to answer", answers, START_S, log)


def find(topology: Topology) -> int | None:
    """Process id of the store; None if it is not running."""
    return process.find(topology.state / "etcd.pid")


def stop(topology: Topology, forget: bool = False) -> None:
    """Stops the store; with `forget`, also deletes its data."""
    process.stop(topology.state / "etcd.pid")
    if forget:
        shutil.rmtree(topology.state / "etcd", ignore_errors=True)


def inside(topology: Topology, *words: str) -> list[str]:
    """Wraps a command to run on the store's host."""
    return ["ip", "netns", "exec", _home(topology).namespace, *words]


def certify(topology: Topology) -> Path:
    """Creates an authority, and a certificate for the store and its clients; returns their folder."""
    folder = topology.state / "tls"
    folder.mkdir(exist_ok=True)
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout"]
    ca = ["-x509", "-days", "2", "-subj", "/CN=authority", "-addext", "basicConstraints=critical,CA:TRUE"]
    run([*new, "ca.key", "-out", "ca.pem", *ca], cwd=folder)
    names = f"subjectAltName=IP:{_home(topology).address}"
    run([*new, "key.pem", "-out", "cert.csr", "-subj", "/CN=overlay", "-addext", names], cwd=folder)
    sign = ["openssl", "x509", "-req", "-in", "cert.csr", "-days", "2", "-copy_extensions", "copy"]
    run([*sign, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "cert.pem"], cwd=folder)
    return folder


def control(topology: Topology, *words: str, tls: bool = False) -> str:
    """Runs etcdctl; returns its output. Raises LabError if it fails."""
    client = ["etcdctl", f"--endpoints={endpoint(topology)}", "--command-timeout=2s", "--dial-timeout=1s"]
    if tls:
        folder = topology.state / "tls"
        client[1] = client[1].replace("http:", "https:")
        client += [f"--cacert={folder}/ca.pem", f"--cert={folder}/cert.pem", f"--key={folder}/key.pem"]
    return run(inside(topology, "env", "ETCDCTL_API=3", *client, *words))


def records(topology: Topology) -> dict[str, dict]:
    """All records of the overlay by key."""
    lines = control(topology, "get", "--prefix", "/vnet/v1/").splitlines()
    return {key: json.loads(value) for key, value in zip(lines[::2], lines[1::2], strict=True)}


def _home(topology: Topology) -> Node:
    return topology.hosts[0]
