"""The Debian package: installed, upgraded and purged on a bare Debian 12 that runs systemd."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from vnetlab.daemon import REPOSITORY, binaries
from vnetlab.run import run

DEBIAN = REPOSITORY / ".cache" / "debian-12"
"""A bare Debian 12, made once. Machines see it below a file system in memory and leave it unchanged."""
TRIAL = Path(__file__).parent / "programs" / "package_trial"


def bare_debian() -> Path:
    if not DEBIAN.exists():
        new = DEBIAN.with_suffix(f".{os.getpid()}")
        packages = "--include=systemd,systemd-sysv,dbus,man-db"
        run(["debootstrap", "--variant=minbase", packages, "bookworm", str(new)], timeout_s=600)
        new.rename(DEBIAN)
    return DEBIAN


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package twice: an old and a new revision."""
    folder = tmp_path_factory.mktemp("packages")
    old, new, files = folder / "old.deb", folder / "new.deb", folder / "files"
    run([str(REPOSITORY / "packaging/deb/build"), binaries().name, str(old), "--compress-type", "gz"], timeout_s=300)
    run(["dpkg-deb", "--raw-extract", str(old), str(files)])
    control = files / "DEBIAN" / "control"
    control.write_text(re.sub("^Version: .*$", r"\g<0>.1", control.read_text(), flags=re.MULTILINE))
    run(["dpkg-deb", "--build", "-Zgzip", "-z1", str(files), str(new)], timeout_s=120)
    return folder


def test_the_package_has_what_it_promises(packages: Path):
    listed = run(["dpkg-deb", "--contents", str(packages / "old.deb")])
    files = {line.split()[5].removeprefix(".") for line in listed.splitlines()}
    assert files >= {
        "/usr/bin/vnet",
        "/usr/sbin/vnetd",
        "/usr/lib/systemd/system/vnetd.service",
        "/usr/lib/sysusers.d/vnet.conf",
        "/usr/share/man/man8/vnetd.8.gz",
        "/usr/share/man/man1/vnet.1.gz",
        "/usr/share/man/man1/vnet-interface-set.1.gz",
        "/usr/share/bash-completion/completions/vnet",
        "/usr/share/zsh/vendor-completions/_vnet",
        "/usr/share/fish/vendor_completions.d/vnet.fish",
        "/usr/share/doc/vnet/examples/vnet.toml",
        # The interconnect: for programs in C, for MPI, for virtual machines.
        "/usr/include/vnet_rdma.h",
        "/usr/lib/libvnet_rdma.so",
        "/usr/lib/libfabric/libvnet-fi.so",
        "/usr/bin/vnet-rdma-perf",
        "/usr/sbin/vnet-rdma-guest",
        "/usr/share/vnet/wireshark/vnet.lua",
    }, listed
    assert not any(name.startswith("/etc") for name in files), listed


def test_install_upgrade_and_purge(packages: Path):
    machine = ["systemd-nspawn", "--quiet", "--boot", "--register=no", "--keep-unit", "--private-network"]
    machine += [f"--directory={bare_debian()}", "--volatile=overlay", f"--machine=vnet-package-{os.getpid()}"]
    machine += ["--bind=/dev/net/tun", "--capability=all", "--system-call-filter=bpf"]
    machine += [f"--bind-ro={packages}:/packages", f"--bind-ro={TRIAL}:/trial"]
    trial = ["systemd.run=/trial", "systemd.run_success_action=exit", "systemd.run_failure_action=exit"]
    done = subprocess.run(
        [*machine, *trial],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
