"""The determinism contract on the real model: a request's bits do not depend on the load, the settings or the cache."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.smollm2 import Ask, Bits, Form, ask, mixed_load

LOAD = mixed_load()


@pytest.fixture(scope="module")
def alone(form: Form) -> list[Bits]:
    """The answers when every request has the engine to itself, without a prefix cache, on one thread."""
    with form.load(enable_prefix_caching=False, threads=1) as llm:
        return [bits for each in LOAD for bits in ask(llm, [each])]


def differing(expected: list[Bits], found: list[Bits]) -> list[int]:
    return [index for index, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b]


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "threads": 1},
        {"max_num_batched_tokens": 2048},
    ],
    ids=["budget16", "budget64", "budget2048"],
)
def test_answers_are_the_same_alone_and_together(form: Form, alone: list[Bits], options: dict[str, Any]) -> None:
    with form.load(enable_prefix_caching=False, **options) as llm:
        assert differing(alone, ask(llm, LOAD)) == []


def test_answers_are_the_same_in_any_order_with_a_cold_and_a_warm_prefix_cache(form: Form, alone: list[Bits]) -> None:
    order = list(range(len(LOAD)))
    random.Random(1).shuffle(order)
    with form.load() as llm:
        for state in ("cold", "warm"):
            found = ask(llm, [LOAD[index] for index in order])
            assert differing([alone[index] for index in order], found) == [], state
            assert llm.stats().counters.prefix_hits > 0


def test_answers_are_the_same_after_preemptions(form: Form) -> None:
    # Answers far longer than prompts: 18 blocks are soon full, and the youngest are evicted again and again.
    load = [Ask(each.prompt_ids[:20], each.params.clone(max_tokens=90)) for each in LOAD[:8]]
    with form.load(enable_prefix_caching=False, threads=1) as llm:
        expected = [bits for each in load for bits in ask(llm, [each])]
    with form.load(num_gpu_blocks_override=18, max_model_len=256) as llm:
        assert differing(expected, ask(llm, load)) == []
        assert llm.stats().counters.preemptions > 0
