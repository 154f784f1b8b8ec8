"""CPU time of processes, threads and the whole machine."""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CONTEXT_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s+(\d+)$", re.MULTILINE)

WORK = {"user_cores": (0, 1), "kernel_cores": (2,), "softirq_cores": (5, 6)}
"""Kinds of work as fields of /proc/stat: user and nice; system; irq and softirq."""


@dataclass
class Usage:
    """CPU seconds over an interval; set when the measurement ends."""

    seconds: float = 0
    system_s: float = 0
    processes_s: dict[str, float] = field(default_factory=dict)

    @property
    def system_cores(self) -> float:
        """Number of busy CPUs of the whole machine."""
        return self.system_s / self.seconds

    @property
    def processes_cores(self) -> float:
        """Number of CPUs that all measured processes together keep busy."""
        return sum(self.processes_s.values()) / self.seconds

    def sample(self) -> dict[str, float]:
        """Values by metric: all daemons together, the whole machine, each process."""
        each = {f"cores_{name}": seconds / self.seconds for name, seconds in self.processes_s.items()}
        return {"daemon_cores": self.processes_cores, "system_cores": self.system_cores, **each}


@dataclass
class Work:
    """CPU seconds of the machine over a transfer, by kind of work; set when the measurement ends."""

    cpu_s: dict[str, float] = field(default_factory=dict)

    def sample(self, transferred_bytes: float, rate_bps: float) -> dict[str, float]:
        """Busy cores by kind of work, and CPU time per gigabyte, of a transfer of this size and rate.

        The CPU time is divided by what was transferred: the machine does little else, so a measurement that begins
        before the transfer or ends after it finds the same CPU time.
        """
        seconds = transferred_bytes * 8 / rate_bps
        cores = {name: cpu_s / seconds for name, cpu_s in self.cpu_s.items()}
        return cores | {"cpu_s_a_gb": sum(self.cpu_s.values()) / (transferred_bytes / 1e9)}


@contextlib.contextmanager
def split() -> Iterator[Work]:
    """Measures where the machine's CPU time goes while the context lasts."""
    work = Work()
    before = _fields()
    yield work
    after = _fields()
    for name, indices in WORK.items():
        work.cpu_s[name] = sum(after[index] - before[index] for index in indices) * TICK_S


@contextlib.contextmanager
def measured(processes: Mapping[str, int]) -> Iterator[Usage]:
    """Measures processes, given by name and id, and the machine while the context lasts."""
    usage = Usage()
    begin, system = time.monotonic(), busy_s()
    before = {name: process_s(pid) for name, pid in processes.items()}
    yield usage
    usage.processes_s = {name: process_s(pid) - before[name] for name, pid in processes.items()}
    usage.system_s = busy_s() - system
    usage.seconds = time.monotonic() - begin


def busy_s(stat: str | None = None) -> float:
    """Busy seconds of all CPUs since boot (proc(5), /proc/stat: all but idle and iowait)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = _fields(stat)
    return (user + nice + system + irq + softirq + steal) * TICK_S


def _fields(stat: str | None = None) -> list[int]:
    """Clock ticks of all CPUs since boot, by kind."""
    return [int(field) for field in (stat or Path("/proc/stat").read_text()).splitlines()[0].split()[1:9]]


def process_s(pid: int) -> float:
    """CPU seconds of a process's live threads, to the nanosecond; 0 if the process has exited."""
    return sum(thread_s(pid, thread) for thread in threads(pid))


def threads(pid: int) -> list[int]:
    """Thread ids of a process."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def thread_s(pid: int, thread: int) -> float:
    """CPU seconds of one thread (Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat)."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0


def named_threads(pid: int, prefix: str) -> list[int]:
    """Threads of a process whose name starts with `prefix`."""
    return [thread for thread in threads(pid) if _name(pid, thread).startswith(prefix)]


def _name(pid: int, thread: int) -> str:
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wakeups(pids: Iterable[int]) -> int:
    """Context switches of these processes' threads so far, voluntary or not, which equals the number of wake-ups."""
    total = 0
    for pid in pids:
        for thread in threads(pid):
            status = Path(f"/proc/{pid}/task/{thread}/status").read_text()
            total += sum(map(int, CONTEXT_SWITCHES.findall(status)))
    return total


def rss_bytes(pid: int) -> int:
    """Resident memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
