"""`lab evaluate`: continuation of interrupted runs, comparison with the papers, both reports, and a short real run."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from checks import wait_for_path

from vnetlab import lab, machine, measure, remote, timeline
from vnetlab.bench import mpi, plot, runner, suite, usage
from vnetlab.bench.case import Case, Turn
from vnetlab.bench.contenders import Ends
from vnetlab.bench.result import METRICS, Failure, Result
from vnetlab.daemon import REPOSITORY
from vnetlab.evaluate import files, guests, network, papers, ranks, report, store
from vnetlab.evaluate.applications import KERNELS, LONG
from vnetlab.evaluate.claims import Claim
from vnetlab.evaluate.document import Heading, List, Plot, Table, Text, markdown, page
from vnetlab.evaluate.experiments import EXPERIMENTS
from vnetlab.evaluate.kinds import (
    BRIDGED,
    ELSEWHERE,
    JUDGED,
    KINDS,
    NATIVE,
    ON_ONE_HOST,
    STANDS_FOR,
    TAP,
    VETH,
    VNETS,
)
from vnetlab.evaluate.network import BOUND, TCP_KINDS
from vnetlab.evaluate.options import EvaluateOptions
from vnetlab.run import LabError, run
from vnetlab.topology import Node, Settings, Topology

LAB = "test-evaluate"
TEN = {"wire": "10g", "MTU": 1500}
NAMED = {
    "000": {"table 1", *(f"figure {number}" for number in range(1, 18))},
    "001": {f"figure {number}" for number in range(1, 11)},
    "002": {f"figure {number}" for number in range(1, 5)},
    "003": {"table 1", "table 2", *(f"figure {number}" for number in range(1, 5))},
    "004": {f"figure {number}" for number in range(1, 4)},
}
"""All captions of the papers."""
OWN_CONTENDERS = {"dispatchers", "ipoib", "ablation"}
"""Experiments whose contenders are not the kinds of data paths."""
ONLY_JUDGED = {"requests", "single", "counts"}
"""Experiments with the kinds that bars compare."""


@pytest.fixture
def result() -> Result:
    made = Result("streams", "lab/lab evaluate", "2026-01-02", 2, quick=False, machine={}, versions={"vnet": "1"})
    for kind, rates in ((NATIVE, (10e9, 8e9)), (BRIDGED, (7e9, 7e9)), (TAP, (6e9, 6e9)), (VETH, (6.5e9, 7.5e9))):
        for rate in rates:
            made.add(TEN, kind.name, {"tcp_bps": rate})
    return made


def test_every_table_and_figure_has_an_experiment_or_a_reason():
    for paper, names in NAMED.items():
        entries = [entry for entry in papers.ENTRIES if entry.paper == paper]
        assert sorted(entry.name for entry in entries) == sorted(names), paper
        assert all(entry.experiment in EXPERIMENTS if entry.experiment else entry.reason for entry in entries)
        assert len(report.coverage(paper).rows) == len(names) + 1
    assert set(papers.PAPERS) == set(NAMED)
    assert report.COVERAGE.read_text() == report.coverage_page(), "run lab/lab evaluate coverage"
    assert set(papers.experiments("all")) == set(EXPERIMENTS), "no experiment that repeats nothing"


def test_every_claim_is_measured_by_its_experiment():
    """A claim names conditions, contenders and a metric that the experiment has, and why figures may differ."""
    for entry in papers.ENTRIES:
        for claim in entry.claims:
            assert (claim.experiment or entry.experiment) in (entry.experiment, *entry.more)
            assert claim.metric in METRICS
            assert set(claim.ours) <= set(claim.worse), (entry.name, claim.text)
            assert set(claim.ours) <= set(claim.better), (entry.name, claim.text)
            found = _cases(claim.experiment or entry.experiment)
            found = [case for case in found if claim.where.items() <= case.conditions.items()]
            wanted = {*claim.ours, claim.base} - {""}
            assert any(wanted <= {turn.contender for turn in case.turns} for case in found), (entry.name, claim.text)


def test_every_experiment_has_claims_or_says_that_the_paper_has_no_figure():
    claimed = {claim.experiment or entry.experiment for entry in papers.ENTRIES for claim in entry.claims}
    silent = set(EXPERIMENTS) - claimed
    for name in silent:
        entries = [entry for entry in papers.ENTRIES if name in (entry.experiment, *entry.more)]
        assert any("text has no figure" in entry.reason for entry in entries), name
    assert silent == {"dispatchers", "variation", "noise", "counts", "machines"}


def _cases(name: str, **options: object) -> list[Case]:
    """The cases of an experiment, by default the usual ones."""
    experiment = EXPERIMENTS[name]
    return suite.cases(experiment, experiment.chosen(EvaluateOptions(**options)))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.74, 0.78, "Agrees."),
        (0.50, 0.60, f"Better here with {VETH.name}: kernel."),
        (0.90, 0.95, f"Worse here with {VETH.name}: headers."),
    ],
)
def test_verdict(result: Result, low: float, high: float, verdict: str):
    worse = {TAP.name: "copies", VETH.name: "headers"}
    claim = Claim("TCP", "tcp_bps", low, high, VNETS, NATIVE.name, TEN, worse, {VETH.name: "kernel"})
    assert claim.measured(result) == pytest.approx((7 / 9, 7 / 9)), "the best path's median over native's"
    assert (claim.here(result), claim.verdict(result)) == ("0.78x", verdict)
    elsewhere = replace(claim, where={"wire": "1g"})
    assert elsewhere.measured(result) is elsewhere.measured(None) is None
    assert elsewhere.verdict(result) == "Not measured under these conditions."


def test_verdict_counts_the_cases_that_agree():
    made = Result("streams", "", "", 1, quick=False, machine={}, versions={})
    for wire, rate in (("1g", 7), ("10g", 9), ("none", 12)):
        made.add({"wire": wire}, NATIVE.name, {"tcp_bps": 10})
        made.add({"wire": wire}, TAP.name, {"tcp_bps": rate})
    why = {"worse": {TAP.name: "copies"}, "better": {TAP.name: "kernel"}}
    claim = Claim("TCP", "tcp_bps", 0.9, 1.0, (TAP.name,), NATIVE.name, **why)
    begin = "Agrees in 1 of 3 cases: 1 better and 1 worse."
    assert replace(claim, high=1.05).verdict(made) == f"{begin} Worse here: copies.", "the one that deviates most"
    claim = replace(claim, low=0.8, high=0.8)
    assert claim.verdict(made) == "Agrees in no case of 3: 2 better and 1 worse. Better here: kernel."


def test_verdict_of_a_time_is_the_other_way_round():
    made = Result("pings", "", "", 1, quick=False, machine={}, versions={})
    for name, time in ((NATIVE.name, 10), (TAP.name, 25)):
        made.add(TEN, name, {"ping_median_us": time})
    reasons = {"worse": {TAP.name: "late"}, "better": {TAP.name: "no guest"}}
    claim = Claim("ping", "ping_median_us", 1.2, 1.3, (TAP.name,), NATIVE.name, **reasons)
    assert (claim.theirs, claim.verdict(made)) == ("1.20\N{EN DASH}1.30x", "Worse here: late.")
    assert replace(claim, low=3, high=4).verdict(made) == "Better here: no guest."


def test_a_claim_without_a_base_is_about_the_figure_itself():
    made = Result("interrupts", "", "", 1, quick=False, machine={}, versions={})
    made.add({}, "early", {"premature_share": 0.01})
    claim = Claim("premature", "premature_share", 0.005, 0.005, ("early",), "")
    assert (claim.theirs, claim.here(made), claim.verdict(made)) == ("0.5 %", "1.0 %", "Agrees.")
    made.series[0].values = [0.04]
    assert replace(claim, worse={"early": "late"}).verdict(made) == "Worse here: late."


def test_the_case_farthest_from_the_paper_explains_itself():
    """One case is best by TAP, the worse one by veth: its reason counts."""
    made = Result("streams", "", "", 1, quick=False, machine={}, versions={})
    for mtu, tap, veth in ((1500, 3, 4), (9000, 6, 5)):
        for name, rate in ((NATIVE.name, 10), (TAP.name, tap), (VETH.name, veth)):
            made.add({"MTU": mtu}, name, {"tcp_bps": rate})
    worse = {TAP.name: "copies", VETH.name: "headers"}
    claim = Claim("TCP", "tcp_bps", 0.9, 0.95, VNETS, NATIVE.name, {}, worse)
    assert claim.here(made) == "0.40\N{EN DASH}0.60x"
    assert claim.verdict(made) == f"Worse here with {VETH.name}: headers."


def test_ranks_in_a_row():
    assert ranks.spread(8, 2, 7) == [0, 1, 0, 1, 0, 1, 0, 1]
    assert ranks.spread(8, 2, 1) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert ranks.spread(4, 2, 2) == [0, 1, 1, 0]
    for hosts, count in ((2, 8), (3, 6), (4, 8)):
        for crossings in range(hosts - 1, count):
            found = ranks.spread(count, hosts, crossings)
            assert [found.count(host) for host in range(hosts)] == [count // hosts] * hosts
            assert sum(one != other for one, other in itertools.pairwise(found)) == crossings
    assert ranks.spread(4, 2, 0) == [0, 0, 0, 0], "no messages between hosts: all on one"
    for impossible in ((3, 2, 1), (6, 3, 1), (4, 2, 4)):
        with pytest.raises(LabError, match="cannot have"):
            ranks.spread(*impossible)


def test_placements():
    """inter, hybrid and intra as in figure 1 of paper 003; the percentages are those of its section 3."""
    sixteen = {each.name: each.hosts for each in ranks.placements(16, 2)}
    shares = {name: ranks.between_hosts(hosts, "16x1x1") for name, hosts in sixteen.items()}
    assert shares == {"inter": 100, "hybrid": 53, "intra": 7, "one host": 0}
    grids = {each.name: each.hosts for each in ranks.grid_placements(2)}
    assert grids == {"inter": [0, 1, 1, 0], "hybrid": [0, 1, 0, 1]}
    assert {name: ranks.between_hosts(hosts, "2x2x1") for name, hosts in grids.items()} == {"inter": 100, "hybrid": 50}
    for hosts in (2, 3, 4):
        for each in ranks.grid_placements(hosts):
            assert [each.hosts.count(host) for host in range(hosts)] == [2] * hosts
    found = {(case.conditions["placement"], case.conditions["split"]) for case in _cases("placement")}
    assert {("inter", "2x2x1"), ("hybrid", "2x2x1"), ("hybrid", "4x1x1"), ("one host", "4x1x1")} <= found
    assert {(name, split) for name in ("inter", "intra") for split in ("4x1x1", "1x4x1", "1x1x4")} <= found
    crowded = next(case for case in _cases("placement") if case.conditions["placement"] == "one host")
    assert crowded.settings.containers == 4


def test_two_ranks_compute_for_seconds():
    """More steps than class A has, unless a class is chosen. Cases differ by the number of ranks only."""
    usual, small = _cases("scaling"), _cases("scaling", advect="S")
    assert {case.conditions["class"] for case in usual} == {LONG["A"]}
    assert {case.conditions["class"] for case in small} == {"S"}
    differ = {key for case in usual for key in case.conditions if case.conditions[key] != usual[0].conditions[key]}
    assert differ == {"ranks"}
    assert {turn.contender for turn in usual[0].turns} >= {ON_ONE_HOST.name, NATIVE.name}


def test_an_hour_of_throughput_does_not_mix_with_30_seconds():
    long, usual = (_cases("variation", long=long)[0].conditions for long in (True, False))
    assert (long["seconds of TCP"], usual["seconds of TCP"]) == (3_600, 30)


def test_the_whole_evaluation_takes_a_few_hours():
    """The first estimate of `all`; bars are judged by three rounds."""
    work = [(each, Result(name, "", "", each.rounds, False, {}, {})) for name, each in EXPERIMENTS.items()]  # noqa: FBT003
    remaining = store.Remaining(work, EvaluateOptions())
    assert remaining.seconds < 4.5 * 3600
    assert str(remaining).startswith(f"{remaining.count} measurements left, about ")
    variation = [each for each in work if each[0].name == "variation"]
    hours = store.Remaining(variation, EvaluateOptions(long=True))
    assert hours.seconds >= hours.count * 3600
    assert {name for name, each in EXPERIMENTS.items() if each.rounds == 3} == {
        "nas",
        "challenge",
        "scaling",
        "messages",
    }


def test_wires_and_mtus_are_those_of_the_experiment_unless_chosen():
    under = {(case.conditions["wire"], case.conditions["MTU"]) for case in _cases("nas")}
    assert under == {(wire, mtu) for wire in ("1g", "10g") for mtu in (1500, 9000)}
    under = {(case.conditions["wire"], case.conditions["MTU"]) for case in _cases("nas", wires=("none",), mtus=(1500,))}
    assert under == {("none", 1500)}
    assert {case.conditions["wire"] for case in _cases("streams", mtus=(9000,))} == {"1g", "10g", "none"}


def test_ranks_of_kernels():
    found = {case.conditions["ranks"]: case.conditions for case in _cases("counts", kernels=("cg",))}
    assert {count: each["class"] for count, each in found.items()} == {1: "W", 2: "W", 4: "S", 8: "S"}
    rows = {case.conditions["ranks"]: case.conditions["class"] for case in _cases("counts", kernels=("bt",))}
    assert rows == dict.fromkeys(found, "W"), "class S has rows for 6 ranks only"
    assert [count for count, each in found.items() if "more ranks than processors" in each] == [4, 8]


def test_machines_run_what_their_processor_can(monkeypatch: pytest.MonkeyPatch):
    """Class and kernels are the options' with KVM; an emulator runs four kernels of class S."""
    options = EvaluateOptions(size="A")
    for kind, found in (("kvm", ("A", KERNELS)), ("tcg", ("S", guests.EMULATED_KERNELS))):
        monkeypatch.setattr(guests.guest, "accelerator", lambda kind=kind: ["-accel", kind])
        assert guests.chosen(options) == found
    assert guests.chosen(replace(options, kernels=("bt",))) == ("S", ("bt",))


def test_shares_of_early_notifications():
    counts = Counter(early=200, sent=400, early_at_arrival=100, early_mispredicted=5, early_premature=1)
    counts |= Counter(early_discarded=50, coalesced_withheld=30, coalesced_injected=10)
    assert guests._early_shares(counts) == {
        "early_share": 0.5,
        "arrival_share": 0.5,
        "mispredicted_share": 0.05,
        "premature_share": 0.005,
        "masked_share": 0.2,
        "withheld_share": 0.75,
        "injected_share": 0.025,
    }


def test_rows_of_the_trace():
    rounds = [{timeline.RTT: 300.0, "received": 5.0, "reacted": 90.0}, {timeline.RTT: 310.0, "received": 7.0}]
    row = timeline.Row(56, "direct", rounds, announced=[0.0, 0.0], notified=[1.0, 0.5])
    assert guests.traced_name(row.bytes, row.interrupts) == f"56 bytes, {guests.OFF}"
    assert guests.traced_figures(row) == {
        "trace_rtt_us": 305,
        "trace_received_us": 6,
        "trace_reacted_us": 90,
        "trace_early_share": 0,
        "trace_late_share": 0.75,
    }
    traced = _cases("interrupts")[1]
    assert [turn.contender for turn in traced.turns] == [
        guests.traced_name(size, setting) for size in timeline.SIZES for setting in timeline.SETTINGS
    ]


def test_wrong_results_of_hpc_challenge_are_failures(monkeypatch: pytest.MonkeyPatch):
    good = "0 tests completed and failed residual checks\nSuccess=1\n"
    good += "".join(f"{name}=1.0\n" for name, _ in mpi.CHALLENGE.values())
    monkeypatch.setattr(mpi, "challenge_report", lambda *_: good)
    assert mpi.challenge(Ends(None, None), 64)["ptrans_bytes_per_s"] == 1e9
    monkeypatch.setattr(mpi, "challenge_report", lambda *_: good.replace("0 tests", "1 tests"))
    with pytest.raises(LabError, match="wrong results: residual checks"):
        mpi.challenge(Ends(None, None), 64)


def test_an_interrupted_run_is_continued(result: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Only missing rounds are measured; every measurement is in the file at once."""
    taken: list[str] = []
    path = tmp_path / "streams.json"

    def turn(name: str) -> Turn:
        def take(_topology: Topology) -> dict[str, float]:
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(name)
            return {"tcp_bps": 1.0}

        return Turn(name, lambda: None, take)

    cases = [Case(TEN, Settings(name=LAB), [turn("a"), turn("b")])]
    monkeypatch.setattr(runner, "cases", lambda *_: cases)
    monkeypatch.setattr(store, "cases", lambda *_: cases)
    monkeypatch.setattr(runner.lab, "prepare", Topology)
    monkeypatch.setattr(runner.lab, "down", lambda _: None)
    experiment, options = EXPERIMENTS["streams"], EvaluateOptions()
    empty = replace(result, series=[])
    left = store.Remaining([(experiment, empty)], options)
    assert str(left) == f"4 measurements left, about {4 * experiment.usual_s // 60} min {4 * experiment.usual_s % 60} s"
    with pytest.raises(KeyboardInterrupt):
        runner.run(experiment, options, empty, lambda case, _: left.measured(empty, path, case, 100))
    assert (taken, str(left)) == (["a", "b", "a"], "1 measurement left, about 1 min 40 s")
    kept = Result.read(path)
    assert (kept.rounds(TEN, "a"), kept.rounds(TEN, "b"), kept.rounds({}, "b")) == (2, 1, 0)
    taken.clear()
    runner.run(experiment, options, kept)
    assert taken == ["b"]
    runner.run(experiment, options, kept)
    assert taken == ["b"], "nothing is left"
    kept.failures.append(Failure(dict(TEN), "a", "broken"))
    kept.repeat = 3
    assert runner.left(cases[0], kept) == 1, "a contender that failed is not waited for"


def test_kept_figures_of_another_vnet_are_not_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    machine = {"kernel": "6", "processor": "x"}
    now = Result("pings", "", "", 3, quick=False, machine=machine, versions={"vnet": "2"})
    monkeypatch.setattr(store.runner, "begin", lambda *_: now)
    begin = ("pings", EvaluateOptions(), 3, tmp_path)
    experiment = EXPERIMENTS["pings"]
    assert store.begin(experiment, *begin[1:]) is now, "nothing is kept"
    kept = replace(now, repeat=1, failures=[Failure({}, "a", "broken")])
    kept.write(tmp_path / "pings.json")
    continued = store.begin(experiment, *begin[1:])
    assert (continued.repeat, continued.failures) == (3, []), "who failed gets another chance"
    for other in (replace(kept, versions={"vnet": "1"}), replace(kept, machine=machine | {"kernel": "5"})):
        other.write(tmp_path / "pings.json")
        with pytest.raises(LabError, match="choose --fresh"):
            store.begin(experiment, *begin[1:])
    replace(kept, quick=True).write(tmp_path / "pings.json")
    with pytest.raises(LabError, match="figures of a quick run"):
        store.begin(experiment, *begin[1:])


def test_document(tmp_path: Path):
    svg = tmp_path / "a.svg"
    svg.write_text("<svg/>")
    link = "[page](x.md)"
    blocks = [Heading("A < B", 1), Text(f"**bold** `a|b` {link}"), List(("one",)), Plot(svg, "P")]
    blocks.append(Table((("a", "b"), ("c|d", "e"))))
    assert markdown(blocks) == (
        f"# A < B\n\n**bold** `a|b` {link}\n\n- one\n\n![P](a.svg)\n\n| a | b |\n|---|---|\n| c&#124;d | e |\n"
    )
    text = page("T", blocks)
    for part in (
        "<h1>A &lt; B</h1>",
        "<p><strong>bold</strong> <code>a|b</code> page</p>",
        "<li>one</li>",
        'src="data:image/svg+xml;base64,PHN2Zy8+"',
        "<tr><td>c|d</td><td>e</td></tr>",
    ):
        assert part in text
    assert "x.md" not in text, "the page stands alone"


def test_report(result: Result, tmp_path: Path):
    pytest.importorskip("matplotlib")
    with pytest.raises(LabError, match="has no results"):
        report.write(tmp_path)
    result.write(tmp_path / "streams.json")
    nas = replace(result, bench="nas", series=[])
    for name, rate in ((NATIVE.name, 100e6), (TAP.name, 90e6)):
        nas.add({**TEN, "kernel": "CG", "class": "S", "ranks": 2}, name, {"operations_per_s": rate})
    nas.failures.append(Failure({**TEN, "kernel": "IS"}, VETH.name, "the result is wrong"))
    nas.write(tmp_path / "nas.json")
    paths = report.write(tmp_path)
    text, html = (path.read_text() for path in paths)
    assert "| figure 8 | TCP on 10 Gbit/s | 0.74\N{EN DASH}0.78x | 0.78x | Agrees. |" in text
    assert "| figure 14 | CG on 10g | 0.86\N{EN DASH}0.94x | 0.90x | Agrees. |" in text
    assert f"{VETH.name} could not run (wire 10 Gbit/s, MTU 1500, kernel IS): the result is wrong" in text
    assert all(each.name in text and each.command in text for each in ELSEWHERE), "what would run elsewhere"
    assert "QUICK" not in text
    assert "| NPB on 1 and 10 Gbit/s / bridge and kernel VXLAN | \u2265 1.00x | no figures:" in text
    assert {"streams.svg", "nas-10g-1500.svg"} <= {path.name for path in tmp_path.iterdir()}
    assert html.count("data:image/svg+xml") == 2
    assert 'src="streams' not in html, "one file"
    (cg,) = {tuple(series.values) for series in report.relative(nas, "operations_per_s").series} - {(1.0,)}
    assert cg == (0.9,)


def test_every_experiment_has_cases():
    for name, experiment in EXPERIMENTS.items():
        full = _cases(name)
        quick = _cases(name, quick=True, wires=("none",), mtus=(1500,))
        assert 0 < len(quick) <= len(full), name
        assert set(experiment.plotted) <= set(METRICS)
        if full[0].settings.containers and name not in OWN_CONTENDERS:
            found = {turn.contender for case in full for turn in case.turns}
            kinds = JUDGED if name in ONLY_JUDGED else KINDS
            assert {kind.name for kind in kinds} <= found, name
            assert found - {kind.name for kind in KINDS} <= set(STANDS_FOR) | {
                BOUND,
                *(each.name for each in TCP_KINDS),
            }
        conditions = [case.conditions for case in full]
        assert all(conditions.count(each) == 1 for each in conditions), name


def test_figures_of_programs():
    """Rates from the reports of fio and vnet-rdma-perf, also after warnings."""
    job = {"job_runtime": 4, "read": {"total_ios": 2, "io_bytes": 2 << 20, "lat_ns": {"mean": 1e6}}}
    text = f"fio: a warning\n{json.dumps({'jobs': [job | {'write': job['read']}]})}"
    assert files.fio_rate(text, "read") == (2 << 20) / 2e-3
    assert files.fio_rate(text, "write", synced=True) == (2 << 20) / 4e-3, "the fsync is part of the runtime"
    with pytest.raises(LabError, match="no figures"):
        files.fio_rate("fio: no such engine", "read")
    text = "latency_us 7.25 p99_us 12.00 messages 100\ngbit_s 0.50000 size 64 cpu_s_per_gb 1.000 resent 0\n"
    assert network.rdma_figures(text) == {"oneway_us": 7.25, "transfer_bps": 0.5e9}
    with pytest.raises(LabError, match="it is silent"):
        network.rdma_figures("vnet-rdma-perf: peer: it is silent\n")


def _report(begin_s: float, rates_bps: list[float]) -> dict:
    """iperf3's report of a stream with one interval a second."""
    intervals = [{"sum": {"start": n, "end": n + 1, "bytes": rate / 8}} for n, rate in enumerate(rates_bps)]
    return {measure.ENDED_S: begin_s + len(rates_bps), "intervals": intervals}


def test_rates_of_streams_are_those_of_the_time_they_share():
    """The first stream is alone for a second, and twice as fast; so is the second one at its end."""
    assert measure.common_rate([_report(10, [8e9, 4e9, 4e9]), _report(11, [4e9, 4e9, 8e9])]) == pytest.approx(8e9)
    assert measure.common_rate([_report(10, [6e9] * 4), _report(10.5, [6e9] * 4)]) == pytest.approx(12e9)
    with pytest.raises(LabError, match="same time"):
        measure.common_rate([_report(10, [8e9]), _report(11, [8e9])])


def test_native_streams_have_an_iperf3_each(monkeypatch: pytest.MonkeyPatch):
    """As many processes at either end as the pairs of containers have."""
    served, asked = [], []

    def client(_source: Node, _destination: Node, *_options: str, seconds: float, port: int) -> dict:
        asked.append((port, seconds))
        return _report(10, [4e9] * 3)

    monkeypatch.setattr(measure, "iperf3_server", lambda _node, port: served.append(port))
    monkeypatch.setattr(measure, "iperf3_client", client)
    hosts = Topology(Settings(name=LAB, vms=0, containers=0)).hosts
    assert network._aggregate(None, Ends(*hosts[:2]), 3, 5) == pytest.approx(12e9)
    assert served == sorted(port for port, _ in asked)
    assert len(set(served)) == 3


def test_real_streams_at_once(monkeypatch: pytest.MonkeyPatch):
    """Two streams of this machine's iperf3 over its loopback device."""

    def attempt(_node: Node, *words: str, timeout_s: float = 60) -> tuple[int, str]:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout

    monkeypatch.setattr(machine, "attempt", attempt)
    monkeypatch.setattr(machine, "execute", lambda _node, *words: run(list(words)))
    monkeypatch.setattr(measure, "IPERF3_PORT", 20_000 + os.getpid() % 10_000)
    monkeypatch.setattr(Node, "address", "127.0.0.1")
    host = Topology(Settings(name=LAB, vms=0, containers=0)).hosts[0]
    assert network._aggregate(None, Ends(host, host), 2, 1) > 1e6


def test_cpu_time_is_that_of_the_transferred_bytes(monkeypatch: pytest.MonkeyPatch):
    """4 s of one CPU for 8 GB in 4 s, measured for 5 s because of a pause before."""
    ticks = iter([[0] * 8, [0, 0, int(4 / usage.TICK_S), 0, 0, 0, 0, 0]])
    monkeypatch.setattr(usage, "_fields", lambda: next(ticks))
    with usage.split() as work:
        pass
    sample = work.sample(8e9, 16e9)
    assert (sample["kernel_cores"], sample["cpu_s_a_gb"]) == (pytest.approx(1), pytest.approx(0.5))


def test_an_underlay_of_tun_devices():
    """Two hosts exchange the largest packets of IPoIB's connected mode over devices without Ethernet headers."""
    settings = Settings(name=LAB, vms=0, containers=0, tun=True, underlay_mtu=65_520)
    topology = lab.prepare(settings)
    try:
        source, destination = topology.hosts
        assert "link/none" in machine.execute(source, "ip", "link", "show", "eth0")
        wait_for_path(source, destination.address)
        _, times = measure.ping(source, destination.address, "-s", "65492", "-M", "do", count=3)
        assert len(times) == 3
        assert measure.throughput(source, destination, seconds=1) > 0
    finally:
        lab.down(LAB)
    with pytest.raises(LabError, match="joins two hosts, not 3"):
        lab.prepare(replace(settings, hosts=3))
    lab.down(LAB)


def test_commands_run_where_their_namespace_is():
    place = remote.Machine("root@there", "eth1")
    with remote.hosts_on("x", (place, place)):
        for words in ("ip -n x-h1 link", "bridge -n x-h2 fdb", "ip netns exec x-h2c1 true", "ip netns delete x-h1"):
            assert remote.wrap(words.split())[-2:] == ["root@there", words]
        for words in ("ip -n y-h1 link", "ip link", "ip netns exec x-underlay true", "true"):
            assert remote.wrap(words.split()) == words.split()
    assert remote.wrap(["ip", "-n", "x-h1", "link"])[0] == "ip"


def test_a_short_run(tmp_path: Path):
    """Two kernels on two kinds between real hosts; the second call has nothing to measure."""
    plot.library()
    command = [sys.executable, str(REPOSITORY / "lab" / "lab"), "evaluate", "nas", "--quick", "--name", LAB]
    command += ["--kernel", "is", "--kernel", "cg", "--contender", "macvlan", "--contender", "vnet, TAP"]
    command += ["--results", str(tmp_path)]
    try:
        for left in (4, 0):
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert f"1 experiments, {left} measurements left" in done.stderr
    finally:
        lab.down(LAB)
    result = Result.read(tmp_path / "nas.json")
    assert not result.failures
    for kernel in ("IS", "CG"):
        found = {"wire": "none", "MTU": 1500, "kernel": kernel, "class": "S", "ranks": 2}
        assert all(result.find(found, name, "operations_per_s").median > 0 for name in ("macvlan", TAP.name))
    assert "QUICK RUN" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
