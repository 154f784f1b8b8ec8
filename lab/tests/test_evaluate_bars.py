"""The evaluation's bars: met or not met follows from the medians, in the report and in the index."""

from dataclasses import replace

import pytest

from vnetlab.bench import suite
from vnetlab.bench.result import METRICS, Conditions, Failure, Result
from vnetlab.evaluate import bars, report
from vnetlab.evaluate.bars import BARS, BESIDE, DASH, MET, MISSED, Bar
from vnetlab.evaluate.claims import Ratio
from vnetlab.evaluate.experiments import EXPERIMENTS
from vnetlab.evaluate.guests import EARLY_ALWAYS, OFF
from vnetlab.evaluate.kinds import BRIDGED, NATIVE, TAP, TINC, VETH
from vnetlab.evaluate.options import EvaluateOptions
from vnetlab.run import LabError

UNDER = [{"wire": wire, "MTU": mtu} for wire in ("1g", "10g") for mtu in (9000, 1500)]


def empty(name: str) -> Result:
    return Result(name, "", "", 1, quick=False, machine={}, versions={})


def operations(tap: float, veth: float, bridged: float = 90) -> Result:
    """Two kernels on all underlays; native has 100 operations."""
    made = empty("nas")
    for under in UNDER:
        for kernel in ("CG", "IS"):
            rates = {NATIVE: 100, BRIDGED: bridged, TAP: tap, VETH: veth}
            for kind, rate in rates.items():
                made.add({**under, "kernel": kernel}, kind.name, {"operations_per_s": rate})
    return made


def bar(text: str) -> Bar:
    (found,) = [each for each in BARS if each.text.startswith(text)]
    return found


def test_every_bar_is_measured_by_its_experiment():
    for each in BARS:
        experiment = EXPERIMENTS[each.experiment]
        cases = suite.cases(experiment, experiment.chosen(EvaluateOptions()))
        for ratio in each.ratios:
            assert ratio.metric in METRICS
            matching = [case for case in cases if ratio.where.items() <= case.conditions.items()]
            there = [{turn.contender for turn in case.turns} for case in matching]
            assert any({*ratio.ours, ratio.base} <= names for names in there), (each.text, ratio)
    texts = [each.text for each in BARS]
    assert len(set(texts)) == len(texts)


def test_the_bars_of_the_issue():
    """Bounds, and what they are for."""
    bounds = {each.text: each.bound for each in BARS}
    assert bounds["NPB on 1 and 10 Gbit/s, MTU 9000 / native"] == "\u2265 0.98x"
    assert bounds["HPCC, rates on 1 and 10 Gbit/s, MTU 1500 / native"] == "\u2265 0.94x"
    assert bounds[f"HPCC, latencies on 1 and 10 Gbit/s / {BRIDGED.name}"] == "\u2265 1.00x"
    assert bounds["advective application, 2 ranks, inter: computing at most 2 % more / native"] == "\u2264 1.02x"
    assert bounds["advective application, 2 ranks, inter: whole / native"] == "\u2265 0.95x"
    assert bounds["MPI one way, 64 bytes / tinc"] == bounds["MPI one way, 4 MiB / tinc"] == "\u2265 1.00x"
    assert bounds["MPI one way, 64 bytes / native"] == DASH
    assert bounds[f"{EARLY_ALWAYS}: pings of 56, 256 bytes / {OFF}"] == "\u2264 1.00x"
    assert bounds[f"{EARLY_ALWAYS}: pings of 1024, 2048, 4096 bytes / {OFF}"] == "< 1.00x"


@pytest.mark.parametrize(
    ("veth", "jumbo", "small"), [(99, MET, MET), (98, MET, MET), (97, MISSED, MET), (93, MISSED, MISSED)]
)
def test_rates_against_native(veth: float, jumbo: str, small: str):
    """The better path counts: TAP is far behind."""
    result = operations(50, veth)
    for mtu, verdict in ((9000, jumbo), (1500, small)):
        row = bar(f"NPB on 1 and 10 Gbit/s, MTU {mtu}").row(result)
        assert row[2].startswith(f"0.{veth}0x with {VETH.name} (wire 1 Gbit/s, MTU {mtu}, kernel CG), the worst of 4")
        assert row[3].startswith(verdict)
    assert bar("NPB on 1 and 10 Gbit/s / bridge").met(result)


def test_one_bad_case_is_enough():
    result = operations(50, 100)
    series = result.find({**UNDER[2], "kernel": "IS"}, VETH.name, "operations_per_s")
    series.values = [80]
    row = bar("NPB on 1 and 10 Gbit/s, MTU 9000").row(result)
    worst = f"0.800x with {VETH.name} (wire 10 Gbit/s, MTU 9000, kernel IS), the worst of 4"
    assert row[2] == f"{worst}; geometric mean 0.946x"
    assert row[3] == f"{MISSED}: {bar('NPB on 1 and 10 Gbit/s, MTU 9000').worse[VETH.name]}"


def test_times_count_inversely():
    """With 4 us, native 3, tinc 5, vnet is behind native, beside which it is shown only, and ahead of tinc."""
    made = empty("messages")
    for kind, time in ((NATIVE, 3), (BRIDGED, 4), (TINC, 5), (TAP, 9), (VETH, 4)):
        made.add({"bytes": 64}, kind.name, {"oneway_us": time})
    assert bar("MPI one way, 64 bytes / native").row(made)[2:4] == (f"0.750x with {VETH.name} (bytes 64)", BESIDE)
    assert bar("MPI one way, 64 bytes / tinc").row(made)[2:4] == (f"1.250x with {VETH.name} (bytes 64)", MET)
    made.find({"bytes": 64}, TINC.name, "oneway_us").values = [3]
    assert bar("MPI one way, 64 bytes / tinc").met(made) is False


def test_an_upper_bound_is_one_of_times():
    made = empty("scaling")
    where: Conditions = {"ranks": 2, "placement": "inter"}
    for kind, compute in ((NATIVE, 10), (TAP, 10.3), (VETH, 10.1)):
        made.add(where, kind.name, {"compute_s": compute})
    computing = bar("advective application, 2 ranks, inter: computing")
    assert computing.row(made)[2].startswith("1.010x")
    assert computing.met(made)
    made.find(where, VETH.name, "compute_s").values = [10.25]
    assert computing.met(made) is False


def test_early_notifications_must_be_faster_for_large_pings():
    made = empty("interrupts")
    times = {f"ping_{size}_us": 100 for size in (56, 256, 1024, 2048, 4096)}
    for name in (OFF, EARLY_ALWAYS):
        made.add({"between": "virtual machines"}, name, dict(times))
    # The rows of the trace have other metrics.
    made.add({"between": "virtual machines", "trace": "steps"}, "56 bytes", {"trace_rtt_us": 1})
    small, large = (bar(f"{EARLY_ALWAYS}: pings of {sizes}") for sizes in ("56", "1024"))
    assert (small.met(made), large.met(made)) == (True, False), "equal is enough below 1 KiB only"
    assert large.row(made)[2].startswith(f"ping 1024 B: 1.000x with {EARLY_ALWAYS} (between virtual machines)")
    assert "the trace" in large.row(made)[3]


def test_what_is_missing_is_not_met():
    """Figures of one wire only, or a contender that failed, meet no bar; no figures at all are no verdict."""
    npb = bar("NPB on 1 and 10 Gbit/s, MTU 9000")
    assert npb.met(None) is npb.met(empty("nas")) is None
    assert npb.row(None)[2] == npb.row(empty("nas"))[2] == "not measured"
    result = operations(50, 100)
    half = replace(result, series=[each for each in result.series if each.conditions["wire"] == "1g"])
    assert npb.met(half) is False
    assert npb.row(half)[2:4] == ("no figures: wire 10 Gbit/s, MTU 9000", MISSED)
    where = {**UNDER[0], "kernel": "CG"}
    result.series = [each for each in result.series if (each.conditions, each.contender) != (where, NATIVE.name)]
    result.failures.append(Failure(where, NATIVE.name, "broken"))
    assert npb.row(result)[2] == "no figures: wire 1 Gbit/s, MTU 9000, kernel CG"


def test_a_strict_lower_bound():
    ratio = Ratio("tcp_bps", (VETH.name,), NATIVE.name)
    made = empty("streams")
    for kind in (NATIVE, VETH):
        made.add({}, kind.name, {"tcp_bps": 1})
    assert Bar("equal", "streams", (ratio,), at_least=1).met(made)
    strict = Bar("more", "streams", (ratio,), at_least=1, strict=True)
    assert (strict.bound, strict.met(made)) == ("> 1.00x", False)


def test_the_index_has_the_bars():
    text = report.INDEX.read_text()
    assert report.index(text, report.stored(report.PUBLISHED)) == text, "run lab/lab evaluate all --publish"
    results = {"nas": operations(50, 97)}
    filled = report.index(text, results)
    assert "2 of 3 measured bars are met; 14 are not measured." in filled
    assert f"| NPB on 1 and 10 Gbit/s, MTU 9000 / native | \u2265 0.98x | 0.970x with {VETH.name}" in filled
    assert report.index(filled, {}) == report.index(text, {}), "a second time replaces the first"
    with pytest.raises(LabError, match="has no place for the bars"):
        report.index("# Evaluation", results)
    assert bars.summary({}) == "0 of 0 measured bars are met; 17 are not measured."
