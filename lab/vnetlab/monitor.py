"""QEMU's monitor (QMP): commands, and the events that tell what a guest has done with them."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from vnetlab.run import LabError

ANSWER_S = 30


class Monitor:
    """A connection to QEMU's monitor. It collects events from its beginning on."""

    def __init__(self, path: Path) -> None:
        self._events: list[dict] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(max(ANSWER_S, float(os.environ.get("VNET_LAB_PATIENCE_S", "0"))))
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self._message()
        self.ask("qmp_capabilities")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self._socket.close()

    def ask(self, command: str, **arguments: object) -> dict:
        """Runs a command; returns its answer. Raises LabError if QEMU refuses it or exits."""
        words = {"execute": command, "arguments": {name.replace("_", "-"): value for name, value in arguments.items()}}
        try:
            self._socket.sendall(json.dumps(words).encode() + b"\n")
            while "event" in (answer := self._message()):
                self._events.append(answer)
        except OSError as error:
            raise LabError(f"QEMU does not answer '{command}': {error}") from error
        if "error" in answer:
            raise LabError(f"QEMU refuses '{command}': {answer['error']['desc']}")
        return answer["return"]

    def wait_for(self, what: str, wanted: Callable[[str, dict], bool]) -> dict:
        """Waits for an event, by its name and data; returns its data. Events before it count, and are forgotten.

        Raises LabError if QEMU exits, or is silent for too long.
        """
        try:
            while True:
                event = self._events.pop(0) if self._events else self._message()
                data = event.get("data", {})
                if wanted(event.get("event", ""), data):
                    return data
        except OSError as error:
            raise LabError(f"QEMU does not report {what}: {error}") from error

    def _message(self) -> dict:
        """The next message."""
        line = self._lines.readline()
        if not line:
            raise OSError("it has exited")
        return json.loads(line)
