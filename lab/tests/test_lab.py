"""The lab itself: repeatable, isolated, and removed completely."""

import json
import os
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import reaches

from vnetlab import daemon, lab, measure, process, underlay
from vnetlab.run import wait_until
from vnetlab.topology import STATE, Settings

LAB = Path(__file__).parent.parent / "lab"
NAMES = ("test-one", "test-two")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    for name in NAMES:
        lab.down(name)


def command(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the `lab` command as users do."""
    done = subprocess.run([LAB, *arguments], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stderr
    return done


def traces(name: str) -> list[str]:
    """Namespaces, files and processes that a lab left behind."""
    left = [f"namespace {namespace}" for namespace in underlay.owned(name)]
    left += [str(path) for path in (STATE / name).parent.glob(f"{name}*")]
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes() + (directory / "environ").read_bytes()
        except OSError:
            continue
        if f"/vnet-lab/{name}".encode() in words and int(directory.name) != os.getpid():
            left.append(f"process {directory.name}: {words[:80]!r}")
    return left


def test_a_second_up_changes_nothing():
    settings = Settings(name="test-one", vms=1)
    first = lab.status(lab.up(settings))
    assert all(row["up"] for row in first)
    assert lab.status(lab.up(settings)) == first, "the same processes"
    refused = command("up", "--name", "test-one", "--hosts", "3", status=1)
    assert "down" in refused.stderr


def test_up_restarts_killed_processes():
    settings = Settings(name="test-one", vms=1)
    topology = lab.up(settings)
    for name in ("h1", "h2v1"):
        pid = process.find(topology.find(name).file(".pid"))
        assert pid
        os.kill(pid, signal.SIGKILL)

    def down() -> list[str]:
        return [row["name"] for row in lab.status(topology) if not row["up"]]

    # The kernel takes a while to free a killed machine's memory.
    wait_until("killed processes to be gone", lambda: down() == ["h1", "h2v1"], 10)
    lab.up(settings)
    assert all(row["up"] for row in lab.status(topology))
    assert reaches(topology.find("h1c1"), topology.find("h2v1").address)


def test_two_labs_are_isolated():
    """Both labs use the same addresses; each ping is answered within its own lab."""
    one, two = (
        lab.up(Settings(name=name, vms=0, containers=containers))
        for name, containers in zip(NAMES, (1, 2), strict=True)
    )
    assert reaches(one.find("h1c1"), "10.77.2.1")
    assert reaches(two.find("h1c1"), "10.77.2.2")
    assert not reaches(one.find("h1c1"), "10.77.2.2"), "there is no such container in the first"
    lab.down(two.settings.name)
    assert reaches(one.find("h1c1"), "10.77.2.1")


def test_three_hosts_on_a_wire_of_one_gigabit():
    topology = lab.up(Settings(name="test-one", hosts=3, vms=0, wire="1g"))
    for source, destination in (("h1c1", "h3c1"), ("h2c1", "h3c1"), ("h2c1", "h1c1")):
        assert reaches(topology.find(source), topology.find(destination).address)
    speed = measure.throughput(topology.hosts[0], topology.hosts[2], seconds=2)
    assert 0.7e9 < speed < 1.05e9


def test_down_leaves_nothing():
    topology = lab.up(Settings(name="test-one", vms=1))
    left_running = subprocess.run(
        [LAB, "exec", "--name", "test-one", "h1c1", "--", "sleep 1000 >/dev/null 2>&1 &"], check=True, timeout=60
    )
    assert left_running.returncode == 0
    assert len(traces(topology.settings.name)) > 5
    lab.down(topology.settings.name)
    assert traces(topology.settings.name) == []


@pytest.mark.parametrize("after_s", [0.4, 0.8, 1.2, 1.8, 2.5])
def test_down_after_up_was_killed(after_s: float):
    with subprocess.Popen([LAB, "up", "--name", "test-one"], stderr=subprocess.DEVNULL) as up:
        time.sleep(after_s)
        up.kill()
    lab.down("test-one")
    assert traces("test-one") == []


def test_up_interrupted_cleans_up():
    # Background jobs of a shell ignore SIGINT, and children inherit that; the tests may run as such a job.
    command = ["env", "--default-signal=INT", LAB, "up", "--name", "test-one"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as up:
        assert up.stderr
        assert any("booting" in line for line in up.stderr)
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=60)
    assert up.returncode == 130
    assert traces("test-one") == []


def test_a_failed_step_is_reported_and_cleaned_up(tmp_path: Path):
    (tmp_path / "vnet").symlink_to("/bin/true")
    broken = tmp_path / "vnetd"
    broken.write_text("#!/bin/sh\necho 'no luck today' >&2\nexit 1\n")
    broken.chmod(0o755)
    done = subprocess.run(
        [LAB, "up", "--name", "test-one"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "VNET_BINARIES": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "vnetd on h1 exited at once" in done.stderr
    assert "no luck today" in done.stderr, "the end of the log"
    assert traces("test-one") == []


def test_the_command_line():
    command("up", "--name", "test-one")
    status = json.loads(command("status", "--name", "test-one", "--json").stdout)
    addresses = {row["name"]: row["address"] for row in status["nodes"]}
    assert addresses == {
        **{"h1": "10.78.0.1", "h2": "10.78.0.2", "h1c1": "10.77.1.1", "h2c1": "10.77.2.1"},
        **{"h1v1": "10.77.1.101", "h2v1": "10.77.2.101"},
    }
    assert command("address", "--name", "test-one", "h2v1").stdout == "10.77.2.101\n"
    for node in ("h1", "h1c1", "h1v1"):
        assert command("exec", "--name", "test-one", node, "--", "echo", "two  words").stdout == "two  words\n"
        assert command("exec", "--name", "test-one", node, "--", "echo ouch; exit 7", status=7).stdout == "ouch\n"
    assert "h1c1" in command("exec", "--name", "test-one", "h1", "--", "vnet", "interface", "list").stdout
    assert "has no 'h9'" in command("exec", "--name", "test-one", "h9", "--", "true", status=1).stderr
    assert "is not up" in command("status", "--name", "test-two", status=1).stderr
    console = subprocess.run(
        [LAB, "console", "--name", "test-one", "h1v1"],
        check=True,
        capture_output=True,
        input=b"\rhostname\r",
        timeout=60,
    )
    assert console.stdout is not None


def test_the_lan_has_the_underlays_mtu():
    text = daemon.on_the_lan('[host]\nname = "h1"\n[[link]]\nname = "h2"\n', 9000)
    lan, host = tomllib.loads(text)["interface"][0], tomllib.loads(text)["host"]
    assert (lan["kind"], lan["mtu"], host["name"]) == ("local", 9000, "h1")
    assert "link" not in tomllib.loads(text)
