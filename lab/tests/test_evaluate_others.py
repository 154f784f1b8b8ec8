"""`lab evaluate --native-hosts`: hosts on other machines, which are network namespaces here."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vnetlab import lab, underlay
from vnetlab.bench.result import Result
from vnetlab.daemon import REPOSITORY
from vnetlab.evaluate import network, report
from vnetlab.evaluate.kinds import BRIDGED, DIRECT, NATIVE, TAP, TINC
from vnetlab.run import run

LAB = "test-evaluate-others"

MACHINES = [f"{LAB}-machine{number}" for number in (1, 2)]
SSH = """\
#!/bin/sh
# A machine is a network namespace with its name.
while :; do
    case "$1" in -o) shift 2 ;; -*) shift ;; *) break ;; esac
done
machine=$1; shift
exec nsenter --net="/run/netns/$machine" sh -c "$*"
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of two machines, namespaces joined by their devices nic0; ssh enters them."""
    names = MACHINES
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
        run(["ip", "netns", "add", name])
    try:
        words = f"ip -n {names[0]} link add nic0 type veth peer name nic0 netns {names[1]}"
        run(words.split())
        for name in names:
            run(["ip", "-n", name, "link", "set", "nic0", "up"])
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
        file = tmp_path / "machines.txt"
        file.write_text("# ssh to, device\n" + "".join(f"{name} nic0\n" for name in names))
        yield file
    finally:
        lab.down(LAB)
        for name in names:
            run(["ip", "netns", "delete", name])


def evaluate(others: Path, results: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a quick evaluation on these machines."""
    command = [sys.executable, str(REPOSITORY / "lab" / "lab"), "evaluate", "--quick", "--name", LAB]
    command += ["--native-hosts", str(others), "--results", str(results), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def measured(others: Path, results: Path, name: str, *words: str) -> Result:
    """The result of an experiment on these machines, where nothing stays."""
    done = evaluate(others, results, name, *words)
    assert done.returncode == 0, done.stderr
    left = [name for name in underlay.namespaces() if name.startswith(f"{LAB}-h")]
    assert not left
    assert subprocess.run(["pgrep", "-f", f"/vnet-lab/{LAB}/"], check=False).returncode == 1, "no process stays"
    return Result.read(results / f"{name}.json")


def test_hosts_on_other_machines(others: Path, tmp_path: Path):
    """A kernel by MPI and round trips between two machines over ssh."""
    chosen = ["--kernel", "is", "--contender", "bridge", "--contender", TAP.name, "--contender", DIRECT.name]
    result = measured(others, tmp_path, "nas", *chosen)
    assert [failure.contender for failure in result.failures] == [DIRECT.name]
    assert result.contenders() == [BRIDGED.name, TAP.name, DIRECT.name]
    assert set(result.metrics()) == {"operations_per_s", "whole_s"}, "no CPU time of this machine"
    assert "nic0" in result.machine["hosts"]
    assert f"Hosts are the machines {result.machine['hosts']}." in (tmp_path / "report.md").read_text()


def test_programs_that_machines_do_not_share(others: Path, tmp_path: Path):
    """Tinc has its keys on both machines, and bare sockets run on both."""
    result = measured(others, tmp_path, "messages", "--contender", "tinc")
    assert (result.contenders(), result.failures) == ([TINC.name], [])
    result = measured(others, tmp_path, "interconnect", "--contender", network.BOUND)
    assert (result.contenders(), result.metrics(), result.failures) == ([network.BOUND], ["transfer_bps"], [])


def test_hosts_take_the_devices_themselves(others: Path, tmp_path: Path):
    """They give them back, and Ethernet frames of other stations arrive there."""
    others.write_text(others.read_text().replace("nic0", "nic0 own"))
    chosen = ["--kernel", "is", "--contender", NATIVE.name, "--contender", DIRECT.name]
    result = measured(others, tmp_path, "nas", *chosen)
    assert (result.contenders(), result.failures) == ([NATIVE.name, DIRECT.name], [])
    for name in MACHINES:
        assert "nic0" in run(["ip", "-n", name, "-brief", "link", "show", "nic0"])


def test_one_machine_runs_what_needs_one(others: Path, tmp_path: Path):
    """The first machine's own lab runs it, shows its progress here, and its result is fetched and reported."""
    others.write_text(f"{MACHINES[0]} nic0\n")
    chosen = ["--contender", NATIVE.name, "--contender", TAP.name]
    done = evaluate(others, tmp_path, "ipoib", *chosen)
    assert done.returncode == 0, done.stderr
    assert f"ipoib: its hosts share a machine, {MACHINES[0]}" in done.stderr
    assert f"1/1 {TAP.name}: " in done.stderr
    result = Result.read(tmp_path / "ipoib.json")
    assert (result.contenders(), result.failures) == ([NATIVE.name, TAP.name], [])
    assert f"Hosts of `ipoib` are namespaces of {MACHINES[0]}." in (tmp_path / "report.md").read_text()
    # A second call finds that nothing is left to measure.
    done = evaluate(others, tmp_path, "ipoib", *chosen)
    assert done.returncode == 0, done.stderr
    assert "0 measurements left" in done.stderr
    done = evaluate(others, tmp_path, "ipoib", "--kernel", "none")
    assert done.returncode == 2
    done = evaluate(others, tmp_path / "file", "nas")
    assert "nas: two machines at least, a line for each" in done.stderr


def test_an_interrupt_ends_what_one_machine_runs(others: Path, tmp_path: Path):
    """Its lab is taken down there, and nothing runs on."""
    words = [sys.executable, str(REPOSITORY / "lab" / "lab"), "evaluate", "--quick", "--name", LAB, "ipoib"]
    words += ["--native-hosts", str(others), "--results", str(tmp_path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        seen = []
        while "1/1 " not in (seen or [""])[-1]:
            seen.append(process.stderr.readline())
            assert seen[-1], "".join(seen)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        assert process.wait(120) == 130
    assert not [name for name in underlay.namespaces() if name.startswith(f"{LAB}-h")]
    assert subprocess.run(["pgrep", "-f", f"evaluate ipoib --results {tmp_path}"], check=False).returncode == 1
    result = Result.read(tmp_path / "ipoib.json")
    assert result.contenders()
    assert result.machine["alone"] == MACHINES[0], "what has been measured is fetched"


def test_a_run_that_fails_on_its_machine(others: Path, tmp_path: Path):
    """Its status and what it printed arrive here. Figures of elsewhere are not overwritten, nor discarded in vain."""
    with Path(f"/run/vnet-{LAB}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = evaluate(others, tmp_path, "ipoib")
    assert done.returncode == 1
    assert f"another bench of lab {LAB} is running on this machine" in done.stderr
    assert f"ipoib failed on {MACHINES[0]} with status 1" in done.stderr
    kept = tmp_path / "ipoib.json"
    figures = (report.PUBLISHED / "ipoib.json").read_text()
    kept.write_text(figures)
    done = evaluate(others, tmp_path, "ipoib")
    assert f"{kept} has figures of this machine: choose another --results, or --fresh" in done.stderr
    done = evaluate(others, tmp_path, "nas", "--wire", "10g", "--fresh")
    assert "choose --wire none" in done.stderr
    assert kept.read_text() == figures
    # With --fresh they go, here and there.
    done = evaluate(others, tmp_path, "ipoib", "--fresh", "--contender", NATIVE.name)
    assert done.returncode == 0, done.stderr
    assert Result.read(kept).contenders() == [NATIVE.name]


def test_files_of_machines_that_are_wrong(others: Path, tmp_path: Path):
    """One line says what to do."""
    others.write_text("one nic0\ntwo\n")
    done = evaluate(others, tmp_path, "nas")
    assert "write a line 'DESTINATION DEVICE' or 'DESTINATION DEVICE own'" in done.stderr
    others.write_text("nowhere nic0\n")
    done = evaluate(others, tmp_path, "machines")
    assert "nowhere cannot be reached: ssh failed with status 1: nsenter: cannot open" in done.stderr
    assert done.stderr.endswith("'ssh nowhere true' must work without a password\n")
    assert "ControlMaster" not in done.stderr
