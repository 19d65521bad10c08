"""The pace of steps: the budget follows the measured speed within its bounds, and binds only beside decodes."""

from __future__ import annotations

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.pace import StepPace
from octavo.errors import ConfigError
from tests.engine.fakes import greedy, make_engine, prompt_of, request


def test_the_budget_follows_the_speed_within_its_bounds() -> None:
    pace = StepPace(0.2, 2048, 80)
    assert pace.budget == 2048
    pace.note(1000, 1.0)
    assert pace.budget == 200
    for _ in range(50):
        pace.note(1000, 0.01)
    assert pace.budget == 2048
    for _ in range(50):
        pace.note(1000, 1000.0)
    assert pace.budget == 80


def test_small_steps_teach_nothing() -> None:
    pace = StepPace(0.2, 2048, 80)
    pace.note(8, 1.0)
    assert pace.budget == 2048


def test_a_prompt_is_cut_smaller_only_while_something_is_decoded() -> None:
    engine, _ = make_engine(400, max_model_len=4000, max_num_batched_tokens=1024, max_num_seqs=4, max_step_seconds=1.0)
    pace = engine.scheduler.pace
    assert pace is not None
    engine.add(request("short", prompt_of(8), greedy(50)))
    engine.step()
    pace.budget = 100
    pace.note = lambda tokens, seconds: None  # type: ignore[method-assign]
    engine.add(request("long", prompt_of(2000, 1), greedy(2)))
    engine.step()
    stats = engine.stats()
    assert (stats.step_prefill_tokens, stats.step_decode_tokens) == (99, 1)
    engine.abort("short")
    engine.step()
    assert engine.stats().step_prefill_tokens == 1024


def test_a_pace_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_step_seconds"):
        EngineConfig(num_blocks=1, max_model_len=16, max_step_seconds=0.0)
