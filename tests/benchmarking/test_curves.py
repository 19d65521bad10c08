"""The cost curves: exponents worked out by hand, and the engine's own curves at small sizes, drawn on a page."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported from where it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import curves

    assert Path(str(curves.__file__)).parent == Path(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "curves")
    return curves


def test_growth_is_that_of_the_cost(curves: ModuleType) -> None:
    times = curves.Curve("t", "t", "x", "seconds", {"square": [(1, 5.0), (10, 1.0), (100, 100.0), (1000, 10_000.0)]})
    assert times.growth("square") == pytest.approx(2.0)  # over the last three points
    rates = curves.Curve("r", "r", "x", "tokens/s", {"even": [(1, 10.0), (8, 10.0)], "one": [(4, 2.0)]}, rate=True)
    assert rates.growth("even") == pytest.approx(0.0)
    assert rates.growth("one") is None
    rates.values["worse"] = [(1, 10.0), (4, 5.0)]
    assert rates.growth("worse") == pytest.approx(0.5)


def test_sizes_beyond_the_model_end_at_its_limit(curves: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves.within((128, 1024, 8192, 32768), 8128, "context") == [128, 1024, 8128]
    assert curves.within((128, 1024), 8128, "context") == [128, 1024]
    assert curves.within((128, 8000, 9000), 8128, "context") == [128, 8000]
    assert "context: this model ends at 8128" in capsys.readouterr().out


def test_the_engines_own_curves_are_measured_and_drawn(curves: ModuleType) -> None:
    sizes = curves.Sizes(waiting=(1, 40), cached=(512, 1024), engine_steps=5)
    found = [*curves.measure_waiting(None, sizes), *curves.measure_cached(None, sizes)]
    assert [curve.name for curve in found] == ["waiting", "arrive", "cached"]
    for curve in found:
        assert all(len(points) == 2 and all(value > 0 for _, value in points) for points in curve.values.values())
        ET.fromstring(curve.svg())
        assert curve.record()["lines"].keys() == curve.values.keys()
    page = curves.page(found, "<title>")
    assert page.count("<svg") == 3
    assert "&lt;title&gt;" in page
