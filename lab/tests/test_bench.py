"""Unit tests of the bench: medians, spreads, differences, parsing of programs' output, tables, plots, configuration."""

import json
import tomllib
from pathlib import Path

import pytest

from vnetlab import daemon, lab
from vnetlab.bench import (
    bars,
    command,
    interconnect,
    kinds,
    mpi,
    pages,
    plot,
    report,
    runner,
    share,
    sockets,
    suite,
    usage,
    vhost,
    workload,
)
from vnetlab.bench.case import Options
from vnetlab.bench.compare import Difference
from vnetlab.bench.contenders import TAP, VNET, Vnet
from vnetlab.bench.result import METRICS, Failure, Result, Series, difference_p, percentile, smallest_p
from vnetlab.bench.suite import BENCHES
from vnetlab.run import LabError
from vnetlab.topology import Settings, Topology, Wire

FAST = {"wire": "none", "MTU": 1500}
SLOW = {"wire": "1g", "MTU": 1500}


@pytest.fixture
def result() -> Result:
    made = Result("tcp", "lab/lab bench tcp", "2026-01-02 03:04 UTC", 3, quick=False, machine={}, versions={})
    for gigabits in (14.0, 10.0, 12.0):
        made.add(FAST, "vnet", {"tcp_bps": gigabits * 1e9, "system_cores": 1.5})
    made.add(SLOW, "vnet", {"tcp_bps": 0.94e9})
    made.failures.append(Failure(dict(FAST), "tinc", "tincd is not installed"))
    made.failures.append(Failure(dict(SLOW), "tinc", "tincd is not installed"))
    return made


def test_median_and_spread(result: Result):
    series = result.find(FAST, "vnet", "tcp_bps")
    assert (series.median, series.spread) == (12e9, (10e9, 14e9))
    assert report.figure(series) == "12.00 (10.00\u201314.00)"
    assert result.find(FAST, "tinc", "tcp_bps") is None


def test_percentile_is_by_nearest_rank():
    values = list(range(1000, 0, -1))
    assert [percentile(values, share) for share in (0.5, 0.99, 0.999, 1)] == [500, 990, 999, 1000]
    assert percentile([7], 0.001) == 7


def test_difference_by_chance():
    assert difference_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert difference_p([1, 3, 5, 7, 9], [2, 4, 6, 8, 10]) > 0.5
    assert difference_p([1, 1, 1], [1, 1, 1]) == 1
    assert difference_p([5, 6], [1, 2]) == smallest_p(2, 2) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("metric", "one", "other", "verdict"),
    [
        ("tcp_bps", [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], "BETTER"),
        ("tcp_bps", [6, 7, 8, 9, 10], [1, 2, 3, 4, 5], "WORSE"),
        ("ping_median_us", [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], "WORSE"),
        ("tcp_bps", [1, 3, 5, 7, 9], [2, 4, 6, 8, 10], "within the noise"),
        ("tcp_bps", [1, 2], [8, 9], "too few rounds to tell"),
    ],
)
def test_verdict(metric: str, one: list[float], other: list[float], verdict: str):
    assert Difference(FAST, Series(FAST, "a", metric, one), Series(FAST, "b", metric, other)).verdict == verdict


def test_result_is_read_as_it_was_written(result: Result, tmp_path: Path):
    path = tmp_path / "deep" / "tcp.json"
    result.write(path)
    assert Result.read(path) == result
    first = json.loads(path.read_text())["series"][0]
    assert (first["median"], first["min"], first["max"], first["unit"]) == (12e9, 10e9, 14e9, "bit/s")


def test_tables(result: Result):
    text = report.table(result)
    assert "wire unlimited, MTU 1500" in text
    assert "12.00 (10.00\u201314.00)" in text
    page = report.page(result, "TCP")
    assert page.startswith("# TCP\n"), "the bench's title"
    assert "| wire 1 Gbit/s, MTU 1500 | vnet | 0.94 (0.94\u20130.94) |\n" in page, (
        "a table of its own, without empty columns"
    )
    assert page.count("| conditions | contender |") == 2
    assert page.count("tincd is not installed") == 1, "each reason appears once, with all its conditions"
    assert "`lab/lab bench tcp`, 2026-01-02 03:04 UTC, 3 rounds" in page
    assert "![TCP](tcp.svg)" in page
    assert "QUICK" not in page
    result.quick = True
    assert "QUICK" in report.page(result, "TCP")


def test_only_the_marked_table_is_replaced():
    page = Path("x.md")
    text = "before\n<!-- bars: begin (do not edit) -->\nold\nold\n<!-- bars: end -->\nafter\n"
    replaced = pages.replace(page, text, {"bars": "new"})
    assert replaced == "before\n<!-- bars: begin (do not edit) -->\nnew\n<!-- bars: end -->\nafter\n"
    assert pages.replace(page, replaced, {"bars": "new"}) == replaced
    for broken in (text.replace("<!-- bars: end -->", ""), text + text, ""):
        with pytest.raises(LabError, match="not one"):
            pages.replace(page, broken, {"bars": "new"})


def test_published_pages_are_what_their_results_give():
    """`lab/lab bench publish` would change no page."""
    results = pages.stored()
    assert results, "there are stored results"
    for path, text in pages.texts(results):
        assert path.read_text() == text, f"{path} is not what docs/measurements/*.json give: run lab/lab bench publish"
    assert {path.stem for path in pages.FOLDER.iterdir()} == set(results), "no page or plot without its result"
    for name, result in results.items():
        assert not result.quick, f"{name}: a quick run is not published"
        assert {path.suffix for path in pages.FOLDER.glob(f"{name}.*")} == {".json", ".md", ".svg", ".png"}
    lines = (pages.REPOSITORY / "docs" / "performance.md").read_text().splitlines()
    assert sum(not line.startswith("|") for line in lines) <= 60, "short, except for its tables"


def test_bars(result: Result):
    result.add(FAST, "native", {"tcp_bps": 15e9})
    vnet, native = (bars.Cell("tcp", FAST, name, "tcp_bps") for name in ("vnet", "native"))
    results = {"tcp": result}
    assert bars.Bar("TCP", vnet, at_least=0.8, base=native).met(results)
    missed = bars.Bar("TCP", vnet, at_least=0.9, base=native, cause="slow")
    assert missed.row(results) == [
        "TCP: \u2265 0.9x",
        "0.80x (12.00 / 15.00 Gbit/s)",
        "**not met**: slow",
        "[tcp](measurements/tcp.md)",
    ]
    assert bars.Bar("TCP", vnet, at_least=12).row(results)[:3] == ["TCP: \u2265 12 Gbit/s", "12.00 Gbit/s", "met"]
    assert not bars.Bar("TCP", vnet, at_most=11).met(results)
    with pytest.raises(KeyError, match="nobody"):
        bars.Cell("tcp", FAST, "nobody", "tcp_bps").value(results)


def test_bars_of_differences_and_of_several_conditions(result: Result):
    for size, (vnet, native) in {1: (8.0, 7.0), 64: (9.5, 7.5)}.items():
        result.add(FAST | {"bytes": size}, "vnet", {"oneway_us": vnet})
        result.add(FAST | {"bytes": size}, "native", {"oneway_us": native})
    results = {"tcp": result}

    def bar(size: int, bound: float, *, apart: bool) -> bars.Bar:
        vnet, native = (bars.Cell("tcp", FAST | {"bytes": size}, name, "oneway_us") for name in ("vnet", "native"))
        return bars.Bar(f"{size} B", vnet, at_most=bound, base=native, apart=apart)

    assert bar(64, 2, apart=True).row(results)[:3] == ["64 B: \u2264 +2 us", "+2.0 us (9.5 / 7.5 us)", "met"]
    assert not bar(64, 1.5, apart=True).met(results)
    sizes = bars.Worst("messages", tuple(bar(size, 1.2, apart=False) for size in (1, 64, 4096)), "slow")
    assert sizes.row(results) == [
        "messages: \u2264 1.2x",
        "1.27x (9.5 / 7.5 us), 64 B: the worst of 2",
        "**not met**: slow",
        "[tcp](measurements/tcp.md)",
    ]
    result.failures.append(Failure(FAST | {"bytes": 4096}, "native", "hpcc is not installed"))
    assert sizes.row(results)[1:3] == ["\N{EN DASH}", "**not met**: 4096 B: no figure of vnet"]


def test_bars_of_results_that_lack_something(result: Result):
    """Older results know one vnet, by TAP; benches without a stored result do not prevent a table."""
    of = {name: bars.Bar("TCP", bars.Cell("tcp", FAST, name, "tcp_bps"), at_least=11) for name in (bars.VNET, bars.TAP)}
    others = bars.Bar("HPCC", bars.Cell("mpi", FAST, bars.VNET, "fft_flops"), at_least=1)
    by_kernel = bars.Group("kernel", (of[bars.VNET], others), contender=bars.TAP)
    results = {"tcp": result}
    assert of[bars.TAP].met(results), "the older name"
    assert by_kernel.text(results) == [
        "**kernel**: 0 of 0 measured bars are met. Not measured yet: 1 by `lab bench tcp`, 1 by `lab bench mpi`."
    ]
    result.add(FAST, bars.TAP, {"tcp_bps": 9e9})
    assert not of[bars.TAP].met(results)
    assert (
        by_kernel.text(results)[0]
        == "**kernel**: 1 of 1 measured bars are met. Not measured yet: 1 by `lab bench mpi`."
    )


def test_bars_compare_what_the_benches_measure():
    cases = {name: suite.cases(bench, Options(wires=tuple(Wire))) for name, bench in BENCHES.items()}
    for cell in (cell for group in bars.GROUPS for bar in group.bars for cell in bar.cells):
        turns = [case.turns for case in cases[cell.bench] if case.conditions == cell.conditions]
        assert cell.contender in {turn.contender for each in turns for turn in each}, cell
        assert cell.metric in METRICS


def test_plots(result: Result, tmp_path: Path):
    pytest.importorskip("matplotlib")
    paths = plot.draw(result, "TCP", ("tcp_bps", "ping_median_us"), "", tmp_path)
    assert [path.name for path in paths] == ["tcp.svg", "tcp.png"]
    assert all(path.stat().st_size > 1000 for path in paths)
    before = paths[0].read_bytes()
    plot.draw(result, "TCP", ("tcp_bps", "ping_median_us"), "", tmp_path)
    assert paths[0].read_bytes() == before, "the same figures give the same file"
    assert plot.draw(result, "TCP", ("rss_bytes",), "", tmp_path) == []


def test_plot_over_an_axis(tmp_path: Path):
    pytest.importorskip("matplotlib")
    made = Result("scale", "", "", 1, quick=False, machine={}, versions={})
    for routes in (10, 1000):
        made.add({"routes": routes}, "vnet", {"cached_ns": 30})
    made.add({"interfaces": 4}, "vnet", {"tcp_bps": 1e9})
    assert plot.draw(made, "Scale", ("cached_ns",), "routes", tmp_path)
    made.add({"routes": 10, "MTU": 9000}, "vnet", {"cached_ns": 40})
    made.add({"load": "all"}, "vnet", {"bytes_a_route": 100})
    assert plot.draw(made, "Scale", ("cached_ns", "bytes_a_route"), "routes", tmp_path), "lines by MTU, then bars"


def test_programs_output():
    sockperf = (
        "sockperf: ---> percentile 99.900 =   46.398\nsockperf: ---> percentile 99.000 =   18.817\n"
        "sockperf: ---> percentile 50.000 =   14.791\n"
    )
    ranks = {"tcp_median_us": 14.791, "tcp_p99_us": 18.817, "tcp_p99.9_us": 46.398}
    assert workload.sockperf_ranks(sockperf) == ranks
    with pytest.raises(LabError, match="no percentiles"):
        workload.sockperf_ranks("sockperf: connection refused")
    testpmd = "  Rx-pps:      5374123          Rx-bps:   2751550976\n  Rx-pps:            0  Rx-bps: 0\n"
    assert vhost.pps(testpmd) == [5374123, 0]
    assert usage.busy_s("cpu  100 10 50 1000 7 1 2 3 0 0\ncpu0 1 1 1 1\n") == pytest.approx(166 * usage.TICK_S)


def test_figures_of_the_challenge():
    """Parses a report of the HPC Challenge suite, and checks the suite's input file, which has 36 fixed lines."""
    summary = "".join(f"{name}=1.5e-01\n" for name, _ in mpi.CHALLENGE.values())
    report = f"Begin of Summary section.\nVersionMajor=1\nSuccess=1\n{summary}MPIFFT_N=1024\nEnd of Summary section.\n"
    found = mpi.challenge_figures(report)
    assert set(found) == set(mpi.CHALLENGE) <= set(METRICS)
    assert (found["pingpong_latency_us"], found["ptrans_bytes_per_s"]) == (0.15, 0.15e9)
    for broken in (report.replace("Success=1", "Success=0"), "hpcc: mpirun could not start it"):
        with pytest.raises(LabError, match="no figures"):
            mpi.challenge_figures(broken)
    lines = mpi.challenge_input(1000).splitlines()
    assert (len(lines), lines[5], lines[12]) == (36, "1000", "16.0")


def test_mpi_has_sizes_and_the_suite():
    """Messages on the unlimited wire, the suite on all."""
    found = suite.cases(BENCHES["mpi"], Options(mtus=(1500,)))
    sizes = [case.conditions["bytes"] for case in found if "bytes" in case.conditions]
    assert sizes == list(mpi.MESSAGE_BYTES)
    suites = [case.conditions["wire"] for case in found if case.conditions.get("load") == "HPC Challenge"]
    assert suites == list(Wire)
    assert len(found) == len(sizes) + len(suites)
    names = [turn.contender for turn in found[0].turns]
    assert names == ["native", "kernel VXLAN, device", "kernel VXLAN, containers", "vnet", "vnet, TAP"]


def test_checks_of_the_challenge():
    good = "Found 0 errors in 1024 locations (passed).\n1 tests completed and passed residual checks,\n"
    good += "0 tests completed and failed residual checks,\n"
    mpi.challenge_checks(good)
    for broken in (
        good.replace("Found 0", "Found 7"),
        good.replace("0 tests", "2 tests"),
        good + "PTRANS ... FAILED\n",
    ):
        with pytest.raises(LabError, match="wrong results"):
            mpi.challenge_checks(broken)


def test_share_of_the_way():
    """Combines two captures of one ping; a ping that a capture missed yields no figure."""
    here = "1.000100 IP 10.77.1.101 > 10.77.2.101: ICMP echo request, id 7, seq 1, length 64\n"
    here += "1.000900 IP 10.77.2.101 > 10.77.1.101: ICMP echo reply, id 7, seq 1, length 64\n"
    there = here.replace("1.000100", "1.000160").replace("1.000900", "1.000850")
    near, far = share.times(here), share.times(there)
    assert share.way_us(near, far, 1) == pytest.approx(60 + 50)
    assert share.way_us(near, far, 2) is None


@pytest.mark.parametrize("link", [False, True])
def test_configuration_of_a_switch(link: bool):
    vnet = Vnet("x", (("yield", "block"),), dispatchers=2)
    switch = vhost.VnetSwitch(vnet, link=link)
    host = Topology(Settings(name="bench", vms=0, containers=0)).hosts[0]
    read = tomllib.loads(switch.configuration(host, [Path("/a"), Path("/b")]))
    assert read["dispatch"] == {"yield": "block", "threads": 2, "cpus": [0, 0]}
    assert read["bridge"]["ports"] == 2
    assert all(each["ports"] == 2 for each in read.get("link", []))
    assert [each["socket"] for each in read["interface"]] == (["/a"] if link else ["/a", "/b"])
    there = "link there" if link else "interface v1"
    rules = [{"dst": "any", "from": a, "to": b} for a, b in (("interface v0", there), (there, "interface v0"))]
    assert read["route"] == rules


def test_configuration_of_containers():
    for vnet, kind in ((TAP, "tap"), (VNET, "veth")):
        topology = vnet.topology(Topology(Settings(name="bench", vms=0)))
        read = tomllib.loads(daemon.configuration(topology, topology.hosts[0]))
        assert [each["kind"] for each in read["interface"]] == [kind]


@pytest.mark.parametrize("hosts", [1, 2])
def test_containers_of_both_kinds(hosts: int):
    """Contenders with containers of one host and of two: each connects them, on the path that its name says."""
    topology = lab.prepare(Settings(name="test-bench", hosts=hosts, containers=3 - hosts, vms=0))
    try:
        for vnet, path in ((VNET, "kernel"), (TAP, "vnetd")):
            with vnet.up(topology) as ends:
                workload.meet(ends)
                assert {port["path"] for port in daemon.ask(topology.hosts[0], "interface", "list")} == {path}
                assert sockets.mtu(ends.source, ends.destination.address) == 1500
                sample = interconnect.writes(ends, 0.2)
                assert sample["goodput_bps"] > 0
                assert set(sample) <= set(METRICS)
        if hosts == 1:
            with kinds.BRIDGE.up(topology) as ends:
                workload.meet(ends)
    finally:
        lab.down("test-bench")


def test_every_bench_has_cases_with_metrics_that_are_known():
    for bench in BENCHES.values():
        found = suite.cases(bench, Options())
        assert all(case.turns for case in found), bench.name
        assert set(bench.plotted) <= set(METRICS)
        assert suite.cases(bench, Options(vnets=(VNET, Vnet("other")))), "can be compared"
        names = [turn.contender for turn in found[0].turns]
        assert len(set(names)) == len(names), "names tell contenders apart"


def test_choosing_cases_and_contenders():
    tcp = BENCHES["tcp"]
    assert len(suite.cases(tcp, Options())) == 6
    (case,) = suite.cases(tcp, Options(wires=("1g",), mtus=(9000,), contenders=("native", "tinc")))
    assert case.conditions == {"wire": "1g", "MTU": 9000}
    assert [turn.contender for turn in case.turns] == ["native", "tinc"]
    (case,) = suite.cases(tcp, Options(wires=("1g",), mtus=(9000,), contenders=("vnet",)))
    assert [turn.contender for turn in case.turns] == ["vnet"], "not every variant of it"
    with pytest.raises(LabError, match="no contender like"):
        suite.cases(tcp, Options(contenders=("nobody",)))


def test_epilog_names_every_bench():
    assert all(name in command.EPILOG for name in BENCHES)


def test_a_recorded_command_names_no_file_of_the_machine():
    words = ["bench", "tcp", "--json", "/tmp/a", "--publish", "--json=/tmp/b", "--contender", "vnet, TAP"]
    assert runner.recorded(words) == "lab/lab bench tcp --publish --contender 'vnet, TAP'"
