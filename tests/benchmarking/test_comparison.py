"""Servers get the same work in turns; ratios are taken round by round; the report stands by itself."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest

from octavo.benchmarking.comparison import Comparison, Level, Sample, compare, ratio_table, ratios
from octavo.benchmarking.options import BenchOptions
from octavo.benchmarking.plots import Series, chart, distribution
from octavo.benchmarking.report import comparison_record, comparison_report
from octavo.benchmarking.session import look_up
from octavo.benchmarking.workload import WordSource
from tests.benchmarking.fake_server import FakeServer, WordTokenizer

WORDS = WordSource(WordTokenizer())
SVG = "{http://www.w3.org/2000/svg}"


def sample(server: str, number: int, throughput: float, ttft: float, level: str = "load") -> Sample:
    result = {
        "num_prompts": 4,
        "failed": 0,
        "output_throughput": throughput,
        "median_ttft_ms": ttft,
        "median_tpot_ms": 5.0,
        "p99_itl_ms": 9.0,
    }
    return Sample(server, level, number, result, {"ttft": [ttft], "itl": [4.0, 5.0, 9.0], "e2el": [50.0]})


def two() -> Comparison:
    ours = [sample("ours", 0, 200, 10), sample("ours", 1, 300, 20), sample("ours", 2, 240, 30)]
    theirs = [sample("<theirs>", 0, 100, 40), sample("<theirs>", 1, 100, 40), sample("<theirs>", 2, 200, 40)]
    return Comparison(["ours", "<theirs>"], ["load"], 3, [*theirs, *ours])


def test_ratios_are_medians_of_the_rounds_with_their_spread() -> None:
    found = {one.key: one for one in ratios(two())}
    rate, wait = found["output_throughput"], found["median_ttft_ms"]
    assert (rate.median, rate.low, rate.high, rate.more_is_better) == (2.0, pytest.approx(1.2), 3.0, True)
    assert (rate.first_median, rate.other_median) == (240, 100)
    assert (wait.median, wait.low, wait.high, wait.more_is_better) == (0.5, 0.25, 0.75, False)
    text = ratio_table(two())
    assert "2.00x  (1.20 to 3.00)" in text
    assert "less is better" in text


async def test_servers_take_turns_on_the_same_work() -> None:
    options = BenchOptions(num_prompts=2, input_len=3, output_len=2)
    order: list[str] = []
    with FakeServer() as a, FakeServer() as b:
        servers = [await look_up(name, one.url, options) for name, one in (("a", a), ("b", b))]
        levels = [Level("one", {"max_concurrency": 1}), Level("two", {"max_concurrency": 2})]
        done = await compare(
            servers, options, WORDS, tokenizer_id="w", rounds=2, levels=levels, progress=False, tell=order.append
        )
    prompts = [[body["prompt"] for body in server.bodies] for server in (a, b)]
    for start in range(0, 8, 2):  # at a higher concurrency requests arrive in any order
        assert sorted(prompts[0][start : start + 2]) == sorted(prompts[1][start : start + 2])
    assert len(set(prompts[0])) == 8
    assert [line.split(":")[1].strip() for line in order] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [one.round for one in done.of("a", "two")] == [0, 1]
    json.dumps(comparison_record(done, {"date": "today"}))
    assert "<svg" in comparison_report(done, {})


class _Links(HTMLParser):
    """What a page would load, and the tags that are open at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") or "url(" in (value or "")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_loads_nothing() -> None:
    about = {"machine": {"cpu": "<CPU>", "physical_cores": 2}, "command": "octavo bench", "date": "2026"}
    page = comparison_report(two(), about)
    parser = _Links()
    parser.feed(page)
    assert parser.loads == []
    assert parser.open == []
    assert "<script" not in page
    assert "<theirs>" not in page
    assert "&lt;theirs&gt;" in page
    assert "2.00&times;" in page
    drawn = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(drawn) == 6  # three against throughput, three distributions
    for one in drawn:
        ET.fromstring(one)


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in ET.fromstring(svg).iter(f"{SVG}circle")]


def test_points_are_where_their_values_say() -> None:
    axes: dict[str, Any] = {"title": "t & t", "x_label": "x", "y_label": "y"}
    (x0, y0), (x1, y1), (x2, y2) = circles(chart([Series("s", [(1, 1), (2, 3), (3, 5)])], **axes))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y2 < y0
    logarithmic = circles(chart([Series("s", [(1, 1), (10, 10), (100, 100), (0, 5)])], x_log=True, y_log=True, **axes))
    assert len(logarithmic) == 3  # zero has no place on a logarithmic axis
    assert logarithmic[1][0] - logarithmic[0][0] == pytest.approx(logarithmic[2][0] - logarithmic[1][0], abs=0.2)


@pytest.mark.parametrize("points", [[], [(5.0, 5.0)], [(1.0, 0.0), (1.0, 0.0)], [(float("nan"), 1.0)], [(1e-9, 1e12)]])
@pytest.mark.parametrize("log", [False, True])
def test_any_points_can_be_drawn(points: list[tuple[float, float]], log: bool) -> None:
    ET.fromstring(chart([Series("s", points)], title="", x_label="", y_label="", x_log=log, y_log=log))


def test_a_distribution_goes_up_to_all_of_them() -> None:
    assert distribution("d", [3.0, 1.0, 2.0, 4.0]).points == [(1.0, 25.0), (2.0, 50.0), (3.0, 75.0), (4.0, 100.0)]
    long = distribution("d", [float(number) for number in range(10_000)]).points
    assert len(long) < 300
    assert long[-1] == (9999.0, 100.0)
