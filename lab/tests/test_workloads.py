"""The workloads: each verifies its result, serial, by OpenMP and by MPI, and a wrong result is no result."""

import subprocess
from pathlib import Path

import pytest

from vnetlab import workloads
from vnetlab.run import LabError

RUN_S = 60
QUICK = ("ep", "cg", "is", "mg", "ft")
"""Kernels that take at most a few seconds in class W."""
IN_ROWS = ("sp", "bt", "lu")
"""Kernels that share rows of points."""
SPLITS = ("4x1x1", "1x4x1", "1x1x4", "2x2x1")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("workloads")
    workloads.build(directory, "CFLAGS=-O2 -Werror")
    return directory


@pytest.mark.parametrize("kernel", workloads.KERNELS)
def test_each_variant_verifies_class_s(programs: Path, kernel: str):
    for ranks, threads in ((0, 1), (0, 2), (1, 1), (2, 1), (4, 1)):
        figures = workloads.measure(programs, kernel, "S", ranks=ranks, threads=threads, timeout_s=RUN_S)
        assert (figures["kernel"], figures["class"], figures["verified"]) == (kernel.upper(), "S", True)
        assert (figures["ranks"], figures["threads"]) == (max(ranks, 1), threads)
        assert figures["seconds"] > 0
        assert figures["mops"] > 0


@pytest.mark.parametrize("kernel", QUICK)
def test_quick_kernels_verify_class_w(programs: Path, kernel: str):
    for ranks in (0, 2):
        figures = workloads.measure(programs, kernel, "W", ranks=ranks, timeout_s=RUN_S)
        assert (figures["kernel"], figures["class"], figures["verified"]) == (kernel.upper(), "W", True)


@pytest.mark.parametrize("kernel", workloads.KERNELS)
def test_eight_ranks_verify_class_s(programs: Path, kernel: str):
    """Or six: SP, BT and LU refuse more, as each rank needs two of their twelve rows."""
    ranks = 6 if kernel in IN_ROWS else 8
    figures = workloads.measure(programs, kernel, "S", ranks=ranks, timeout_s=RUN_S)
    assert (figures["ranks"], figures["verified"]) == (ranks, True)
    if kernel in IN_ROWS:
        with pytest.raises(LabError, match=f"{kernel.upper()}: at most 6 ranks for class S"):
            workloads.measure(programs, kernel, "S", ranks=8, timeout_s=RUN_S)


def test_a_wrong_result_gives_no_figures(tmp_path: Path):
    programs = [f"{tmp_path}/{kernel}-serial" for kernel in workloads.KERNELS]
    workloads.build(tmp_path, "CFLAGS=-O2", "FLAGS=-DPERTURB", *programs)
    for program in programs:
        done = subprocess.run([program, "S"], check=False, capture_output=True, text=True, timeout=RUN_S)
        assert (done.returncode, done.stdout) == (1, ""), program
        assert "the result is wrong, so there are no figures" in done.stderr
    with pytest.raises(LabError, match=r"EP class S: sum of X is .*, not -3\.247834652034740e"):
        workloads.measure(tmp_path, "ep", "S", timeout_s=RUN_S)


def test_the_advective_result_does_not_depend_on_the_split(programs: Path):
    grid = "30x21x13x40"  # Parts of unequal sizes; no reference checksum exists for this grid.
    one = workloads.measure(programs, "advect", grid, timeout_s=RUN_S)
    for split in SPLITS:
        figures = workloads.measure(programs, "advect", grid, split, ranks=4, timeout_s=RUN_S)
        assert (figures["split"], figures["checksum"]) == (split, one["checksum"])
        parts = sum(figures[part] for part in ("pack_s", "compute_s", "send_s", "wait_s"))
        assert 0 < parts <= figures["seconds"] * 1.1


def test_arguments_that_make_no_sense_are_refused(programs: Path):
    for arguments in (("ep", "X"), ("advect", "8x8x8"), ("advect", "8x8x8x1", "2x1x1")):
        with pytest.raises(LabError, match=r"usage:|is not a split for 1 ranks"):
            workloads.measure(programs, *arguments, timeout_s=RUN_S)
    with pytest.raises(LabError, match="MG: the number of ranks must be 1, 2, 4 or 8, not 3"):
        workloads.measure(programs, "mg", "S", ranks=3, timeout_s=RUN_S)
