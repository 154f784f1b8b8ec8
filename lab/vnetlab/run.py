"""Runs programs and waits for conditions, with time limits, progress lines, and errors that name the failed step."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vnetlab import remote

_START = time.monotonic()


class LabError(Exception):
    """A failure of the lab. Its text names the failed step and, where possible, a remedy.

    `log` is a file whose last lines contain details.
    """

    def __init__(self, text: str, log: Path | None = None) -> None:
        super().__init__(text)
        self.log = log
        self.log_end: str | None = None

    def keep_log(self) -> None:
        """Keeps the log's last lines, because clean-up may remove the file before they are shown."""
        if self.log and self.log_end is None:
            self.log_end = tail(self.log) or "    (empty)"


def progress(text: str) -> None:
    """Prints a progress line with the seconds since the start to standard error."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


def run(command: Sequence[str], timeout_s: float = 30, cwd: Path | None = None) -> str:
    """Runs a program, on the machine of the namespace that it names, and returns its standard output.

    Raises LabError with the last lines of its output if it fails or exceeds the time limit.
    """
    text = " ".join(command)
    try:
        done = subprocess.run(
            remote.wrap(command),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise LabError(f"{command[0]} is not installed: run 'make packages'") from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"'{text}' did not end within {timeout_s:g} s") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise LabError(f"'{text}' failed with status {done.returncode}: {' / '.join(words)}")
    return done.stdout


def wait_until(
    what: str, condition: Callable[[], object], timeout_s: float, log: Path | None = None, poll_s: float = 0.05
) -> None:
    """Waits until `condition` holds; the condition may raise LabError to give up early.

    Prints progress every 3 s. Raises LabError with `log` after `timeout_s`, or after VNET_LAB_PATIENCE_S if that is
    longer: tests set it, because they run on machines that are busy with others.
    """
    timeout_s = max(timeout_s, float(os.environ.get("VNET_LAB_PATIENCE_S", "0")))
    begin = time.monotonic()
    told = begin
    while not condition():
        now = time.monotonic()
        if now - begin > timeout_s:
            raise LabError(f"gave up after {timeout_s:g} s of waiting for {what}", log)
        if now - told > 3:
            progress(f"waiting for {what} ({now - begin:.0f} of at most {timeout_s:g} s)")
            told = now
        time.sleep(poll_s)


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError as error:
        text = str(error)
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
