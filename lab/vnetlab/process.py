"""Processes that outlive the command that starts them, and how each is found again.

A process has a file with its id and start time (an id alone may meanwhile be someone else's). It also carries the lab's
directory in its environment, and so do all its children: what was started a moment before a kill took the lab itself,
and whatever users leave running in a container, is found by that.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vnetlab.run import LabError

MARK = "VNET_LAB_STATE"
"""The environment variable that holds the directory of the lab a process belongs to."""
STOP_S = 5
"""A process has this long to end by itself."""


def start(command: Sequence[str], pid_file: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Starts a process of the lab whose directory `pid_file` is in; its output is appended to `log`."""
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **(environment or {}), **mark(pid_file.parent)},
            )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not there: run 'make packages build'") from error
    pid_file.write_text(f"{process.pid} {_start_time(process.pid)}\n")


def mark(state: Path) -> dict[str, str]:
    """The environment variable for processes of the lab in directory `state`."""
    return {MARK: str(state)}


def find(pid_file: Path) -> int | None:
    """Gives the id of the process that `pid_file` tells of, or None when it runs no more."""
    try:
        pid, started = pid_file.read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    _reap(int(pid))
    return int(pid) if _start_time(int(pid)) == started else None


def stop(pid_file: Path) -> None:
    """Ends the process that `pid_file` tells of, by force when it does not end by itself, and removes the file."""
    _end(lambda: [pid] if (pid := find(pid_file)) else [])
    pid_file.unlink(missing_ok=True)


def sweep(state: Path) -> None:
    """Ends every process that belongs to the lab in directory `state`."""
    _end(lambda: list(_marked(state)))


def _end(left: Callable[[], list[int]]) -> None:
    """Ends the processes that `left` names until it names none, by force when they do not end by themselves."""
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
    raise LabError(f"processes {left()} do not end, not even when killed")


def _marked(state: Path) -> Iterator[int]:
    """Finds the processes that carry the mark of `state`, this one aside."""
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
    """Gives when a process started, in clock ticks after boot (proc(5), field 22), or None when it runs no more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    # A zombie runs no more, unless it still has threads: they hold its sockets until they are gone.
    return None if fields[0] == "Z" and int(fields[17]) <= 1 else fields[19]


def _reap(pid: int) -> None:
    """Takes the exit status of a child of this very program, so that it does not stay behind as a zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
