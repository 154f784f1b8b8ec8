"""Each experiment of `lab evaluate` runs: one contender in the smallest size, and a report of all of them.

Guests boot twice, for `interrupts` and `machines`. Four parts are left to `lab evaluate all --quick`, as each
boots further emulated guests, which is too slow here: the trace of `interrupts` (test_driving.py has one), the rows of
`ablation` between virtual machines, `machines` on tap and bridge, and virtio-blk of `files`.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from vnetlab import lab
from vnetlab.bench import runner, suite
from vnetlab.bench.result import Result
from vnetlab.evaluate import bars, ranks, report
from vnetlab.evaluate.document import markdown
from vnetlab.evaluate.experiments import EXPERIMENTS
from vnetlab.evaluate.files import OVERLAY
from vnetlab.evaluate.guests import OFF
from vnetlab.evaluate.kinds import NATIVE, TAP, VETH
from vnetlab.evaluate.options import EvaluateOptions
from vnetlab.topology import Wire

LAB = "test-evaluate-smoke"
OPTIONS = EvaluateOptions(quick=True, wires=(Wire.NONE,), mtus=(1500,), size="S", advect="S", lab=LAB)
CONTENDERS = {
    "dispatchers": ("vnet, 1 dispatcher",),
    "messages": (TAP.name, "tinc"),
    "nas": (NATIVE.name, VETH.name),
    "files": (OVERLAY,),
    "ablation": (NATIVE.name,),
    "interrupts": (OFF,),
    "machines": ("virtual machines on vnet",),
}
"""Contenders of experiments in which the usual one, vnet by TAP, is not the one to try."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of results; the workloads are built."""
    ranks.build()
    yield tmp_path_factory.mktemp("evaluation")
    lab.down(LAB)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs(kept: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """Its first case, smallest kernels and files; plotted figures are there and not zero."""
    experiment = EXPERIMENTS[name]
    wanted = CONTENDERS.get(name, (TAP.name,))
    options = experiment.chosen(replace(OPTIONS, contenders=wanted))
    first = suite.cases(experiment, options)[0]
    monkeypatch.setattr(runner, "cases", lambda *_: [first])
    result = Result(name, "lab/lab evaluate", "", 1, quick=True, machine={}, versions={})
    runner.run(experiment, options, result)
    result.write(kept / f"{name}.json")
    assert not result.failures
    assert result.contenders() == [turn.contender for turn in first.turns]
    assert len(first.turns) == len(wanted)
    found = [series for series in result.series if series.metric in experiment.plotted]
    assert found
    assert all(series.median > 0 for series in found if series.metric != "tcp_variation")


def test_the_report_has_all_experiments(kept: Path):
    """Follows the others: their results make a report. Plots are drawn elsewhere, as they need matplotlib."""
    results = report.stored(kept)
    assert set(results) == set(EXPERIMENTS), "an experiment that did not run"
    text = markdown(report.document(results, {}))
    assert all(f"Experiment {name}: " in text for name in EXPERIMENTS)
    assert bars.summary(results) in text
