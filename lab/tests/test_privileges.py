"""Privilege separation: the capabilities of vnetd and of its helper, and what either does without the other."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import standalone

from vnetlab.run import run, wait_until

ONLY_THE_HELPERS = {"sys_admin": 21, "sys_ptrace": 19, "dac_override": 1, "setuid": 7, "kill": 5}
"""Capabilities by their bits (linux/capability.h)."""
KEPT = {"net_admin": 12, "net_raw": 13, "bpf": 39}


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process with all capabilities, in a network namespace of its own: finding that takes CAP_SYS_PTRACE."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as made:
        own = Path("/proc/self/ns/net").stat().st_ino
        wait_until("the namespace", lambda: Path(f"/proc/{made.pid}/ns/net").stat().st_ino != own, 60)
        run([*inside(made), "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1"])
        yield made
        made.kill()


def inside(process: subprocess.Popen) -> list[str]:
    """A command in the process's network namespace."""
    return ["nsenter", f"--net=/proc/{process.pid}/ns/net"]


def capabilities(pid: int, which: str = "CapPrm") -> int:
    """A capability set of a process."""
    return int(re.search(rf"^{which}:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1], 16)


def helper_of(pid: int) -> int:
    """The helper of a vnetd."""
    (helper,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(helper)


def interfaces(process: subprocess.Popen) -> str:
    """Interfaces in a namespace that has no name."""
    return (
        f'[[interface]]\nname = "v1"\nkind = "veth"\ndevice = "vnet0"\nnetns = "pid:{process.pid}"\n'
        f'[[interface]]\nname = "t1"\nkind = "tap"\ndevice = "vnet1"\nnetns = "pid:{process.pid}"\n'
        f'[[interface]]\nname = "l1"\nkind = "local"\ndevice = "d0"\nnetns = "pid:{process.pid}"\n'
    )


def test_vnetd_has_few_capabilities_and_its_helper_hears_vnetd_only(tmp_path: Path, process: subprocess.Popen):
    """Every kind of interface opens in a namespace that only the helper can find and enter."""
    with standalone.vnetd(tmp_path, more=interfaces(process)) as vnetd:
        helper = helper_of(vnetd.pid)
        for task in Path(f"/proc/{vnetd.pid}/task").iterdir():
            text = (task / "status").read_text()
            assert "NoNewPrivs:\t1" in text
            assert "Seccomp:\t2" in text
        for which in ("CapPrm", "CapEff", "CapInh"):
            for name, bit in ONLY_THE_HELPERS.items():
                assert not capabilities(vnetd.pid, which) >> bit & 1, f"{which} {name}"
        for bit in KEPT.values():
            assert capabilities(vnetd.pid) >> bit & 1
        assert capabilities(helper) >> ONLY_THE_HELPERS["sys_admin"] & 1
        assert "Seccomp:\t2" in Path(f"/proc/{helper}/status").read_text()
        # It listens to vnetd only: one socket, and standard error.
        files = [str(file.readlink()) for file in Path(f"/proc/{helper}/fd").iterdir()]
        assert sum(name.startswith("socket:") for name in files) <= 2, files
        assert not any("vnet.sock" in name or "tun" in name or "bpf" in name for name in files), files
        shown = vnetd.get("/v1/interfaces")
        assert {each["name"] for each in shown} == {"v1", "t1", "l1"}
        links = run([*inside(process), "ip", "-brief", "link"])
        assert {"vnet0", "vnet1"} <= {line.split()[0].split("@")[0] for line in links.splitlines()}, links
    wait_until("the helper to end with vnetd", lambda: not Path(f"/proc/{helper}").exists(), 60)


def test_a_vnetd_without_helper_says_so_and_goes_on(tmp_path: Path, process: subprocess.Popen):
    with standalone.vnetd(tmp_path, more=interfaces(process)) as vnetd:
        os.kill(helper_of(vnetd.pid), signal.SIGKILL)
        added = vnetd.vnet(
            "interface", "add", "t2", "--kind", "tap", "--device", "vnet2", "--netns", f"pid:{process.pid}"
        )
        assert "privileged helper has ended; restart vnetd" in added.stdout + added.stderr + vnetd.log
        assert vnetd.get("/v1/status")


def test_a_killed_vnetd_leaves_no_helper(tmp_path: Path):
    helpers = []

    def killed() -> None:
        with standalone.vnetd(tmp_path) as vnetd:
            helpers.append(helper_of(vnetd.pid))
            os.kill(vnetd.pid, signal.SIGKILL)

    with pytest.raises(AssertionError):
        killed()
    wait_until("the helper to end", lambda: not Path(f"/proc/{helpers[0]}").exists(), 60)
