"""Processes that outlive the command that starts them, and how to find them again.

A file stores a process's id and start time, because ids are reused. The process and all its children also carry the
lab's directory in their environment. That finds processes started just before the lab was killed, and processes that
users left running in a container.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vnetlab import remote
from vnetlab.run import LabError

MARK = "VNET_LAB_STATE"
"""Environment variable with the directory of a process's lab."""
_ELSEWHERE: dict[int, subprocess.Popen] = {}
"""The ssh of processes on other machines, which end when its standard input is closed."""
STOP_S = 5
"""Time to exit on SIGTERM before SIGKILL."""


def start(command: Sequence[str], pid_file: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Starts a process of the lab in whose directory `pid_file` lies; appends its output to `log`.

    A process on another machine is represented by its ssh, and ends with it.
    """
    elsewhere = remote.supervised(command, {**(environment or {}), **mark(pid_file.parent)})
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                elsewhere or command,
                stdin=subprocess.PIPE if elsewhere else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {}), **mark(pid_file.parent)},
            )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is missing: run 'make packages build'") from error
    if elsewhere:
        _ELSEWHERE[process.pid] = process
    pid_file.write_text(f"{process.pid} {_start_time(process.pid)}\n")


def mark(state: Path) -> dict[str, str]:
    """The environment variable for processes of the lab in directory `state`."""
    return {MARK: str(state)}


def find(pid_file: Path) -> int | None:
    """The process id in `pid_file`, or None if that process has exited."""
    try:
        pid, started = pid_file.read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    _reap(int(pid))
    return int(pid) if _start_time(int(pid)) == started else None


def stop(pid_file: Path) -> None:
    """Stops the process of `pid_file`, if necessary by SIGKILL, and removes the file."""
    elsewhere = _ELSEWHERE.pop(find(pid_file) or 0, None)
    if elsewhere:
        elsewhere.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            elsewhere.wait(STOP_S)
    _end(lambda: [pid] if (pid := find(pid_file)) else [])
    pid_file.unlink(missing_ok=True)


def sweep(state: Path) -> None:
    """Stops every process of the lab in directory `state`."""
    _end(lambda: list(_marked(state)))


def _end(left: Callable[[], list[int]]) -> None:
    """Stops the processes that `left` returns until it returns none, if necessary by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + STOP_S
        while left():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        else:
            return
    raise LabError(f"processes {left()} survive SIGKILL")


def _marked(state: Path) -> Iterator[int]:
    """Processes that carry the mark of `state`, except this one."""
    wanted = f"{MARK}={state}".encode()
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            environment = (directory / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment:
            yield int(directory.name)


def _start_time(pid: int) -> str | None:
    """Start time of a process in clock ticks after boot (proc(5), field 22); None if it has exited."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    # A zombie has exited, unless it still has threads, which hold its sockets.
    return None if fields[0] == "Z" and int(fields[17]) <= 1 else fields[19]


def _reap(pid: int) -> None:
    """Reaps a child of this program, so that it does not remain a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
