"""Describes the machine and the versions of all measured programs."""

import os
import re
import subprocess
from pathlib import Path

from vnetlab import daemon
from vnetlab.run import LabError, run
from vnetlab.underlay import CONGESTION_CONTROL

SOURCES = (
    *("Cargo.toml", "Cargo.lock", "vnet", "vnet-control", "vnetd", "vnet-cli", "interconnect", "fabric"),
    *("lab/workloads", "lab/vnetlab"),
    # Modules that only write and draw reports.
    *(
        f":(exclude)lab/vnetlab/evaluate/{name}.py"
        for name in ("bars", "entries", "papers", "ratios", "reasons", "report")
    ),
    *(f":(exclude)lab/vnetlab/bench/{name}.py" for name in ("bars", "plot", "report")),
)
"""What figures depend on: sources of the measured programs, and what measures them. Pathspecs of git."""
PACKAGES = (
    "iperf3",
    "iputils-ping",
    "sockperf",
    "openmpi-bin",
    "netpipe-openmpi",
    "hpcc",
    "fio",
    "tinc",
    "nebula",
    "openvswitch-switch-dpdk",
    "dpdk-dev",
    "qemu-system-x86",
    "etcd-server",
)


def machine() -> dict[str, str]:
    """This machine: processor, kernel, and settings that can make figures fluctuate."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    memory_kib = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
    uname = os.uname()
    return {
        "processor": re.search(r"model name\s*: (.*)", cpuinfo)[1],
        "cores": str(os.cpu_count()),
        "clock": f"{clock_hz() / 1e6:.0f} MHz",
        "memory": f"{memory_kib / 2**20:.0f} GiB",
        "kernel": f"{uname.sysname} {uname.release}",
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "none (fixed, or the hypervisor's)"),
        "TCP": CONGESTION_CONTROL,
        "virtual": "yes" if " hypervisor" in cpuinfo else "no",
        "system": re.search(r'PRETTY_NAME="(.*)"', Path("/etc/os-release").read_text())[1],
    }


def clock_hz() -> float:
    """Frequency of the time stamp counter, if the kernel reports it."""
    return float(re.search(r"cpu MHz\s*: ([\d.]+)", Path("/proc/cpuinfo").read_text())[1]) * 1e6


def versions() -> dict[str, str]:
    """Versions of vnet, the kernel and all installed contenders and tools."""
    found = {"vnet": _vnet(), "kernel VXLAN": os.uname().release}
    for package in PACKAGES:
        asked = subprocess.run(
            ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", package],
            check=False,
            capture_output=True,
            text=True,
        )
        state, _, version = asked.stdout.partition(" ")
        found[package] = version if state == "installed" else "not installed"
    return found


def _vnet() -> str:
    """The version of vnetd, and the last commit that changed what figures depend on (SOURCES)."""
    version = run([str(daemon.binaries() / "vnetd"), "--version"]).strip()
    git = ["git", "-C", str(daemon.REPOSITORY)]
    try:
        revision = run([*git, "log", "-1", "--format=%h", "--", *SOURCES]).strip()
        changed = run([*git, "status", "--porcelain", "--", *SOURCES]).strip()
    except LabError:
        return version
    return f"{version} ({revision}{'-dirty' if changed else ''})"


def _read(path: str, otherwise: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return otherwise
