"""Applications that compute and communicate (`lab/workloads`): building them, and running them on this machine.

docs/workloads.md describes the workloads and their results.
"""

import json
import shlex
import subprocess
from pathlib import Path

from vnetlab.daemon import REPOSITORY
from vnetlab.run import LabError, run

SOURCES = REPOSITORY / "lab" / "workloads"
KERNELS = ("ep", "cg", "is", "mg", "ft", "sp", "bt", "lu", "advect")
VARIANTS = ("serial", "openmp", "mpi")
BUILD_S = 300
OPEN_MPI = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
"""Options of mpirun: there are more ranks than CPUs, so waiting ranks must yield."""
SAME_MACHINE = ["--mca", "pml", "ob1", "--mca", "btl", "self,vader"]
"""Options of mpirun: ranks of one machine communicate by shared memory; no other transport is probed."""


def build(directory: Path, *flags: str) -> None:
    """Builds all workloads into `directory`; `flags` are arguments of make, such as `FLAGS=-DPERTURB`."""
    run(["make", "-s", "-j2", "-C", str(SOURCES), f"BUILD={directory}", *flags], timeout_s=BUILD_S)


def measure(
    directory: Path, kernel: str, size: str, *more: str, ranks: int = 0, threads: int = 1, timeout_s: float = 600
) -> dict:
    """Runs a workload on this machine: by MPI with `ranks`, else serial, or with `threads` by OpenMP.

    `size` is a class (S, W, A); `more` are further arguments. Returns the workload's report. Raises LabError if it
    fails, or if its result is wrong.
    """
    variant = "mpi" if ranks else "openmp" if threads > 1 else "serial"
    command = [str(directory / f"{kernel}-{variant}"), size, *more]
    if ranks:
        command = ["mpirun", *OPEN_MPI, *SAME_MACHINE, "-np", str(ranks), *command]
    if threads > 1:
        command = ["env", f"OMP_NUM_THREADS={threads}", "OMP_WAIT_POLICY=passive", *command]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"'{shlex.join(command)}' did not end: {error}") from error
    return report(kernel, done.returncode, done.stdout + done.stderr)


def report(kernel: str, status: int, output: str) -> dict:
    """A workload's report from the exit status and the output of its run. Raises LabError if it failed."""
    lines = output.splitlines()
    found = [line for line in lines if line.startswith('{"kernel"')]
    if status == 0 and found:
        return json.loads(found[-1])
    # mpirun adds its own lines around the program's message.
    said = [line for line in lines if line.startswith(kernel.upper())]
    raise LabError(" / ".join(said or [f"{kernel} failed with status {status}: {output.strip()[-200:]}"]))
