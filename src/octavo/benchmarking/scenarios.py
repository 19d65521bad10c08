"""Loads that stand for a use: each is a set of options, any of which can still be given otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SCENARIOS", "Scenario"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A use, in words and in options."""

    about: str
    options: Mapping[str, Any]


SCENARIOS: dict[str, Scenario] = {
    "chat": Scenario(
        "people who chat: questions of very different lengths arrive at random; the first word should come in half a "
        "second and the others faster than one reads",
        {
            "backend": "openai-chat",
            "dataset_name": "random",
            "num_prompts": 100,
            "random_input_len": 256,
            "random_output_len": 128,
            "random_range_ratio": 0.75,
            "request_rate": 2.0,
            "max_concurrency": 32,
            "goodput": ("ttft:500", "tpot:100"),
            "ignore_eos": True,
        },
    ),
    "rag": Scenario(
        "questions about a few long documents: each prompt begins with one of them",
        {
            "dataset_name": "prefix_repetition",
            "num_prompts": 64,
            "prefix_repetition_prefix_len": 1024,
            "prefix_repetition_suffix_len": 48,
            "prefix_repetition_num_prefixes": 4,
            "prefix_repetition_output_len": 96,
            "max_concurrency": 16,
            "ignore_eos": True,
        },
    ),
    "batch": Scenario(
        "documents worked off over night: all sent at once, only the throughput counts",
        {
            "dataset_name": "random",
            "num_prompts": 128,
            "random_input_len": 512,
            "random_output_len": 64,
            "random_range_ratio": 0.5,
            "ignore_eos": True,
        },
    ),
    "long-context": Scenario(
        "long prompts, few at a time",
        {
            "dataset_name": "random",
            "num_prompts": 8,
            "random_input_len": 6000,
            "random_output_len": 128,
            "max_concurrency": 2,
            "ignore_eos": True,
        },
    ),
    "agents": Scenario(
        "agents that share their instructions and call the model again and again, each prompt being the one before "
        "with the answer and a tool's result",
        {
            "dataset_name": "agents",
            "num_prompts": 60,
            "agent_steps": 6,
            "random_prefix_len": 512,
            "random_input_len": 128,
            "random_output_len": 48,
            "max_concurrency": 8,
            "ignore_eos": True,
        },
    ),
    "voice": Scenario(
        "spoken dialogue: short turns; speech needs its first word within 300 ms and then never falls behind, 80 ms a "
        "token being about twice as fast as one speaks",
        {
            "backend": "openai-chat",
            "dataset_name": "random",
            "num_prompts": 80,
            "random_prefix_len": 192,
            "random_input_len": 48,
            "random_output_len": 48,
            "random_range_ratio": 0.5,
            "request_rate": 2.0,
            "burstiness": 2.0,
            "max_concurrency": 16,
            "percentile_metrics": "ttft,tpot,itl,e2el",
            "goodput": ("ttft:300", "tpot:80"),
            "ignore_eos": True,
        },
    ),
}
