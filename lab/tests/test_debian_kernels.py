"""The kernel's own path on Debian's kernels: vnetd and two containers run in an emulated guest.

Uses Debian 12's own kernel; with VNET_LAB_KERNELS=1 (`make kernels`) also the newer kernel of its security archive and
that of Debian 11. The newer one has netkit. Each guest also runs two hosts; before Linux 6.6 all frames of their wire
take the VXLAN device.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from vnetlab import daemon, lab
from vnetlab.guest import KERNEL_OPTIONS, QEMU, accelerator
from vnetlab.image import INIT, Recipe, ensure_image
from vnetlab.run import run

KERNELS = {"6.1": ("linux-image-cloud-amd64", "")}
"""Package and Debian release by version."""
if "VNET_LAB_KERNELS" in os.environ:
    # Optional, because each takes a 40 MB download and another minute.
    KERNELS["6.12"] = ("linux-image-6.12-cloud-amd64", "")
    KERNELS["5.10"] = ("linux-image-cloud-amd64", "bullseye")
MODULES = ("veth", "tun", "sch_ingress", "cls_bpf", "vxlan", "8021q")
PAIRS = {"6.12": ["netkit", "netkit", "veth"]}
"""Which pairs connect the containers, where not all are veth."""
MAKES_DATAGRAMS = (6, 6)
"""Since then programs make and take the wire's datagrams themselves, past its device."""
END_S = 600
"""Time limit; an emulated guest needs about a tenth of it."""
BYTES = 20 << 20
SEGMENTS = BYTES // 1448
"""TCP segments of the containers' MTU that carry these bytes."""


def frames(stats: dict) -> tuple[int, int]:
    """Frames received from the first container, and frames that dispatchers have forwarded; checks the balance."""
    ports = stats["ports"]
    drops = sum(sum(port["drops"].values()) for port in ports)
    total = {key: sum(port[key] for port in ports) for key in ("in_frames", "copies", "out_frames")}
    assert total["in_frames"] + total["copies"] == total["out_frames"] + drops
    (first,) = (port for port in ports if port["name"] == "c1")
    return first["in_frames"], sum(dispatcher["frames"] for dispatcher in stats["dispatchers"])


def by_vnetd(found: dict[str, str], name: str) -> int:
    """Frames that dispatchers have forwarded between the results "before-NAME" and "after-NAME"."""
    before, after = (frames(json.loads(found[f"{when}-{name}"]))[1] for when in ("before", "after"))
    return after - before


def carried(found: dict[str, str], name: str) -> int:
    """Frames that the first host's wire device had carried at the result "device-NAME"."""
    (link,) = json.loads(found[f"device-{name}"])
    return link["stats64"]["rx"]["packets"] + link["stats64"]["tx"]["packets"]


def paths(interfaces: str) -> list[tuple[str, str]]:
    """The path of each interface, and the pair that connects its container."""
    return [(port["path"], port["pair"]) for port in json.loads(interfaces)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """The programs without debug information: a guest keeps its files in memory."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("vnetd", "vnet"):
        run(["strip", "-o", str(folder / name), str(daemon.binaries() / name)])
    return folder / "vnetd", folder / "vnet"


@pytest.mark.parametrize("version", KERNELS)
def test_the_kernel_forwards(version: str, programs: tuple[Path, ...], tmp_path: Path):
    tools = ("ip", "ping", "iperf3")
    package, suite = KERNELS[version]
    recipe = Recipe(package, suite, INIT.with_name("kernel-path"), MODULES, tools, programs)
    image = ensure_image(lab.CACHE, recipe, tmp_path)
    words = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-machine", "pc", *accelerator()]
    words += ["-m", "512M", "-serial", "stdio", "-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
    words += ["-append", f"{KERNEL_OPTIONS} rdinit=/init"]
    done = subprocess.run(
        words, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=END_S
    )
    text = done.stdout.decode(errors="replace")
    found = dict(re.findall(r"^vnet-lab: (\S+) ?(.*?) *\r?$", text, re.MULTILINE))
    assert "end" in found, text[-5000:]
    assert found["kernel"].startswith(f"{version}."), found["kernel"]
    wanted = [("kernel", pair) for pair in PAIRS.get(version, ["veth"] * 3)]
    assert paths(found["interfaces"]) == wanted, text[-5000:]
    assert "200 received" in found["pings"]
    for name in [name for name in found if name.startswith("received")]:
        # iperf3 exits when all data is sent, and reports the data that has arrived by then.
        assert int(re.search(r"\d+", found[name])[0]) >= BYTES / 2, name
    before, pinged, streamed = (frames(json.loads(found[name])) for name in ("before", "after-pings", "after-tcp"))
    assert pinged[0] - before[0] >= 200
    assert pinged[1] - before[1] < 40, "what ARP and IPv6 need, and no more"
    assert streamed[0] - pinged[0] >= BYTES / 2 / 65536
    assert streamed[1] - pinged[1] < (streamed[0] - pinged[0]) / 2
    assert "50 received" in found["pings-without"], text[-5000:]
    assert paths(found["interfaces-again"]) == wanted
    assert found["addresses"] == "1"
    assert "50 received" in found["pings-again"], text[-5000:]
    assert frames(json.loads(found["after-restart"]))[1] < 60, "the kernel forwards again"
    assert (found["status"], found["devices-left"]) == ("0", "0"), text[-5000:]
    for number in (1, 2):
        assert "50 received" in found[f"pings-veth-{number}"], text[-5000:]
        # What ARP and IPv6 need, and no more.
        assert by_vnetd(found, f"veth-{number}") < 40
    (pair, *_) = PAIRS.get(version, ["veth"])
    assert paths(found["wire-interfaces"]) == [("kernel", pair)], text[-5000:]
    assert [link["path"] for link in json.loads(found["links"])] == ["kernel"], text[-5000:]
    assert "100 received" in found["pings-wire"], text[-5000:]
    assert by_vnetd(found, "wire") < 100, text[-5000:]
    # Trials take the device on every kernel.
    by_device = carried(found, "after-pings") - carried(found, "before-pings")
    if tuple(map(int, version.split("."))) < MAKES_DATAGRAMS:
        assert by_device >= 140, "requests and answers that vnetd has not sent"
    streamed = (frames(json.loads(found[name])) for name in ("after-wire", "after-wire-tcp"))
    passed, moved = (after - before for before, after in zip(*streamed, strict=True))
    assert passed >= BYTES / 2 / 65536
    assert moved < passed / 2
    # The containers' MTU is the underlay's: each segment would leave in two fragments.
    for before, after in ("fragments", "fragments-after-tcp"), ("fragments-before-tagged", "fragments-after-tagged"):
        assert int(found[after]) - int(found[before]) < SEGMENTS / 5, after
    assert carried(found, "after-tagged") - carried(found, "before-tagged") >= BYTES / 2 / 65536
