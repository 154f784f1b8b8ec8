"""What a table or figure of a paper is here: the experiment that repeats it, and usual claims."""

from dataclasses import dataclass

from vnetlab.bench.result import Conditions
from vnetlab.evaluate.claims import Claim, Reasons
from vnetlab.evaluate.files import ROOT
from vnetlab.evaluate.kinds import BRIDGED, MACVLAN, NATIVE, VNETS
from vnetlab.evaluate.reasons import EMULATED, FASTER_FILES, NO_GUEST, STAND_IN


@dataclass(frozen=True)
class Entry:
    """A table or figure."""

    paper: str
    name: str
    title: str
    experiment: str = ""
    """The experiment that repeats it; empty if there is none."""
    claims: tuple[Claim, ...] = ()
    reason: str = ""
    """Why there is no experiment, or what an experiment leaves out."""
    more: tuple[str, ...] = ()
    """Further experiments on the same subject."""


def overlay(text: str, metric: str, low: float, high: float, where: Conditions, worse: Reasons) -> Claim:
    """A claim about the paper's overlay against native, here vnet's best path."""
    return Claim(text, metric, low, high, VNETS, NATIVE.name, where, worse, NO_GUEST)


def direct(text: str, metric: str, low: float, high: float, base: str, where: Conditions) -> Claim:
    """A claim about the paper's direct path."""
    return Claim(text, metric, low, high, (MACVLAN.name,), base, where, STAND_IN, STAND_IN)


def bridged(text: str, metric: str, low: float, high: float, where: Conditions) -> Claim:
    """A claim about the paper's bridged path against native."""
    return Claim(text, metric, low, high, (BRIDGED.name,), NATIVE.name, where, STAND_IN, STAND_IN)


def files(text: str, metric: str, low: float, storage: str, cache: str) -> Claim:
    """A claim about a rate of files on a kind of storage against the host's disk."""
    return Claim(text, metric, low, 1, (storage,), ROOT, {"cache": cache}, EMULATED, FASTER_FILES)


def drawing(
    paper: str, number: int, title: str, place: str, experiment: str = "", claims: tuple[Claim, ...] = ()
) -> Entry:
    """A figure that is a drawing."""
    reason = f"a drawing without figures; here: {place}"
    return Entry(paper, f"figure {number}", title, experiment, claims, reason)
