"""Runs `vnet capture` in tests and reads its files."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from vnetlab import daemon
from vnetlab.run import run, wait_until
from vnetlab.topology import Node


def command(host: Node, *arguments: str) -> list[str]:
    return [str(daemon.binaries() / "vnet"), "--socket", str(host.file(".sock")), "capture", *arguments]


@contextlib.contextmanager
def capturing(host: Node, *arguments: str) -> Iterator[subprocess.Popen]:
    """Captures while the context lasts; ends the capture by SIGINT."""
    log = host.file(".log")
    before = log.read_text().count("capture at")
    capture = subprocess.Popen(command(host, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until("the capture to start", lambda: log.read_text().count("capture at") > before, 10, poll_s=0.02)
        yield capture
        # vnetd drains the dispatchers' buffers every few milliseconds.
        time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            capture.send_signal(signal.SIGINT)
        try:
            capture.wait(10)
        finally:
            capture.kill()


def tcpdump(file: Path, *words: str) -> list[str]:
    """The lines that tcpdump prints for a file, one per frame."""
    lines = run(["tcpdump", "-nr", str(file), *words]).splitlines()
    return [line for line in lines if not line.startswith("\t")]
