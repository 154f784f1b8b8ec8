"""The documentation: links have a target, and the files that it names exist."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vnetlab.daemon import REPOSITORY

LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
NAMED = re.compile(r"`([\w.*/-]+(?:/|\.(?:rs|py|md|toml|json)))`")


def tracked() -> Iterator[Path]:
    """Files under version control, and new files that are not ignored."""
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    )
    return (path for line in listed.stdout.splitlines() if (path := REPOSITORY / line).is_file())


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub generates them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_relative_links_lead_somewhere(page: Path):
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page}: {link} does not exist"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link} has no such heading"


def test_architecture_names_files_that_exist():
    page = REPOSITORY / "ARCHITECTURE.md"
    named = NAMED.findall(page.read_text())
    assert len(named) > 20
    files = [str(path.relative_to(REPOSITORY)) for path in tracked()]
    missing = [
        name for name in named if not any(f"/{file}".endswith(f"/{name}") or f"/{name}" in f"/{file}" for file in files)
    ]
    assert not missing, f"ARCHITECTURE.md names what is not there: {' '.join(missing)}"


TOLD = {
    "README.md": (
        'name = "h1"',
        'name = "h2"',
        "UDP port 9000 must be open on both",
        "All guests of one network need the same MTU; larger frames are dropped (`mtu_exceeded`)",
        "systemctl edit vnetd",
        "vectors=0",
        "`VHOST_USER_PROTOCOL_F_CONFIG` is harmless",
        "each `HOST.key` belongs on its host only",
    ),
    "docs/configuration.md": (
        "`mac` becomes the device's MAC address",
        "A TAP that vnetd made outlives it",
        "A veth is removed when vnetd stops",
        "**A container that is recreated.**",
        "ssh h1 mkdir -p /etc/vnet/keys",
        "`ca.key` and every `HOST.key` are secret",
    ),
    "docs/overlay.md": ("--listen-client-urls", "--advertise-client-urls", "TCP port 2379"),
    "docs/top.md": ("`REASON` is the most frequent reason of this interval",),
}
"""What new administrators did not find, or misunderstood."""


@pytest.mark.parametrize("page", TOLD)
def test_what_new_administrators_missed_is_told(page: str):
    text = (REPOSITORY / page).read_text()
    assert not [words for words in TOLD[page] if words not in text]
