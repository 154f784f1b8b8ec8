"""Hot-plug by QEMU: devices and memory of a running guest come and go, and QEMU ends in the middle.

Nothing is left in vnetd afterwards: no descriptor, mapping or thread. Nothing is written any more into memory that is
no longer the device's: the test opens that memory, too, paints it, and finds its paint under traffic.

`vnet/tests/hot_plug.rs` does the same 1 000 times with a front end of its own, which does what QEMU does not.
VNET_TEST_PLUGS=100 runs as many cycles of each kind.
"""

import contextlib
import mmap
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from checks import assert_balanced, ping, port, settled, wait_for_path
from traffic import Pings, Stream, under_traffic

from vnetlab import guest, lab, machine, measure, process
from vnetlab.daemon import ask, vnet
from vnetlab.image import ensure_image
from vnetlab.monitor import Monitor
from vnetlab.run import LabError, run, wait_until
from vnetlab.topology import Node, Settings, Topology

PREFIX = "test-hot-plug-"
NAME = f"{PREFIX}{os.getpid()}"
"""Of this process alone: another checkout may run this test at the same time."""
SLOW = "vhost-user-slow"
"""The thread for what a guest makes slow; it starts when it is first needed, and ends with its interface."""
PLUGS = int(os.environ.get("VNET_TEST_PLUGS", "5"))
LIMIT_S = 600 + 10 * PLUGS
WAIT_S = 30
INTERVAL_S = 0.02
"""Interval of pings that an emulated guest answers on a busy machine."""
SECOND, SECOND_MAC = "second", "52:54:00:01:01:77"
"""The interface whose device is plugged."""
HERE, THERE = "10.99.0.1", "10.99.0.2"
"""Addresses of the container and of the plugged device: of a network that the guest's first device has no route to."""
DIMM_BYTES = 128 << 20
"""A memory block of Linux on x86-64: the smallest dimm that it takes."""
GUEST_MEMORY = "/memfd:memory-backend-memfd"
"""QEMU's memory in /proc/PID/maps."""
EVENTFD = "anon_inode:[eventfd]"
SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG = 5, 37, 38
"""Numbers of vhost-user requests that change a guest's memory."""
REQUEST = re.compile(r"vhost_user_write req:(\d+)")
OST_IN_PROGRESS = 0x84
"""Status of _OST in the ACPI specification: the guest is still ejecting a device."""
ON_DEMAND = {"closer", "tokio-rt-worker"}
"""Threads that vnetd starts once it needs them, and keeps."""
PAINT = b"\xc5" * (1 << 20)
CRASH = "(sleep 0.2; echo c >/proc/sysrq-trigger) >/dev/null 2>&1 &"
pytestmark = pytest.mark.timeout(LIMIT_S)


@dataclass(frozen=True)
class Holdings:
    """What vnetd holds."""

    descriptors: Counter
    """By kind: sockets, eventfds, each file."""
    files: Counter
    """Mappings of files and of guests' memory, by name."""
    threads: Counter
    """By name."""


def daemon_pid(topology: Topology) -> int:
    """The process id of vnetd."""
    return process.find(topology.hosts[0].file(".pid"))


def target(descriptor: Path) -> str:
    """What a descriptor in /proc is of; empty if it has been closed meanwhile."""
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:
        return ""


def holdings(topology: Topology) -> Holdings:
    """What vnetd holds at this moment."""
    folder = Path(f"/proc/{daemon_pid(topology)}")
    descriptors = Counter(re.sub(r"\d+", "", name) for name in map(target, (folder / "fd").iterdir()) if name)
    threads: Counter[str] = Counter()
    for thread in (folder / "task").iterdir():
        try:
            name = (thread / "comm").read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name not in ON_DEMAND:
            threads[name] += 1
    # A change of memory costs page faults: an interface may have left them to a thread of its own, one that stays.
    interfaces = sum(count for name, count in threads.items() if re.fullmatch(r"vhost-user-\d+", name))
    assert threads.pop(SLOW, 0) <= interfaces
    lines = (line.split(maxsplit=5) for line in (folder / "maps").read_text().splitlines())
    return Holdings(descriptors, Counter(parts[5] for parts in lines if len(parts) == 6), threads)


def at_rest(topology: Topology) -> Holdings:
    """What vnetd holds, once no command's connection is among it."""
    last = holdings(topology)

    def still() -> bool:
        nonlocal last
        before, last = last, holdings(topology)
        return before == last

    wait_until("vnetd to rest", still, WAIT_S, poll_s=0.3)
    return last


def assert_holds(topology: Topology, before: Holdings) -> None:
    """Waits until vnetd holds as much as before: descriptors are closed, and threads end, a moment later."""
    try:
        wait_until("vnetd to let go", lambda: holdings(topology) == before, WAIT_S)
    except LabError:
        assert holdings(topology) == before


def lent_kib(topology: Topology) -> dict[int, int]:
    """The guests' memory that vnetd maps: by inode, how many KiB of it vnetd or the kernel for it have touched."""
    lent: Counter[int] = Counter()
    inode = None
    for line in Path(f"/proc/{daemon_pid(topology)}/smaps").read_text().splitlines():
        parts = line.split()
        if "-" in parts[0]:
            inode = int(parts[4]) if GUEST_MEMORY in line else None
        elif inode is not None and parts[0] == "Rss:":
            lent[inode] += int(parts[1])
    return dict(lent)


def assert_unmapped(topology: Topology, inode: int, rest: set[int]) -> None:
    """Waits until vnetd maps a guest's memory no longer: a dispatcher may still send frames that lie in it."""
    wait_until("vnetd to unmap the dimm", lambda: inode not in lent_kib(topology), WAIT_S)
    assert set(lent_kib(topology)) == rest


@contextlib.contextmanager
def opened(vm: Node, inode: int) -> Iterator[mmap.mmap]:
    """The memory of a guest behind an inode, which stays while the test has it open."""
    descriptors = Path(f"/proc/{process.find(vm.file('.pid'))}/fd").iterdir()
    # Sockets have inodes of the same numbers.
    memories = (path for path in descriptors if GUEST_MEMORY in target(path))
    descriptor = os.open(next(path for path in memories if path.stat().st_ino == inode), os.O_RDWR)
    try:
        with mmap.mmap(descriptor, 0) as memory:
            yield memory
    finally:
        os.close(descriptor)


def paint(memory: mmap.mmap) -> None:
    """Fills memory that nobody but the test should have."""
    for at in range(0, len(memory), len(PAINT)):
        memory[at : at + len(PAINT)] = PAINT


def assert_painted(memory: mmap.mmap) -> None:
    """Asserts that nobody has written since."""
    stale = [at for at in range(0, len(memory), len(PAINT)) if memory[at : at + len(PAINT)] != PAINT]
    assert stale == [], "a write into memory that is not the device's, in the MiB at these offsets"


def requests(vm: Node) -> list[int]:
    """The changes of memory that QEMU has told its back ends since it began."""
    numbers = map(int, REQUEST.findall(vm.file(".log").read_text()))
    return [number for number in numbers if number in (SET_MEM_TABLE, ADD_MEM_REG, REM_MEM_REG)]


def start_guest(topology: Topology) -> None:
    """Boots the guest, with room for a dimm."""
    vm = topology.find("h1v1")
    words = guest.command(topology, vm, ensure_image(lab.CACHE), dimms="slots=1,maxmem=1G")
    guest.launch(vm, [*words, "-trace", "vhost_user_write"])
    guest.wait(vm)
    wait_for_path(topology.find("h1c1"), vm.address)


@dataclass
class Plugged:
    """A host with a guest, and what vnetd holds without a guest."""

    topology: Topology
    vm: Node
    container: Node
    without_guest: Holdings


def remove_killed_runs() -> None:
    """Removes labs of processes that have ended."""
    for name in lab.names():
        pid = name.removeprefix(PREFIX)
        if pid != name and not Path(f"/proc/{pid}").exists():
            lab.down(name)


@pytest.fixture(scope="module")
def plugged() -> Iterator[Plugged]:
    remove_killed_runs()
    topology = lab.prepare(Settings(name=NAME, hosts=1))
    try:
        host, container = topology.hosts[0], topology.find("h1c1")
        lab.start_daemon(topology, host)
        interface = ["--kind", "vhost-user", "--socket", str(host.file(".second")), "--mac", SECOND_MAC]
        vnet(host, "interface", "add", SECOND, *interface)
        run(["ip", "-n", container.namespace, "address", "add", f"{HERE}/24", "dev", "eth0"])
        without_guest = at_rest(topology)
        start_guest(topology)
        yield Plugged(topology, topology.find("h1v1"), container, without_guest)
    finally:
        lab.down(NAME)


def pings(plugged: Plugged) -> Pings:
    return Pings(plugged.container, plugged.vm, INTERVAL_S)


def plug_device(plugged: Plugged, monitor: Monitor) -> None:
    """Plugs the second device, and gives it its address."""
    address = {"type": "unix", "data": {"path": str(plugged.topology.hosts[0].file(".second"))}}
    monitor.ask("chardev-add", id=SECOND, backend={"type": "socket", "data": {"addr": address, "server": False}})
    monitor.ask("netdev_add", type="vhost-user", id=SECOND, chardev=SECOND)
    device = {"driver": "virtio-net-pci", "id": SECOND, "netdev": SECOND, "mac": SECOND_MAC}
    # QEMU 7.2 crashes under TCG when a vhost-user device uses MSI-X.
    monitor.ask("device_add", **device, vectors=0, romfile="")
    vm = plugged.vm
    wait_until("eth1", lambda: machine.attempt(vm, "test -e /sys/class/net/eth1")[0] == 0, WAIT_S)
    assert machine.execute(vm, "cat /sys/class/net/eth1/address").strip() == SECOND_MAC
    # Otherwise either device answers ARP requests for the other one's address.
    machine.execute(vm, "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore")
    machine.execute(vm, f"ip address add {THERE}/24 dev eth1 && ip link set eth1 up")
    wait_for_path(vm, HERE)


def unplug_device(plugged: Plugged, monitor: Monitor) -> None:
    """Unplugs the second device, once the guest has let go of it."""
    monitor.ask("device_del", id=SECOND)
    monitor.wait_for("the end of the device", lambda name, data: ends(name, data, SECOND))
    monitor.ask("netdev_del", id=SECOND)
    # A vhost-user back end takes its character device along.
    assert SECOND not in {chardev["label"] for chardev in monitor.ask("query-chardev")}
    assert machine.attempt(plugged.vm, "test -e /sys/class/net/eth1")[0] != 0


def ends(name: str, data: dict, device: str) -> bool:
    """Whether an event is the end of a device."""
    return name == "DEVICE_DELETED" and data.get("device") == device


def memory_blocks(vm: Node) -> set[str]:
    """Folders of the guest's memory blocks."""
    return set(machine.execute(vm, "ls -d /sys/devices/system/memory/memory[0-9]*").split())


def plug_memory(plugged: Plugged, monitor: Monitor, online: str) -> int:
    """Plugs a dimm and brings it online; returns the inode of its memory."""
    topology, vm = plugged.topology, plugged.vm
    before, blocks = set(lent_kib(topology)), memory_blocks(vm)
    monitor.ask("object-add", qom_type="memory-backend-memfd", id="dimm-memory", size=DIMM_BYTES, share=True)
    monitor.ask("device_add", driver="pc-dimm", id="dimm", memdev="dimm-memory")
    wait_until("vnetd to map the dimm", lambda: len(lent_kib(topology)) == len(before) + 1, WAIT_S)
    (inode,) = set(lent_kib(topology)) - before
    wait_until("the guest to see the dimm", lambda: memory_blocks(vm) != blocks, WAIT_S)
    (block,) = memory_blocks(vm) - blocks
    assert machine.execute(vm, f"echo {online} >{block}/state && cat {block}/state").strip() == "online"
    return inode


def unplug_memory(monitor: Monitor) -> bool:
    """Asks the guest for its dimm; true once it has given it back, false if it keeps it."""
    monitor.ask("device_del", id="dimm")

    def decided(name: str, data: dict) -> bool:
        refused = name == "ACPI_DEVICE_OST" and data["info"]["status"] not in (0, OST_IN_PROGRESS)
        return refused or ends(name, data, "dimm")

    given = "info" not in monitor.wait_for("the end of the dimm", decided)
    if given:
        monitor.ask("object-del", id="dimm-memory")
    return given


def assert_nothing_is_written(plugged: Plugged, memory: mmap.mmap) -> None:
    """Paints memory that is no longer the device's, and finds its paint under traffic."""
    paint(memory)
    measure.throughput(plugged.container, plugged.vm, seconds=1)
    assert_painted(memory)


def receive_into_new_memory(plugged: Plugged, inode: int) -> None:
    """Reloads the guest's driver: its new buffers lie in the dimm, because Linux takes the highest zone first."""
    vm = plugged.vm
    machine.execute(vm, "rmmod virtio_net && modprobe virtio_net && configure")
    wait_for_path(plugged.container, vm.address)
    measure.throughput(plugged.container, vm, seconds=1)
    assert lent_kib(plugged.topology)[inode] > 0, "vnetd has written into the dimm"


def test_memory_with_posted_buffers_is_kept_until_the_guest_crashes(plugged: Plugged):
    """A guest keeps memory in which its driver has buffers. When it has crashed and boots again, it gives it back.

    The first test: an emulated guest whose memory has changed often needs minutes to boot again.
    """
    topology, vm = plugged.topology, plugged.vm
    with Monitor(vm.file(".qmp")) as monitor:
        before, mapped = at_rest(topology), set(lent_kib(topology))
        inode = plug_memory(plugged, monitor, "online_kernel")
        with opened(vm, inode) as memory:
            receive_into_new_memory(plugged, inode)
            assert not unplug_memory(monitor)
            assert set(lent_kib(topology)) == {*mapped, inode}
            assert ping(plugged.container, vm.address) == (3, 3)

            console = vm.file(".console.log")
            boots = console.read_text(errors="replace").count("is ready")
            stream = Stream(plugged.container, vm, 32 << 10)
            stream.start()
            machine.execute(vm, CRASH)
            monitor.wait_for("the guest's crash", lambda name, _: name == "RESET")
            wait_until(
                "the guest to boot again",
                lambda: console.read_text(errors="replace").count("is ready") > boots,
                guest.BOOT_S,
                console,
            )
            machine.execute(plugged.container, f": >{stream.state_file(plugged.container, 'over')}")
            wait_for_path(plugged.container, vm.address)
            assert unplug_memory(monitor), "the kernel that booted has not brought it online"
            assert_unmapped(topology, inode, mapped)
            assert_nothing_is_written(plugged, memory)
        assert_holds(topology, before)
    assert_balanced(topology)


def test_a_device_is_plugged_again_and_again(plugged: Plugged):
    """Its frames pass, and those of the other device are not disturbed."""
    host, traffic = plugged.topology.hosts[0], pings(plugged)
    with under_traffic([traffic], []), Monitor(plugged.vm.file(".qmp")) as monitor:
        before = at_rest(plugged.topology)
        for _ in range(PLUGS):
            frames = port(ask(host, "stats"), "interface", SECOND)
            plug_device(plugged, monitor)
            assert ping(plugged.vm, HERE) == (3, 3)
            assert ping(plugged.container, THERE, "-s", "1400") == (3, 3)
            during = holdings(plugged.topology)
            assert during.files[f"{GUEST_MEMORY} (deleted)"] == 2 * before.files[f"{GUEST_MEMORY} (deleted)"]
            assert during.descriptors[EVENTFD] > before.descriptors[EVENTFD]
            unplug_device(plugged, monitor)
            assert_holds(plugged.topology, before)
            now = port(ask(host, "stats"), "interface", SECOND)
            assert min(now[key] - frames[key] for key in ("in_frames", "out_frames")) >= 6
    assert traffic.lost() == 0
    assert_balanced(plugged.topology)


def test_memory_is_plugged_again_and_again(plugged: Plugged):
    """QEMU adds and removes a region, and the guest sends from it."""
    topology, vm, traffic = plugged.topology, plugged.vm, pings(plugged)
    with under_traffic([traffic], []), Monitor(vm.file(".qmp")) as monitor:
        before, mapped, asked = at_rest(topology), set(lent_kib(topology)), len(requests(vm))
        for _ in range(PLUGS):
            inode = plug_memory(plugged, monitor, "online_movable")
            assert set(lent_kib(topology)) == {*mapped, inode}
            with opened(vm, inode) as memory:
                # A file in the guest's memory goes to the new one, and is sent from there: by sendfile.
                measure.throughput(vm, plugged.container, "--zerocopy", seconds=1)
                assert lent_kib(topology)[inode] > 0, "vnetd has read from the dimm"
                assert unplug_memory(monitor)
                assert_unmapped(topology, inode, mapped)
                assert_nothing_is_written(plugged, memory)
            assert_holds(topology, before)
    assert requests(vm)[asked:] == [ADD_MEM_REG, REM_MEM_REG] * PLUGS
    assert traffic.lost() == 0
    assert_balanced(topology)


def test_qemu_is_killed_while_frames_flow(plugged: Plugged):
    """With a second device and a dimm: vnetd lets go of everything, and serves the next QEMU."""
    topology, vm, host = plugged.topology, plugged.vm, plugged.topology.hosts[0]
    with Monitor(vm.file(".qmp")) as monitor:
        plug_device(plugged, monitor)
        receive_into_new_memory(plugged, plug_memory(plugged, monitor, "online_kernel"))
    (first, second) = lent_kib(topology)
    with opened(vm, first) as memory, opened(vm, second) as more:
        stream = Stream(plugged.container, vm, 32 << 10)
        stream.start()
        os.kill(process.find(vm.file(".pid")), signal.SIGKILL)
        assert_holds(topology, plugged.without_guest)
        for each in (memory, more):
            paint(each)
        # Nobody answers: these are ARP requests, and what the stream repeats.
        assert ping(plugged.container, vm.address, patience=1)[1] == 0
        assert ping(plugged.container, THERE, patience=1)[1] == 0
        for each in (memory, more):
            assert_painted(each)
    machine.execute(plugged.container, f": >{stream.state_file(plugged.container, 'over')}")
    assert_balanced(topology)
    assert {each["name"] for each in settled(host)["ports"]} >= {vm.name, SECOND}
    start_guest(topology)
    assert ping(plugged.container, vm.address) == (3, 3)
