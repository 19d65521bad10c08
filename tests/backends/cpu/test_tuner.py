"""Tuning a small model: every shape and number of rows gets a choice, and no choice changes a result."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo._native import available_levels
from octavo.backends.cpu import CpuBackend
from octavo.backends.cpu.tiles import BUCKETS, Tile, apply_tiles, buckets_within, shapes_of
from octavo.backends.cpu.tuner import POINTS, Tuner, _Contest
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from octavo.weights.checkpoint import open_checkpoint
from tests.models.tiny import random_tokens


def load(path: Path, **options: Any) -> CpuBackend:
    with closing(open_checkpoint(path)) as checkpoint:
        graph = optimize(build_graph(checkpoint.config))
        settings = {"max_num_batched_tokens": 128, "max_model_len": 128, "num_blocks": 32, "threads": 2}
        return CpuBackend.load(graph, checkpoint, **{**settings, **options})


@pytest.mark.parametrize("form", ["none", "w8", "w4"])
@pytest.mark.parametrize("level", available_levels())
def test_logits_are_equal_whatever_the_tiles(
    tiny_models: dict[str, Path], level: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_ISA", level)
    backend = load(tiny_models["llama"], quantization=form)
    tokens = random_tokens(100, 300, seed=1)
    expected = backend.prompt_logits(tokens)
    rng = random.Random(0)
    for _ in range(10):
        backend.plan.clear_tiles()
        for index, (shape, _, max_rows) in enumerate(shapes_of(backend.plan)):
            for first, last in buckets_within(max_rows):
                columns = 64 * rng.randint(1, -(-shape.columns // 64))
                backend.plan.set_tile(index, first, last, rng.randint(1, 96), columns, rng.randint(1, 2))
        for count in (1, 5, 20, 100):
            found = backend.prompt_logits(tokens[:count])
            np.testing.assert_array_equal(found.view(np.uint32), expected[:count].view(np.uint32))
    backend.close()


def test_every_shape_gets_a_choice_for_the_rows_it_can_have(tiny_models: dict[str, Path]) -> None:
    backend = load(tiny_models["qwen2"], quantization="w8")
    tuner = Tuner(backend.plan, max_model_len=128, num_blocks=32)
    assert tuner.buckets() == list(BUCKETS[:5])
    choices = []
    for bucket in tuner.buckets():
        found, steps = tuner.measure(bucket, 0.1)
        choices += found
        assert bool(steps) == any(choice.tile for choice in found)
        assert {step.rows for step in steps} <= set(POINTS[bucket])
    wanted = {(shape, bucket) for shape, _, most in shapes_of(backend.plan) for bucket in buckets_within(most)}
    assert {(choice.shape, choice.bucket) for choice in choices} == wanted
    assert all(choice.candidates >= 1 for choice in choices)
    assert all((choice.ratio == 1.0) == (choice.tile is None) for choice in choices)
    # What was found can be given to a plan, and the plan was left as it had been.
    measured = {(choice.shape, choice.bucket): choice.tile for choice in choices}
    assert [backend.plan.tile_of(0, rows) for rows in (1, 100)] == [
        load(tiny_models["qwen2"], quantization="w8").plan.tile_of(0, rows) for rows in (1, 100)
    ]
    use = apply_tiles(backend.plan, measured, "a file")
    assert (use.hits, use.misses) == (len(wanted), 0)
    assert str(use) == f"{len(wanted)} of {len(wanted)} tile choices measured, in a file"
    backend.close()


def test_what_was_not_measured_is_counted_as_missing(tiny_models: dict[str, Path]) -> None:
    backend = load(tiny_models["llama"])
    shapes = shapes_of(backend.plan)
    choices = {(shapes[0][0], BUCKETS[0]): Tile(96, 32, 1), (shapes[0][0], BUCKETS[1]): None}
    use = apply_tiles(backend.plan, choices, "a file")
    assert use.hits == 2
    assert use.misses == len({(shape, bucket) for shape, _, most in shapes for bucket in buckets_within(most)}) - 2
    assert backend.plan.tile_of(0, 1) == (1, 32, 1)
    backend.close()


def test_a_choice_that_does_not_fit_is_taken_by_no_plan(
    tiny_models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    backend = load(tiny_models["llama"])
    shape = shapes_of(backend.plan)[0][0]
    built_in = backend.plan.tile_of(0, 1)
    choices = {(shape, BUCKETS[0]): Tile(96, 32, 1), (shape, BUCKETS[1]): Tile(4096, 32, 1)}
    use = backend.tune(choices, "a file")
    assert (use.source, use.hits) == ("", 0)
    assert use.misses > 0
    assert backend.plan.tile_of(0, 1) == built_in
    assert "a file is damaged and not used (row_tile of a tile must be 1 to 96, got 4096)" in caplog.text
    backend.close()


class TestContest:
    """Who wins is told by times alone."""

    FAST, SLOW, UNEVEN = Tile(96, 64, 1), Tile(48, 64, 1), Tile(24, 64, 1)

    def contest(self, times: dict[Tile | None, tuple[float, float]], samples: int = 3) -> _Contest:
        contest = _Contest([0], (1, 8), [self.FAST, self.SLOW, self.UNEVEN])
        for tile, (one, eight) in times.items():
            contest.times[tile, 1] = [one] * samples
            contest.times[tile, 8] = [eight] * samples
        return contest

    def test_the_fastest_over_all_rows_wins(self) -> None:
        found = self.contest({None: (1, 2), self.FAST: (0.9, 1.8), self.SLOW: (1.1, 2.0), self.UNEVEN: (0.95, 1.9)})
        tile, ratio = found.winner()
        assert tile == self.FAST
        assert ratio == pytest.approx(0.9)

    def test_one_that_is_slower_at_some_rows_does_not(self) -> None:
        assert self.contest({None: (1, 2), self.UNEVEN: (0.5, 2.1), self.SLOW: (1, 2)}).winner() == (None, 1.0)

    def test_the_built_in_choice_stays_where_nothing_is_clearly_faster(self) -> None:
        assert self.contest({None: (1, 2), self.FAST: (0.985, 1.97)}).winner() == (None, 1.0)

    def test_too_few_measurements_tell_nothing(self) -> None:
        assert self.contest({None: (1, 2), self.FAST: (0.5, 1)}, samples=2).winner() == (None, 1.0)

    def test_the_best_go_on_with_fresh_times(self) -> None:
        contest = self.contest({None: (1, 2), self.FAST: (0.9, 1.8), self.SLOW: (1.1, 2.0)})
        contest.keep(1)
        assert contest.running == [None, self.FAST]
        assert contest.winner() == (None, 1.0)

    def test_turns_are_shared_out_evenly(self) -> None:
        contest, chance = self.contest({}), random.Random(0)
        turns = [contest.next(1, chance) for _ in range(40)]
        assert all(turns.count(tile) == 10 for tile in contest.running)
