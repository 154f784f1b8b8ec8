"""Runs on other machines over ssh: which machines, and experiments that one of them runs by itself.

Hosts of most experiments can be spread over machines (`vnetlab.remote`). Those with virtual machines, files and devices
that are not Ethernet need their hosts on one machine: the first one runs them with its own `lab evaluate`, by KVM if
it has that, and their results are fetched.
"""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from vnetlab import daemon, remote
from vnetlab.bench.result import Result
from vnetlab.evaluate import ranks
from vnetlab.remote import Machine
from vnetlab.run import LabError, progress, run

OWN = "own"
"""The word behind a device that the host takes itself."""
COMMAND = daemon.REPOSITORY / "lab" / "lab"
PYTHON = daemon.REPOSITORY / ".venv" / "bin" / "python"
LOST = 255
"""ssh's status when the connection is lost."""
ALONE = "alone"
"""What a result says of the machine that has run the experiment by itself."""
STOP_S = 120
"""Time for a run on another machine to take its lab down."""


def machines(path: Path) -> tuple[Machine, ...]:
    """The machines of a file: where ssh connects to, the underlay's device, and whether the host takes it itself."""
    try:
        lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error}") from error
    found = [line for line in lines if line]
    if not found or any(len(line) != 2 and line[2:] != [OWN] for line in found):
        raise LabError(
            f"{path}: write a line 'DESTINATION DEVICE' or 'DESTINATION DEVICE {OWN}' for each of at least two "
            "machines; one suffices for experiments that run on one machine"
        )
    return tuple(Machine(line[0], line[1], own=len(line) > 2) for line in found)


def check(others: Sequence[Machine]) -> None:
    """Raises LabError if a machine cannot be reached or lacks the programs."""
    wanted = [daemon.binaries() / "vnetd", ranks.PROGRAMS / "cg-mpi", COMMAND, PYTHON]
    for each in others:
        try:
            run(remote.ssh(each, "true"))
        except LabError as error:
            # Without the command, which is long and says less than ssh.
            words = re.sub("^'.*?' (?=failed with|did not end)", "", str(error), flags=re.DOTALL)
            advice = f"'ssh {each.destination} true' must work without a password"
            raise LabError(f"{each.destination} cannot be reached: ssh {words}; {advice}") from error
        try:
            run(remote.ssh(each, " && ".join(f"test -x {shlex.quote(str(path))}" for path in wanted)))
        except LabError as error:
            here = daemon.REPOSITORY
            advice = f"copy this checkout with its builds: rsync -a {here}/ {each.destination}:{here}/"
            raise LabError(f"{each.destination} has no {' or no '.join(map(str, wanted))}: {advice}") from error


def discard(names: Sequence[str], place: Machine, kept: Path) -> None:
    """Removes the results of experiments that a machine has kept."""
    paths = (shlex.quote(str(kept.resolve() / f"{name}.json")) for name in names)
    run(remote.ssh(place, " ".join(["rm -f", *paths])))


def measure(name: str, place: Machine, words: Sequence[str], kept: Path) -> None:
    """Has a machine run an experiment with these options, and fetches the result.

    There, results are kept in a folder of the same path, where a second call continues. Raises LabError if the
    experiment fails; what it has measured is fetched nevertheless.
    """
    path = kept.resolve() / f"{name}.json"
    if path.exists() and (known := Result.read(path).machine.get(ALONE)) != place.destination:
        raise LabError(f"{path} has figures of {known or 'this machine'}: choose another --results, or --fresh")
    progress(f"{name}: its hosts share a machine, {place.destination}")
    command = [str(PYTHON), str(COMMAND), "evaluate", name, "--results", str(path.parent), *words]
    with contextlib.ExitStack() as stack:
        # Also after an interrupt, whose cause must not be hidden if nothing can be fetched any more.
        stack.callback(_try_to_fetch, place, path)
        status = stack.enter_context(_running(place, command)).wait()
    if status == LOST:
        name_of_lab = words[words.index("--name") + 1]
        end = f"ssh {place.destination} {PYTHON} {COMMAND} down --name {name_of_lab}"
        raise LabError(f"{name}: the connection to {place.destination} is lost: run it again, or end it: {end}")
    if status:
        raise LabError(f"{name} failed on {place.destination} with status {status}: its last lines are above")
    if not path.exists():
        raise LabError(f"{name} ended well on {place.destination}, but there is no {path}: run it again")


@contextlib.contextmanager
def _running(place: Machine, command: Sequence[str]) -> Iterator[subprocess.Popen]:
    """Runs a command on a machine, whose output is shown here; at the context's end it is told to end."""
    words = remote.ssh(place, remote.watched(command))
    # An interrupt from the keyboard must not end ssh, but the command, which then takes its lab down.
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()


def _try_to_fetch(place: Machine, path: Path) -> None:
    """Fetches a result, or says why it stays where it is."""
    try:
        _fetch(place, path)
    except LabError as error:
        progress(f"{path} stays on {place.destination}, where a second call continues: {error}")


def _fetch(place: Machine, path: Path) -> None:
    """Copies a result from the same path of a machine, if it is there."""
    there = shlex.quote(str(path))
    text = run(remote.ssh(place, f"if test -e {there}; then cat {there}; fi"))
    if text:
        result = Result.parse(text)
        result.machine[ALONE] = place.destination
        result.write(path)
