"""Records of speed find the newest record of quality of the same model and form, or say why there is none."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.benchmarking.quality import peer_quality, recorded_quality
from octavo.benchmarking.record import make_record

# An installed octavo has no records beside it; those of this tree are meant.
RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"
FIGURES = {"p99_kl": 0.1, "top1": 0.9, "positions": 512}


def _write(folder: Path, name: str, **record: object) -> None:
    (folder / f"quality-{name}.json").write_text(json.dumps(record), encoding="utf-8")


def test_the_newest_record_of_the_same_model_and_form_counts(tmp_path: Path) -> None:
    for name, date, form, kl in (("old", "2026-01-01", "w8", 3e-3), ("new", "2026-01-02", "w8", 2e-3),
                                 ("other", "2026-01-03", "w4", 9e-3)):  # fmt: skip
        _write(tmp_path, name, date=date, model_sha256="abc", form=form, mean_kl=kl, **FIGURES)
    found = recorded_quality("abc", "w8", folder=tmp_path)
    assert (found["mean_kl"], found["record"], found["date"]) == (2e-3, "quality-new.json", "2026-01-02")
    assert found["top1"] == 0.9
    for kind, counts in (("int8", False), ("bf16", True)):
        _write(
            tmp_path,
            kind,
            date="2026-01-04",
            model_sha256="abc",
            form="w8",
            mean_kl=1e-3,
            kv_cache_dtype=kind,
            **FIGURES,
        )
        assert (recorded_quality("abc", "w8", folder=tmp_path)["mean_kl"] == 1e-3) == counts


def test_without_a_record_there_is_a_reason(tmp_path: Path) -> None:
    _write(tmp_path, "stored", date="2026-01-01", model_sha256="abc", form="as stored", mean_kl=1e-4, **FIGURES)
    assert recorded_quality("abc", None, folder=tmp_path)["mean_kl"] == 1e-4
    missing = recorded_quality("abc", "w4", folder=tmp_path)
    assert missing["mean_kl"] is None
    assert "'w4'" in missing["reason"]
    assert "no folder" in recorded_quality("abc", "w4", folder=tmp_path / "none")["reason"]


def test_other_engines_have_several_forms_in_a_record(tmp_path: Path) -> None:
    _write(tmp_path, "peer", date="2026-01-01", engine="other", forms={"int4": {"mean_kl": 0.3, **FIGURES}})
    assert peer_quality("other", "int4", folder=tmp_path)["mean_kl"] == 0.3
    assert "other int8" in peer_quality("other", "int8", folder=tmp_path)["reason"]


def test_the_records_of_this_tree_can_be_read() -> None:
    assert any(RECORDS.glob("quality-*.json"))
    assert peer_quality("llama.cpp", "Q8_0", folder=RECORDS)["mean_kl"] > 0


def test_a_measurement_without_a_model_says_so() -> None:
    record = make_record("machine", {"figure": 1.0}, threads=1)
    assert record["quality"] == {"mean_kl": None, "reason": "no model was run"}
    assert make_record("prefill", {}, threads=1, quality={"mean_kl": 1.0})["quality"] == {"mean_kl": 1.0}
