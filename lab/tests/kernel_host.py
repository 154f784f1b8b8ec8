"""A vnetd in a network namespace of its own, for tests of the kernel's own path."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vnetlab import daemon
from vnetlab.run import run, wait_until

LEASE_MS_MAX = 2_250
"""A verdict's two seconds, and a round of the thread that advances their clock."""


@dataclass
class Host:
    """A vnetd with containers of kind veth."""

    namespace: str
    directory: Path
    daemon: subprocess.Popen | None = field(default=None)

    def mount_bpffs(self) -> None:
        """Mounts a BPF file system for vnetd: its own would go with the mount namespace that 'ip netns exec' makes."""
        (self.directory / "bpf").mkdir()
        run(["mount", "-t", "bpf", "bpf", str(self.directory / "bpf")])

    def unmount_bpffs(self) -> None:
        """Unmounts it."""
        subprocess.run(["umount", str(self.directory / "bpf")], check=False, capture_output=True)

    def start(self, *through: str) -> None:
        """Starts vnetd, by a command if one is given, and waits until it is ready."""
        log = self.directory / "log"
        with log.open("wb") as output:
            words = ["ip", "netns", "exec", self.namespace, *through, str(daemon.binaries() / "vnetd")]
            words += ["--config", str(self.directory / "vnet.toml")]
            self.daemon = subprocess.Popen(words, stdout=output, stderr=output)
        wait_until("vnetd to run", lambda: " ready: " in log.read_text() or self.daemon.poll(), 20, log)
        assert self.daemon.poll() is None, log.read_text()

    def end(self, by: signal.Signals) -> int:
        """Stops vnetd by a signal; returns its exit status."""
        self.daemon.send_signal(by)
        return self.daemon.wait(10)

    def vnet(self, *arguments: str) -> str:
        """The output of a `vnet` command."""
        control = f"{self.directory}/control.sock"
        return run([str(daemon.binaries() / "vnet"), "--socket", control, *arguments])

    def ask(self, *arguments: str) -> dict | list:
        """The JSON answer to a `vnet` command."""
        return json.loads(self.vnet("--json", *arguments))

    def request(self, method: str, path: str, body: dict | None = None) -> dict | None:
        """Asks the API itself: a command takes as long as a hundred requests."""
        text = self.fetch(method, path, body)
        return json.loads(text) if text else None

    def fetch(self, method: str, path: str, body: dict | None = None) -> bytes:
        """What the API answers."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{self.directory}/control.sock")
            api = http.client.HTTPConnection("vnetd")
            api.sock = connection
            api.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer = api.getresponse()
            text = answer.read()
            assert answer.status < 300, text
            return text

    def metric(self, sample: str) -> float:
        """The value of a sample of the metrics, by its name and labels."""
        (value,) = re.findall(rf"^{re.escape(sample)} (\S+)$", self.fetch("GET", "/metrics").decode(), re.MULTILINE)
        return float(value)

    @contextlib.contextmanager
    def events(self) -> Iterator[Callable[[], list[dict]]]:
        """Listens to events while the context lasts; yields a function that returns those so far."""
        file = self.directory / "events"
        words = ["curl", "-sSN", "-D", "-", "--unix-socket", f"{self.directory}/control.sock", "http://vnetd/v1/events"]
        with file.open("wb") as output, subprocess.Popen(words, stdout=output) as process:
            try:
                wait_until("the API to answer", lambda: "\r\n\r\n" in file.read_bytes().decode(), 60)
                yield lambda: [json.loads(data) for data in re.findall(r"^data:(.*)\n", file.read_text(), re.MULTILINE)]
            finally:
                process.kill()

    def frames(self) -> tuple[int, int]:
        """Frames received from interface "one", and frames that dispatchers have forwarded."""
        stats = self.ask("stats")
        (one,) = (port for port in stats["ports"] if port["name"] == "one")
        return one["in_frames"], sum(dispatcher["frames"] for dispatcher in stats["dispatchers"])

    def balance(self) -> None:
        """Waits until in + copies = out + drops, exactly: between two batches."""

        def balanced() -> bool:
            stats = self.ask("stats")
            total = {key: sum(port[key] for port in stats["ports"]) for key in ("in_frames", "copies", "out_frames")}
            drops = sum(sum(port["drops"].values()) for port in stats["ports"])
            return total["in_frames"] + total["copies"] == total["out_frames"] + drops

        wait_until("in + copies to be out + drops", balanced, 10)

    def grows(self, by: int, work: Callable[[], object]) -> tuple[int, int]:
        """Increase of the frames of interface "one", at least `by`, and of the dispatchers during `work`."""
        before = self.frames()
        work()
        after = self.frames()
        moved = after[0] - before[0], after[1] - before[1]
        assert moved[0] >= by
        self.balance()
        return moved


def devices(namespace: str) -> list[str]:
    """Names of the devices in a network namespace."""
    return [link["ifname"] for link in json.loads(run(["ip", "-n", namespace, "-json", "link"]))]


def assert_none_lost(text: str, on_the_way: int = 1) -> None:
    """Asserts from what `ping` printed that every ping was answered once; the last ones may be on their way.

    If it printed each answer, only pings after the last one that was answered may be missing.
    """
    sent, received = (int(re.search(rf"(\d+) {word}", text)[1]) for word in ("packets transmitted", "received"))
    answered = {int(number) for number in re.findall(r"bytes from .*icmp_seq=(\d+)", text)}
    missing = sorted(set(range(1, max(answered, default=0))) - answered)
    summary = text[text.rfind("---", 0, text.rfind("---")) :]
    assert not missing, f"no answer: {missing}\n{summary}"
    assert sent - received <= on_the_way, summary
    assert "duplicates" not in text, summary
