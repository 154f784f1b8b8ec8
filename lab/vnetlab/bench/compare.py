"""Compares two revisions of vnet: builds both, runs them in turn, and tests differences for significance."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vnetlab.bench.contenders import Vnet
from vnetlab.bench.result import METRICS, SIGNIFICANCE, Conditions, Result, Series, difference_p, smallest_p
from vnetlab.daemon import REPOSITORY
from vnetlab.run import LabError, progress, run

FOLDER = REPOSITORY / ".cache" / "compare"
BUILD_S = 1800


@dataclass(frozen=True)
class Difference:
    """One metric of both revisions under the same conditions."""

    conditions: Conditions
    one: Series
    other: Series

    @property
    def change(self) -> float:
        """Relative change of the median; 0 if the first median is 0."""
        return self.other.median / self.one.median - 1 if self.one.median else 0.0

    @property
    def p(self) -> float:
        """The p-value: the probability that chance alone produces such a difference."""
        return difference_p(self.one.values, self.other.values)

    @property
    def verdict(self) -> str:
        """BETTER, WORSE, or within the noise."""
        if smallest_p(len(self.one.values), len(self.other.values)) > SIGNIFICANCE:
            return "too few rounds to tell"
        if self.p > SIGNIFICANCE or self.change == 0:
            return "within the noise"
        better = (self.change > 0) == METRICS[self.one.metric].higher_is_better
        return "BETTER" if better else "WORSE"


def revisions(names: list[str]) -> list[Vnet]:
    """Builds git revisions; returns each as a contender."""
    commits = [run(["git", "-C", str(REPOSITORY), "rev-parse", "--verify", f"{name}^{{commit}}"]) for name in names]
    shas = [commit.strip()[:12] for commit in commits]
    if len(set(shas)) < len(shas):
        raise LabError(f"{' and '.join(names)} are the same commit, {shas[0]}")
    return [
        Vnet(f"{name} ({sha})" if name != sha else sha, binaries=build(sha))
        for name, sha in zip(names, shas, strict=True)
    ]


def build(sha: str) -> Path:
    """Builds a commit in a separate worktree, once; returns the directory of its programs."""
    tree, target = FOLDER / sha, FOLDER / f"target-{sha}"
    done = target / "built"
    if not done.exists():
        progress(f"building {sha}")
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        run([*git, "prune"])
        if not tree.exists():
            run([*git, "add", "--detach", str(tree), sha])
        manifest = ["--manifest-path", str(tree / "Cargo.toml"), "--target-dir", str(target)]
        cargo = ["cargo", "build", "--quiet", "--release", "--locked", *manifest]
        run([*cargo, "--workspace"], timeout_s=BUILD_S)
        for folder, package in (("vnet", "vnet"), ("vnetd", "vnetd"), ("interconnect", "vnet-rdma")):
            if (tree / folder / "examples").exists():
                run([*cargo, "--package", package, "--examples"], timeout_s=BUILD_S)
        done.touch()
        run([*git, "remove", "--force", str(tree)])
    return target / "release"


def differences(result: Result) -> Iterator[Difference]:
    """Every metric that was measured for both revisions."""
    one, other = result.contenders()[:2]
    for conditions in result.conditions():
        for metric in result.metrics():
            pair = result.find(conditions, one, metric), result.find(conditions, other, metric)
            if pair[0] and pair[1]:
                yield Difference(conditions, *pair)
