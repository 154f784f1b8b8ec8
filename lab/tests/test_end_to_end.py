"""The script that runs these tests: it reports repeated tests with their count, even if the run passes."""

import shutil
import subprocess
from pathlib import Path

from vnetlab.daemon import REPOSITORY

PYTEST = """#!/usr/bin/env bash
# Fails with the tests in lab/failing, once.
[ -s failing ] || exit 0
mkdir -p .pytest_cache/v/cache
{ echo '{'; sed 's/.*/  "&": true,/; $s/,$//' failing; printf '}'; } >.pytest_cache/v/cache/lastfailed
: >failing
exit 1
"""


def run(folder: Path, *failing: str) -> subprocess.CompletedProcess[str]:
    (folder / "lab" / "failing").write_text("".join(f"{name}\n" for name in failing))
    return subprocess.run([folder / ".ci" / "end-to-end"], capture_output=True, text=True, check=False)


def test_repeated_tests_are_counted(tmp_path: Path):
    for name in (".ci", "lab", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "end-to-end", tmp_path / ".ci")
    pytest = tmp_path / ".venv" / "bin" / "pytest"
    pytest.write_text(PYTEST)
    pytest.chmod(0o755)
    done = run(tmp_path)
    assert done.returncode == 0
    assert "no earlier runs" in done.stdout
    assert "no test was run again in the last 1 runs" in done.stdout
    names = ["tests/test_a.py::test_x", "tests/test_b.py::test_y[1 2]"]
    assert run(tmp_path, *names).returncode == 0
    assert run(tmp_path, names[1]).returncode == 0
    done = run(tmp_path)
    assert done.returncode == 0, "green, and they are named"
    listed = [line.split(maxsplit=1) for line in done.stdout.splitlines() if "::" in line]
    assert listed == [["2", names[1]], ["1", names[0]]]
    assert run(tmp_path, *(f"tests/test_a.py::test_{n}" for n in range(6))).returncode == 1, "too many to run again"
    for _ in range(50):
        done = run(tmp_path)
    assert "no test was run again in the last 50 runs" in done.stdout, "old runs are forgotten"
