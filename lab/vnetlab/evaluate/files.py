"""Files (paper 002, figure 2): new files written and read in records of 1 MiB, as IOZone does, by fio.

"cold" writes until the data is on the disk, and reads what the page cache does not have; "warm" leaves both to the page
cache. A guest has less free memory than the largest files.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vnetlab import guest, lab, machine, process
from vnetlab.bench.case import Case, Turn
from vnetlab.bench.contenders import absent
from vnetlab.bench.result import Sample
from vnetlab.evaluate.options import EvaluateOptions
from vnetlab.image import GUEST, ensure_image
from vnetlab.run import LabError, run
from vnetlab.topology import Kind, Node, Settings, Topology

MEBIBYTES = (1, 8, 64, 512)
CACHES = ("cold", "warm")
FIO_S = 300
DISK_BYTES = 768 << 20
RECIPE = replace(GUEST, modules=(*GUEST.modules, "virtio_blk", "ext4"), tools=(*GUEST.tools, "fio"), memory="512M")
ROOT, OVERLAY, VIRTIO = "root disk", "overlayfs", "virtio-blk"


@dataclass(frozen=True)
class Place:
    """A folder of a machine."""

    node: Node
    folder: Path


Opener = Callable[[Topology, Path], Iterator[Place]]


def files(options: EvaluateOptions) -> list[Case]:
    """File sizes, with a cold and a warm cache, on every kind of storage."""
    settings = Settings(name=options.lab, hosts=1, vms=1, containers=0)
    sizes = MEBIBYTES[1:2] if options.quick else MEBIBYTES
    return [
        Case({"MiB": size, "cache": cache}, settings, [_turn(name, opener, size, cache) for name, opener in STORAGE])
        for size in sizes
        for cache in CACHES
    ]


def _turn(name: str, opener: Opener, mebibytes: int, cache: str) -> Turn:
    def take(topology: Topology) -> Sample:
        # The lab's own folder is in memory.
        scratch = lab.CACHE / f"{topology.settings.name}.files"
        run(["rm", "-rf", str(scratch)])
        scratch.mkdir(parents=True)
        try:
            with contextmanager(opener)(topology, scratch) as place:
                return measure(place, mebibytes, cold=cache == CACHES[0])
        finally:
            run(["rm", "-rf", str(scratch)])

    return Turn(name, lambda: absent("fio", "fio"), take)


def measure(place: Place, mebibytes: int, *, cold: bool) -> Sample:
    """Rates of writing a new file and of reading it."""
    file = place.folder / "file"
    write = ["--rw=write", f"--end_fsync={int(cold)}"]
    # The first read after an invalidation comes from the disk, every other one from the cache.
    read = ["--rw=read", f"--invalidate={int(cold)}", f"--pre_read={int(not cold)}"]
    rates = {}
    machine.execute(place.node, "rm", "-f", str(file))
    for way, options in (("write", write), ("read", read)):
        words = ["fio", "--name=file", f"--filename={file}", "--ioengine=psync", "--bs=1m", f"--size={mebibytes}m"]
        text = machine.execute(place.node, *words, *options, "--thread", "--output-format=json", timeout_s=FIO_S)
        rates[f"{way}_bytes_per_s"] = fio_rate(text, way, synced=cold and way == "write")
    return rates


def fio_rate(text: str, way: str, *, synced: bool = False) -> float:
    """Bytes per second from fio's report, which may follow warnings; raises LabError if there is none."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        records = job[way]["total_ios"] * job[way]["lat_ns"]["mean"] / 1e9
        # The runtime has whole milliseconds only, but includes the fsync.
        seconds = max(records, job["job_runtime"] / 1000) if synced else records
        return job[way]["io_bytes"] / seconds
    except (ValueError, LookupError, ZeroDivisionError) as error:
        raise LabError(f"fio gave no figures: {text.strip()[-200:]}") from error


def _on_root_disk(topology: Topology, scratch: Path) -> Iterator[Place]:
    """A folder of the host."""
    yield Place(topology.hosts[0], scratch)


def _on_overlay(topology: Topology, scratch: Path) -> Iterator[Place]:
    """An overlay on folders of the host, as containers have it."""
    folders = {name: scratch / name for name in ("lower", "upper", "work", "merged")}
    for folder in folders.values():
        folder.mkdir()
    options = ",".join(f"{name}dir={folders[name]}" for name in ("lower", "upper", "work"))
    run(["mount", "-t", "overlay", "overlay", "-o", options, str(folders["merged"])])
    try:
        yield Place(topology.hosts[0], folders["merged"])
    finally:
        run(["umount", str(folders["merged"])])


def _on_virtio(topology: Topology, scratch: Path) -> Iterator[Place]:
    """A virtual machine's disk, a file of the host."""
    node = topology.machines(Kind.VM)[0]
    disk = scratch / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    run(["mkfs.ext4", "-q", "-E", "lazy_itable_init=0", str(disk)])
    image = ensure_image(lab.CACHE, RECIPE)
    words = guest.command(topology, node, image, ["-netdev", "hubport,id=net,hubid=0"], msix=True)
    words += ["-drive", f"file={disk},if=virtio,format=raw,cache=none"]
    try:
        guest.launch(node, words)
        guest.wait(node)
        machine.execute(node, "modprobe virtio_blk; mkdir -p /disk && mount -t ext4 /dev/vda /disk")
        yield Place(node, Path("/disk"))
    finally:
        process.stop(node.file(".pid"))


STORAGE: tuple[tuple[str, Opener], ...] = ((ROOT, _on_root_disk), (OVERLAY, _on_overlay), (VIRTIO, _on_virtio))
