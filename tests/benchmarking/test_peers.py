"""The comparison with other engines: who is compared with whom, what is a target met, and what the machine allows."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
MODULES = ("recording", "peers_engines", "peers_cases", "peers_report", "peers_roofline", "peers", "peers_worker")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scripts, imported from where they are run."""
    pytest.importorskip("psutil")
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = {name: __import__(name) for name in MODULES}
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name)
    return SimpleNamespace(**found)


def _measured(scripts: Any, engine: str, name: str, bits: int, *values: float, kl: float | None = None) -> Any:
    form = scripts.peers_engines.Form(engine, name, bits, Path("model"))
    return scripts.peers_report.Measured(form, values, kl)


def _row(scripts: Any, key: str) -> Any:
    return next(row for group in scripts.peers_cases.GROUPS for row in group.rows if row.key == key)


def test_a_form_is_compared_with_its_class_and_with_lower_classes_only(scripts: Any) -> None:
    everyone = [
        _measured(scripts, "octavo", "w8", 8, 300.0, kl=2e-3),
        _measured(scripts, "a", "int8", 8, 100.0, kl=3e-3),
        _measured(scripts, "a", "int4", 4, 150.0),
        _measured(scripts, "b", "bf16", 16, 200.0, kl=1e-3),
    ]
    (found,) = scripts.peers_report.compare({"decode": everyone}, {})
    assert (found.of_class.form.name, found.fair.form.name, found.of_all.form.name) == ("int8", "int4", "bf16")
    assert found.ratio(found.of_class) == pytest.approx(3.0)
    assert found.met is True  # 1.5 was to be reached
    assert found.record()["of_all"]["ratio"] == pytest.approx(1.5)


def test_quality_that_is_not_up_to_a_class_takes_a_form_out_of_it(scripts: Any) -> None:
    assert _measured(scripts, "a", "bf16", 16, 1.0, kl=2e-3).bits == 8
    assert _measured(scripts, "a", "bf16", 16, 1.0, kl=5e-3).bits == 4
    assert _measured(scripts, "a", "int8", 8, 1.0, kl=4e-3).bits == 8
    assert _measured(scripts, "a", "int8", 8, 1.0).bits == 8  # not known: by the bits of the weights


def test_at_four_bits_a_peer_of_better_quality_is_no_rival(scripts: Any) -> None:
    ours = _measured(scripts, "octavo", "w4", 4, 100.0, kl=3e-3)
    better, worse = (_measured(scripts, "a", name, 4, 90.0, kl=kl) for name, kl in (("fine", 1e-3), ("rough", 0.3)))
    (found,) = scripts.peers_report.compare({"decode": [ours, better, worse]}, {})
    assert found.of_class.form.name == "rough"


def test_a_peer_of_bad_quality_stays_a_rival_at_the_bits_of_its_weights(scripts: Any) -> None:
    ours = [_measured(scripts, "octavo", "w8", 8, 3.0, kl=2e-3), _measured(scripts, "octavo", "w4", 4, 3.0, kl=3e-3)]
    rough = _measured(scripts, "a", "int8", 8, 1.0, kl=8e-3)
    wide, narrow = scripts.peers_report.compare({"decode": [*ours, rough]}, {})
    assert wide.of_class is rough
    assert narrow.of_class is None
    sixteen = _measured(scripts, "a", "bf16", 16, 2.0, kl=2e-3)
    wide, _ = scripts.peers_report.compare({"decode": [*ours, rough, sixteen]}, {})
    assert wide.of_class is sixteen


def test_memory_is_compared_with_the_smallest_peer_and_start_with_nobody(scripts: Any) -> None:
    memory = [
        _measured(scripts, "octavo", "bf16", 16, 500.0),
        _measured(scripts, "a", "bf16", 16, 2000.0),
        _measured(scripts, "a", "int4", 4, 1000.0),
    ]
    start = [_measured(scripts, "octavo", "w4", 4, 0.7)]
    one, two = scripts.peers_report.compare({"memory": memory, "start": start}, {})
    assert (one.peer.form.name, one.met) == ("int4", True)
    assert two.met is False


def test_the_table_shows_spread_target_and_limit(scripts: Any) -> None:
    everyone = [_measured(scripts, "octavo", "bf16", 16, 90.0, 100.0, 110.0), _measured(scripts, "a", "bf16", 16, 50.0)]
    found = scripts.peers_report.compare({"decode": everyone}, {("decode", "octavo bf16"): 125.0})
    line = scripts.peers_report.markdown(found).splitlines()[-1]
    assert "| bf16 | 100 (95–105) | a bf16: 50 (50–50) |" in line
    assert "2.00 (1.90–2.10)" in line
    assert "≥ 1.2: met" in line
    assert "125 (80%)" in line
    assert "| 2.50 |" in line
    page = scripts.peers_report.html(found, "<title>", ["a & b"])
    assert "&lt;title&gt;" in page
    assert "a &amp; b" in page


def test_the_limit_is_that_of_bytes_or_of_operations(scripts: Any) -> None:
    roofline: ModuleType = scripts.peers_roofline
    shape = roofline.Shape(linear=1000, head=100, attention=10)
    slow_memory = roofline.Machine(bytes_s=1000.0, int8_s=1e12, bf16_s=1e12)
    common: dict[str, Any] = {"bits": 8, "weights_bytes": 500.0, "kv_token_bytes": 0.0, "requests": 2}
    assert roofline.limit("decode", shape, slow_memory, **common) == pytest.approx(2.0)
    assert roofline.limit("1b batch", shape, slow_memory, **common) == pytest.approx(640 / 32.0)
    slow_sums = roofline.Machine(bytes_s=1e15, int8_s=2000.0, bf16_s=1000.0)
    seconds = 2 * (1024 * 1000 + 100) / 2000 + 10 * (1024 * 1025 / 2) / 1000
    assert roofline.limit("prefill", shape, slow_sums, **common) == pytest.approx(1024 / seconds)
    assert roofline.limit("memory", shape, slow_sums, **common) == pytest.approx(500 / 2**20)
    assert roofline.limit("start", shape, slow_sums, **common) is None


def test_only_names_groups_and_forms(scripts: Any) -> None:
    forms = [scripts.peers_engines.Form(engine, name, 8, Path("m")) for engine, name in (("octavo", "w8"),
             ("openvino", "int8/bf16"), ("vllm", "bf16"))]  # fmt: skip
    groups = scripts.peers_cases.GROUPS
    (chosen,) = scripts.peers.chosen(groups, forms, [], "batch,octavo,vllm")
    assert chosen[0].key == "batch"
    assert [form.title for form in chosen[1]] == ["octavo w8", "vllm bf16"]
    assert not list(scripts.peers.chosen(groups, forms, [], "1b"))


def test_a_peer_far_behind_its_class_is_not_run_again(scripts: Any) -> None:
    form = scripts.peers_engines.Form
    ours, fast, slow, other = (
        form("octavo", "w8", 8, Path("m")), form("a", "int8", 8, Path("m")), form("b", "Q8", 8, Path("m")),
        form("b", "Q4", 4, Path("m")),
    )  # fmt: skip
    row = scripts.peers_cases.GROUPS[0].rows[0]
    session = scripts.peers.Session(None, None, [], 5, 3, 0.75)
    found = [ours, fast, slow, other]
    assert all(session._has_a_chance(row, each, found, 0) for each in found)
    for each, value in ((ours, 9.0), (fast, 5.0), (slow, 3.0), (other, 1.0)):
        session.values[row.key, each] = [value]
    assert [each for each in found if not session._has_a_chance(row, each, found, 1)] == [slow]
    assert session.dropped == {f"b Q8: {row.key}"}
    session.values[row.key, slow] = [4.0]
    assert session._has_a_chance(row, slow, found, 1)


def test_an_earlier_record_drops_a_peer_from_the_start(scripts: Any, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    values = [{"row": "memory", "form": f"a {name}", "rounds": [value]} for name, value in (("x", 10.0), ("y", 20.0))]
    file.write_text(json.dumps({"values": values}), encoding="utf-8")
    found = [scripts.peers_engines.Form("a", name, 8, Path("m")) for name in ("x", "y")]
    session = scripts.peers.Session(None, None, [], 5, 3, 0.75, known=scripts.peers.known([file]))
    row = _row(scripts, "memory")
    assert [session._has_a_chance(row, each, found, 0) for each in found] == [True, False]


class _OneTokenWords:
    """A tokenizer that knows every word, with and without a space before it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [zlib.crc32(text.encode())]


def test_every_engine_gets_the_same_prompts_in_a_round_and_others_in_the_next(scripts: Any) -> None:
    cases: ModuleType = scripts.peers_cases
    words = cases.Words(_OneTokenWords())
    for group in (group for group in cases.GROUPS if group.key != "start"):
        first, again, later = (cases._pieces(group, words, f"{group.key} {number}") for number in (0, 0, 1))
        assert first == again
        assert first != later
        assert {cases._row_of(piece) for piece in first} | {"memory"} >= {row.key.split()[-1] for row in group.rows}


def test_a_shared_prefix_is_seen_before_only_where_it_is_primed(scripts: Any) -> None:
    cases: ModuleType = scripts.peers_cases
    cold, primed = cases._prefix(cases.Words(_OneTokenWords()), "seed", 3)
    for piece in (cold, primed):
        assert [len(prompt) for prompt in piece["prompts"]] == [544] * 3
        assert len({tuple(prompt[:512]) for prompt in piece["prompts"]}) == 1
        assert len({tuple(prompt[512:]) for prompt in piece["prompts"]}) == 3
    assert cold["before"] == []
    assert primed["before"][0][0][:512] == primed["prompts"][0][:512]


def test_seconds_become_rates(scripts: Any) -> None:
    seconds = {"short 0": 1.0, "long 0": 3.0, "prefill 0": 0.5, "batch": 2.0, "cold": 4.0, "peak_bytes": 2.0**20}
    found = scripts.peers_cases._figures(seconds, 64)
    assert found == {"decode": 64.0, "prefill": 2048.0, "batch": 10240.0, "memory": 1.0, "cold": 1024.0}


def test_an_answer_of_another_length_is_no_measurement(scripts: Any) -> None:
    calls: list[int] = []

    def generate(prompts: Any, tokens: int) -> int:
        calls.append(len(prompts))
        return 6

    piece = {"name": "batch", "before": [[[1]]], "prompts": [[1], [2]], "tokens": 3}
    assert scripts.peers_worker.do(piece, generate)["name"] == "batch"
    assert calls == [1, 2]
    with pytest.raises(SystemExit, match="8 tokens were asked for, 6 came"):
        scripts.peers_worker.do(piece | {"tokens": 4}, generate)
