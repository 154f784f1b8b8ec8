"""Timestamped pings and checked TCP streams between a lab's machines, while a test interrupts them.

Both run on containers and in guests alike, by busybox's shell. A guest has a clock of its own, so its times are
converted to this machine's. What a test measures is *silence*: the time between two answers that follow each other.
"""

import base64
import contextlib
import gzip
import itertools
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from vnetlab import machine
from vnetlab.run import wait_until
from vnetlab.topology import Kind, Node

PORT = 7008
PATIENCE_S = 120
END_S = 0.5
"""Answers to the last pings may still be on their way when `ping` ends."""
ANSWER = re.compile(r"^\[(\d+\.\d+)\] \d+ bytes from .*icmp_seq=(\d+)", re.MULTILINE)
"""Not an error such as "Destination Host Unreachable", which has a number, too."""
TRANSMITTED = re.compile(r"(\d+) packets transmitted")

# busybox's setsid would prefer busybox's own ping.
PING = """
mkdir -p {folder}; rm -f {log}
setsid $(which ping) -n -D -i {interval_s} {address} >{log} 2>&1 </dev/null &
echo $!
"""
END_PING = "kill -INT {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.1; done; gzip -c {log} | base64 -w 0"
RECEIVE = """
mkdir -p {folder}; rm -f {file}.in {file}.received; mkfifo {file}.in
# Its standard input never ends: nc would close the connection.
(busybox nc -l -p {port} 0<>{file}.in | sha256sum >{file}.received) >/dev/null 2>&1 &
"""
SEND = """
mkdir -p {folder}; rm -f {file}.copy {file}.over {file}.sent; mkfifo {file}.copy
sha256sum <{file}.copy >{file}.sent 2>/dev/null &
(
    while [ ! -e {file}.over ]; do
        dd if=/dev/urandom bs={chunk} count=1 2>/dev/null
        busybox usleep 50000
    done | tee {file}.copy | busybox nc {address} {port}
) >/dev/null 2>&1 </dev/null &
"""


@dataclass(frozen=True)
class Clock:
    """A machine's clock, compared with this one's at two times."""

    first: tuple[float, float]
    """Time on the machine's clock, and by how much this one's was ahead."""
    last: tuple[float, float]

    def here(self, at: float) -> float:
        """A time on the machine's clock, on this one's."""
        (begin, ahead), (end, ahead_later) = self.first, self.last
        return at + ahead + (ahead_later - ahead) * (at - begin) / max(end - begin, 1)


def ahead(node: Node) -> tuple[float, float]:
    """The time on a machine's clock and by how much this one's is ahead, by the quickest of five questions."""
    if node.kind is not Kind.VM:
        return time.time(), 0.0
    asked = []
    for _ in range(5):
        before = time.time()
        there = float(ANSWER.search(machine.execute(node, "ping -n -D -c 1 127.0.0.1"))[1])
        after = time.time()
        asked.append((after - before, there, (before + after) / 2 - there))
    return min(asked)[1:]


@dataclass
class Pings:
    """A `ping` that runs from one machine to another, and afterwards its answers."""

    source: Node
    destination: Node
    interval_s: float
    pid: str = ""
    begun: tuple[float, float] = (0, 0)
    answers: list[tuple[float, int]] = field(default_factory=list)
    """Time on this machine's clock and number of each answer, in the order in which they arrived."""
    sent: int = 0
    text: str = ""

    @property
    def name(self) -> str:
        """Its path."""
        return f"{self.source.name} to {self.destination.name}"

    @property
    def _log(self) -> str:
        return str(self.source.file(f".ping-{self.destination.name}"))

    def start(self) -> None:
        """Starts it, and waits until it is answered."""
        self.begun = ahead(self.source)
        words = PING.format(
            folder=self.source.state,
            log=self._log,
            interval_s=self.interval_s,
            address=self.destination.address,
        )
        self.pid = machine.execute(self.source, words).strip()
        self.wait_for_answer()

    def last(self) -> str:
        """Its last line."""
        return machine.execute(self.source, f"tail -n 1 {self._log}")

    def wait_for_answer(self) -> None:
        """Waits until it is answered again."""
        before = self.last()

        def answered() -> bool:
            line = self.last()
            return line != before and "bytes from" in line

        wait_until(f"an answer on the way from {self.name}", answered, PATIENCE_S, poll_s=0.1)

    def end(self) -> None:
        """Ends it and reads its answers."""
        clock = Clock(self.begun, ahead(self.source))
        packed = machine.execute(self.source, END_PING.format(pid=self.pid, log=self._log), timeout_s=PATIENCE_S)
        self.text = gzip.decompress(base64.b64decode(packed)).decode(errors="replace")
        self.answers = [(clock.here(float(at)), int(number)) for at, number in ANSWER.findall(self.text)]
        self.sent = int(TRANSMITTED.search(self.text)[1])

    def silence_s(self, begin: float, end: float) -> float:
        """The longest time between two answers that has a part between two times."""
        return longest_silence([at for at, _ in self.answers], begin, end)

    def lost(self) -> int:
        """Number of pings without an answer, except for the last ones, which may be on their way."""
        answered = {number for _, number in self.answers}
        last = max(answered)
        return last - len(answered) + max(0, self.sent - last - round(END_S / self.interval_s))

    def assert_intact(self) -> None:
        """No answer came twice or with other bytes."""
        assert "DUP!" not in self.text, self.name
        assert "wrong data byte" not in self.text, self.name
        assert len({number for _, number in self.answers}) == len(self.answers) > 0, self.name
        assert self.sent < 1 << 16, f"{self.name}: numbers of pings begin again"


def longest_silence(times: Iterable[float], begin: float = -math.inf, end: float = math.inf) -> float:
    """The longest of the intervals between times that overlaps the time from `begin` to `end`; endless without one."""
    pairs = itertools.pairwise(times)
    return max((after - before for before, after in pairs if before < end and after > begin), default=math.inf)


def silences(paths: list[list[float]], spans: list[tuple[float, float]]) -> str:
    """The longest silence of any path in each span of time: median, the longest, and how many are above 50 ms."""
    found = [max(longest_silence(times, *span) for times in paths) for span in spans]
    assert math.isfinite(max(found)), "a span without pings shows nothing"
    above = sum(each > 0.05 for each in found)
    return f"median {statistics.median(found) * 1000:.0f} ms, longest {max(found) * 1000:.0f} ms, {above} above 50 ms"


@dataclass
class Stream:
    """One TCP connection that carries random bytes from one machine to another, and compares their SHA-256."""

    source: Node
    destination: Node
    chunk: int
    """Bytes every 50 ms, on a machine that is quick enough."""

    def start(self) -> None:
        """Opens the connection."""
        words = {"folder": self.source.state, "port": PORT, "chunk": self.chunk, "address": self.destination.address}
        machine.execute(self.destination, RECEIVE.format(file=self._file(self.destination), **words))
        listening = f"busybox netstat -ltn | grep -q ':{PORT} '"
        wait_until("nc to listen", lambda: machine.attempt(self.destination, listening)[0] == 0, PATIENCE_S)
        machine.execute(self.source, SEND.format(file=self._file(self.source), **words))
        self.wait_for_progress()

    def wait_for_progress(self) -> None:
        """Waits until bytes of five chunks have arrived: more than pings bring meanwhile."""
        begin = self.arrived()
        wait_until(
            f"the stream from {self.source.name} to {self.destination.name}",
            lambda: self.arrived() > begin + 5 * self.chunk,
            PATIENCE_S,
            poll_s=0.1,
        )

    def arrived(self) -> int:
        """Bytes that the destination's device has received."""
        return int(machine.execute(self.destination, "cat /sys/class/net/eth0/statistics/rx_bytes"))

    def end(self) -> None:
        """Ends the connection; all bytes must have arrived."""
        machine.execute(self.source, f": >{self._file(self.source)}.over")
        sums = []
        for node, suffix in ((self.source, "sent"), (self.destination, "received")):
            path = self.state_file(node, suffix)
            wait_until(f"{path} on {node.name}", lambda node=node, path=path: self._sum(node, path), PATIENCE_S)
            sums.append(self._sum(node, path))
        assert sums[0] == sums[1], f"the stream from {self.source.name} to {self.destination.name} arrived damaged"

    def state_file(self, node: Node, suffix: str) -> str:
        """One of its files on a machine."""
        return f"{self._file(node)}.{suffix}"

    @staticmethod
    def _file(node: Node) -> str:
        return str(node.file(".stream"))

    @staticmethod
    def _sum(node: Node, path: str) -> str:
        return machine.execute(node, f"cat {path}").partition(" ")[0].strip()


@contextlib.contextmanager
def under_traffic(pings: list[Pings], streams: list[Stream]) -> Iterator[None]:
    """Runs pings and streams while the context lasts; reads their results at its end."""
    for each in (*streams, *pings):
        each.start()
    try:
        yield
        for stream in streams:
            stream.end()
        time.sleep(2 * END_S)
    finally:
        for ping in pings:
            ping.end()
    for ping in pings:
        ping.assert_intact()
