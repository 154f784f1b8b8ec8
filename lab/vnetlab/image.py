"""The files that a lab guest boots: a stock Debian cloud kernel and a small initramfs.

The kernel comes from the Debian package, unpacked but not installed. The initramfs contains busybox, some of the
kernel's own modules, and the tests' tools with their libraries, copied from this machine. Both are cached under a name
derived from all inputs, so that later runs reuse them, and a changed package yields new ones.
"""

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vnetlab.run import LabError, progress, run

KERNEL_PACKAGE = "linux-image-cloud-amd64"
MODULES = ("virtio_pci", "virtio_net")
TOOLS = ("iperf3", "ping", "tcpdump", "ethtool")
PASSWD = b"root:x:0:0:root:/root:/bin/sh\ntcpdump:x:1:1::/:/bin/false\n"
"""tcpdump drops root privileges to its own user."""
OPEN_MPI = ("openmpi-bin", "openmpi-common", "libopenmpi3", "libpmix2")
"""Debian packages of Open MPI."""
OPEN_MPI_PARTS = (
    "bin/orted",
    "/openmpi3/mca_",
    "/lib/pmix/",
    "/etc/openmpi/",
    "/etc/pmix",
    "/share/openmpi/",
    "/share/pmix/",
)
"""Parts of paths of what Open MPI opens while it runs. Libraries come with the programs that are linked to them."""
OTHER_HARDWARE = ("psm", "ucx", "uct", "openib", "usnic")
INIT = Path(__file__).parent.parent / "guest" / "init"


@dataclass(frozen=True)
class Recipe:
    """The contents of an image."""

    package: str = KERNEL_PACKAGE
    """Debian package that depends on the latest version of the kernel."""
    suite: str = ""
    """Debian release to take the kernel from; empty for that of this machine."""
    init: Path = INIT
    modules: tuple[str, ...] = MODULES
    tools: tuple[str, ...] = TOOLS
    programs: tuple[Path, ...] = ()
    """Programs in addition to the tools."""
    files: tuple[Path, ...] = ()
    """Further files, which have the same path in the guest."""
    memory: str = "256M"
    """Memory of a guest that boots the image: the archive and its unpacked files need twice the image's size."""


GUEST = Recipe()
"""The guests of labs."""


def with_open_mpi(recipe: Recipe, *files: Path) -> Recipe:
    """A recipe with Open MPI added, from the files of this machine's packages, and further files."""
    mpirun = _tool("mpirun")
    listed = [
        line for line in run(["dpkg", "-L", *OPEN_MPI]).splitlines() if any(part in line for part in OPEN_MPI_PARTS)
    ]
    paths = [Path(line) for line in listed if not any(part in line for part in OTHER_HARDWARE)]
    found = [path for path in paths if path.is_file()]
    return replace(recipe, files=(*recipe.files, *found, *files), programs=(*recipe.programs, mpirun), memory="512M")


@dataclass(frozen=True)
class Image:
    """Files to start a guest with."""

    kernel: Path
    initramfs: Path
    memory: str = "256M"
    """Memory of the guest."""


def ensure_image(cache: Path, recipe: Recipe = GUEST, folder: Path | None = None) -> Image:
    """The guest's kernel and initramfs, built in `cache` if missing; the initramfs in `folder` instead, if given.

    Of labs that start at the same time, one builds the image and the others wait.

    Raises LabError if the kernel cannot be downloaded or a tool is not installed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "image.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        release, tree = _ensure_kernel(cache, recipe)
        return _ensure_initramfs(folder or cache, recipe, release, tree)


def _ensure_initramfs(cache: Path, recipe: Recipe, release: str, tree: Path) -> Image:
    """The initramfs's image, built if missing, with the lock held."""
    files = dict(_files(recipe, tree, release))
    digest = hashlib.sha256()
    for name, (mode, content) in sorted(files.items()):
        digest.update(f"{name} {mode} {len(content)} ".encode() + content)
    initramfs = cache / f"initramfs-{digest.hexdigest()[:16]}.cpio"
    if not initramfs.exists():
        _replace(initramfs, cpio((name, mode, content) for name, (mode, content) in sorted(files.items())))
    return Image(tree / "boot" / f"vmlinuz-{release}", initramfs, recipe.memory)


def cpio(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Builds an archive in the kernel's "newc" format (Documentation/driver-api/early-userspace/buffer-format.rst).

    An entry is a path without a leading slash, a mode with its file type, and the content (a symbolic link's target).
    Parent directories must come first.
    """
    out = bytearray()

    def append(name: str, mode: int, content: bytes, inode: int) -> None:
        encoded = name.encode() + b"\0"
        fields = (inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
        out.extend(b"070701" + b"".join(b"%08X" % field for field in fields) + encoded)
        out.extend(bytes(-len(out) % 4))
        out.extend(content)
        out.extend(bytes(-len(out) % 4))

    inode = 0
    for inode, (name, mode, content) in enumerate(entries, 1):
        append(name, mode, content, inode)
    append("TRAILER!!!", 0, b"", inode + 1)
    return bytes(out)


def _ensure_kernel(cache: Path, recipe: Recipe) -> tuple[str, Path]:
    """The release ("6.1.0-NN-cloud-amd64") that the recipe's package depends on, and its unpacked tree."""
    options = _apt_options(cache, recipe.suite) if recipe.suite else []
    try:
        return _unpacked_kernel(cache, recipe.package, options)
    except LabError as error:
        progress(f"{error}; asking Debian for its newest packages")
        run(["apt-get", *options, "update"], timeout_s=300)
        return _unpacked_kernel(cache, recipe.package, options)


def _apt_options(cache: Path, suite: str) -> list[str]:
    """Options of apt for another Debian release: lists of its own, so that this machine never installs from there."""
    folder = cache / f"apt-{suite}"
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources = folder / "sources.list"
    sources.write_text(f"deb [arch=amd64 signed-by={key}] http://deb.debian.org/debian {suite} main\n")
    paths = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder,
        "APT::Sandbox::User": "root",
    }
    return [word for name, value in paths.items() for word in ("-o", f"{name}={value}")]


def _unpacked_kernel(cache: Path, meta: str, options: list[str]) -> tuple[str, Path]:
    """Like `_ensure_kernel`, without refreshing the package index."""
    depends = run(["apt-cache", *options, "depends", meta])
    found = re.search(r"Depends: linux-image-(\S+-cloud-amd64)$", depends, re.MULTILINE)
    if not found:
        raise LabError(f"the package index knows no kernel for {meta}")
    release = found[1]
    policy = run(["apt-cache", *options, "policy", f"linux-image-{release}"])
    candidate = re.search(r"Candidate: (\d\S*)", policy)
    if not candidate:
        raise LabError(f"the package index has no version of linux-image-{release}")
    tree = cache / f"kernel-{release}-{candidate[1].replace(':', '_')}"
    if not tree.exists():
        progress(f"downloading linux-image-{release} {candidate[1]}")
        _unpack_kernel(release, tree, options)
    return release, tree


def _unpack_kernel(release: str, tree: Path, options: list[str]) -> None:
    """Downloads the kernel package and unpacks it to `tree`."""
    package = f"linux-image-{release}"
    with tempfile.TemporaryDirectory(dir=tree.parent) as scratch_name:
        scratch = Path(scratch_name)
        # apt as root downloads as a separate user, which may not write to this directory.
        run(["apt-get", "-o", "APT::Sandbox::User=root", *options, "download", package], cwd=scratch, timeout_s=300)
        (deb,) = scratch.glob("*.deb")
        run(["dpkg-deb", "-x", str(deb), str(scratch / "tree")], timeout_s=120)
        (scratch / "tree").rename(tree)


def _files(recipe: Recipe, tree: Path, release: str) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """The initramfs's content: path, then mode and bytes. Sorting puts parent directories first."""
    paths: dict[str, Path] = {"init": recipe.init, "bin/busybox": _tool("busybox"), "bin/sh": _tool("dash")}
    paths |= {f"usr/bin/{tool}": _tool(tool) for tool in recipe.tools}
    paths |= {f"usr/bin/{program.name}": program for program in recipe.programs}
    paths |= {str(path).lstrip("/"): path for path in recipe.files}
    for binary in [path for name, path in paths.items() if _linked(name)]:
        for library in libraries(binary):
            paths[str(library).lstrip("/")] = library.resolve()

    yield "etc/passwd", (stat.S_IFREG | 0o644, PASSWD)
    modules = _modules(recipe.modules, tree, release)
    directory = f"lib/modules/{release}"
    for name, (content, _) in modules.items():
        yield f"{directory}/{name}.ko", (stat.S_IFREG | 0o644, content)
    dependencies = "".join(
        f"{name}.ko: {' '.join(f'{other}.ko' for other in reversed(needs))}\n" for name, (_, needs) in modules.items()
    )
    yield f"{directory}/modules.dep", (stat.S_IFREG | 0o644, dependencies.encode())
    yield "modules", (stat.S_IFREG | 0o644, " ".join(modules).encode())

    for name in {
        str(parent)
        for path in (*paths, f"{directory}/x", "dev/x", "proc/x", "sys/x", "etc/x")
        for parent in Path(path).parents
    } - {"."}:
        yield name, (stat.S_IFDIR | 0o755, b"")
    for applet in run(["busybox", "--list"]).split():
        if applet not in ("busybox", "sh"):
            yield f"bin/{applet}", (stat.S_IFLNK | 0o777, b"busybox")
    for name, path in paths.items():
        yield name, (stat.S_IFREG | 0o755, path.read_bytes())


def _modules(names: Iterable[str], tree: Path, release: str) -> dict[str, tuple[bytes, list[str]]]:
    """Kernel modules that this kernel does not have built in, and their dependencies.

    Returns each module's content and the names of all modules that it needs, in loading order.
    """
    folder = tree / "lib/modules" / release
    found = {path.name.split(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    builtin = {Path(line).stem.replace("-", "_") for line in (folder / "modules.builtin").read_text().split()}
    wanted: dict[str, tuple[bytes, list[str]]] = {}

    def visit(name: str) -> list[str]:
        if name not in wanted:
            if name not in found:
                raise LabError(f"kernel {release} has no module {name}, which a guest needs")
            content = found[name].read_bytes()
            if found[name].suffix == ".xz":
                content = lzma.decompress(content)
            # A module's ".modinfo" section lists its dependencies as a zero-terminated string.
            listed = re.search(rb"\0depends=([^\0]*)\0", content)
            needs: list[str] = []
            for other in filter(None, (listed[1] if listed else b"").decode().split(",")):
                needs += [need for need in (*visit(other), other) if need not in needs]
            wanted[name] = (content, needs)
        return wanted[name][1]

    for name in names:
        if name not in builtin:
            visit(name)
    return wanted


def _linked(name: str) -> bool:
    """Whether a file of the image is a program or a shared library that needs others."""
    return ("bin/" in name and "busybox" not in name) or name.endswith(".so")


def _tool(name: str) -> Path:
    """Path of an installed program."""
    path = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if not path:
        raise LabError(f"{name} is not installed and lab guests need it: run 'make packages'")
    return Path(path)


def libraries(binary: Path) -> list[Path]:
    """Shared libraries that `binary` loads, including the loader, by the paths that it uses."""
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", run(["ldd", str(binary)]))]


def _replace(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(content)
    os.replace(scratch, path)
