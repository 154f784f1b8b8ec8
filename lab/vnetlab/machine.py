"""Runs commands on any node of a lab: hosts, containers, virtual machines."""

import base64
import gzip
import hashlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vnetlab import channel, daemon, process, remote
from vnetlab.run import LabError
from vnetlab.topology import Kind, Node

PIECE_BYTES, PIECE_S = 32 << 10, 60
"""Size of the pieces of a file that is sent to a virtual machine, and the time that each may take on a slow one."""


def attempt(node: Node, *command: str, timeout_s: float = 30) -> tuple[int, str]:
    """Runs a command on a node; returns its exit status and its output, including standard error.

    One argument is a complete shell command; several are its words. Raises LabError if the command takes longer than
    `timeout_s`.
    """
    return (_in_guest if node.kind is Kind.VM else _in_namespace)(node, command, timeout_s)


def execute(node: Node, *command: str, timeout_s: float = 30) -> str:
    """Like `attempt`, but returns only the output, and raises LabError if the command fails."""
    status, text = attempt(node, *command, timeout_s=timeout_s)
    if status:
        words = " / ".join(text.strip().splitlines()[-3:])
        raise LabError(f"'{' '.join(command)}' on {node.name} failed with status {status}: {words}")
    return text


def write(node: Node, path: Path, text: str) -> None:
    """Writes an executable file on a node."""
    execute(node, f"printf %s {shlex.quote(text)} >{path} && chmod 755 {path}")


def send(node: Node, path: Path) -> None:
    """Copies an executable file of this machine to the same path in a virtual machine, unless it is there already."""
    content, there = path.read_bytes(), shlex.quote(str(path))
    if attempt(node, "sha256sum", str(path))[1].split()[:1] == [hashlib.sha256(content).hexdigest()]:
        return
    execute(node, f"mkdir -p {shlex.quote(str(path.parent))} && : >{there}.gz")
    packed = gzip.compress(content)
    for begin in range(0, len(packed), PIECE_BYTES):
        piece = base64.b64encode(packed[begin : begin + PIECE_BYTES]).decode()
        execute(node, f"echo {piece} | base64 -d >>{there}.gz", timeout_s=PIECE_S)
    execute(node, f"gunzip -c {there}.gz >{there} && chmod 755 {there} && rm {there}.gz", timeout_s=PIECE_S)


def share(host: Node, path: Path) -> None:
    """Copies a file of this machine, with its mode, to the same path on a host's machine if that is another one."""
    place = remote.machine_of(host.namespace)
    if not place:
        return
    there, mode = shlex.quote(str(path)), f"{path.stat().st_mode & 0o777:o}"
    text = f"mkdir -p {shlex.quote(str(path.parent))} && umask 077 && cat >{there} && chmod {mode} {there}"
    done = subprocess.run(remote.ssh(place, text), check=False, input=path.read_bytes(), capture_output=True)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise LabError(f"{path} was not copied to {place.destination}: {' '.join(last)}")


def read(node: Node, path: Path) -> str:
    """The text of a node's file; empty if there is none."""
    return execute(node, f"cat {path} 2>/dev/null || true")


def namespace_command(node: Node, command: Sequence[str]) -> list[str]:
    """Wraps a command to run in the namespace of a host or container."""
    return ["ip", "netns", "exec", node.namespace, *command]


def environment(node: Node) -> dict[str, str]:
    """The environment of commands on a host or container, in which `vnet` uses that host's vnetd."""
    home = Node(node.lab, Kind.HOST, node.host)
    return {
        **os.environ,
        **process.mark(node.state),
        "PATH": f"{daemon.binaries()}:{os.environ['PATH']}",
        "VNET_SOCKET": str(home.file(".sock")),
    }


def _in_guest(node: Node, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    parts: list[bytes] = []
    status = channel.execute(node, command, timeout_s, parts.append)
    return status, b"".join(parts).decode(errors="replace")


def _in_namespace(node: Node, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    words = ["sh", "-c", *command] if len(command) == 1 else command
    try:
        done = subprocess.run(
            remote.wrap(namespace_command(node, words)),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            env=environment(node),
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{' '.join(command)}' on {node.name} did not end in {timeout_s:g} s") from error
    return done.returncode, done.stdout.decode(errors="replace")
