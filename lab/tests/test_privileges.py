"""Privilege separation: the capabilities of vnetd and of its helper, and what either does without the other."""

import os
import platform
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import standalone
from kernel_host import Host

from vnetlab.run import run, wait_until

ONLY_THE_HELPERS = {"sys_admin": 21, "sys_ptrace": 19, "dac_override": 1, "setuid": 7, "kill": 5}
"""Capabilities by their bits (linux/capability.h)."""
ONLY_THE_HELPERS |= {"net_raw": 13, "sys_resource": 24, "perfmon": 38}
if tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2]) >= (5, 19):
    ONLY_THE_HELPERS["bpf"] = 39
KEPT = {"net_admin": 12, "sys_nice": 23, "ipc_lock": 14, "chown": 0, "net_bind_service": 10}


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


def assert_few(vnetd: int, helper: int) -> None:
    """Asserts that each thread of vnetd has only what it needs, and its helper all that vnetd was started with."""
    for task in Path(f"/proc/{vnetd}/task").iterdir():
        for which in ("CapPrm", "CapEff", "CapInh"):
            for name, bit in ONLY_THE_HELPERS.items():
                assert not capabilities(int(task.name), which) >> bit & 1, f"{which} {name}"
    for name, bit in KEPT.items():
        assert capabilities(vnetd) >> bit & 1, name
    own = capabilities(os.getpid())
    assert own >> ONLY_THE_HELPERS["sys_admin"] & 1
    assert capabilities(helper) == own


def files(pid: int) -> list[str]:
    """What a process's descriptors are."""
    return [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]


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
        assert_few(vnetd.pid, helper)
        assert "Seccomp:\t2" in Path(f"/proc/{helper}/status").read_text()
        # It listens to vnetd only: one socket, and standard error.
        opened = files(helper)
        assert sum(name.startswith("socket:") for name in opened) <= 2, opened
        assert not any("vnet.sock" in name or "tun" in name for name in opened), opened
        shown = vnetd.get("/v1/interfaces")
        assert {each["name"] for each in shown} == {"v1", "t1", "l1"}
        links = run([*inside(process), "ip", "-brief", "link"])
        assert {"vnet0", "vnet1"} <= {line.split()[0].split("@")[0] for line in links.splitlines()}, links
    wait_until("the helper to end with vnetd", lambda: not Path(f"/proc/{helper}").exists(), 60)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A vnetd with two containers in a network namespace of its own."""
    prefix = f"pr{os.getpid()}"
    namespaces = [f"{prefix}{name}" for name in ("h", "a", "b")]
    text = f'[host]\nname = "h1"\n[control]\nsocket = "{tmp_path}/control.sock"\n[bridge]\nlisten = "127.0.0.1:0"\n'
    text += f'[dispatch]\nbpffs = "{tmp_path}/bpf"\n'
    for name, namespace in zip(("one", "two"), namespaces[1:], strict=True):
        text += f'[[interface]]\nname = "{name}"\nkind = "veth"\ndevice = "eth0"\nnetns = "{namespace}"\n'
    (tmp_path / "vnet.toml").write_text(text)
    host = Host(namespaces[0], tmp_path)
    host.mount_bpffs()
    try:
        for namespace in namespaces:
            run(["ip", "netns", "add", namespace])
        run(["ip", "-n", host.namespace, "link", "set", "lo", "up"])
        host.start()
        for number, namespace in enumerate(namespaces[1:], 1):
            run(["ip", "-n", namespace, "address", "add", f"10.79.0.{number}/24", "dev", "eth0"])
        yield host
    finally:
        if host.daemon and host.daemon.poll() is None:
            host.end(signal.SIGTERM)
        for namespace in namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
        host.unmount_bpffs()


def test_the_kernel_path_works_without_the_capabilities_that_load_programs(host: Host):
    """The helper has loaded the programs; vnetd has only their maps, and installs flows in them."""
    vnetd = host.daemon.pid
    helper = helper_of(vnetd)
    ping = ["ip", "netns", "exec", f"pr{os.getpid()}a", "ping", "-n", "-q", "-i", "0.01", "10.79.0.2"]
    run([*ping, "-c", "5", "-w", "30"])
    moved = host.grows(300, lambda: run([*ping, "-c", "300"]))
    assert moved[1] < 30, "known flows stay in the kernel"
    assert {port["path"] for port in host.ask("interface", "list")} == {"kernel"}
    assert len(host.ask("flows")) >= 2
    assert_few(vnetd, helper)
    opened = files(vnetd)
    assert any("bpf-map" in name for name in opened), opened
    assert not any("bpf-prog" in name for name in opened), opened
    # A link that the helper holds would outlive a vnetd that is killed for a moment.
    opened = files(helper)
    assert any("bpf-prog" in name for name in opened), opened
    assert not any("bpf_link" in name or "bpf-link" in name for name in opened), opened
    # Programs are attached and detached later, too.
    host.vnet("interface", "add", "three", "--kind", "veth", "--device", "eth1", "--netns", f"pr{os.getpid()}b")
    assert [port["path"] for port in host.ask("interface", "list")] == ["kernel"] * 3
    host.vnet("interface", "del", "three")
    run([*ping, "-c", "5"])


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
