"""What the measurements of a model share: their options, and starting the engine for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.benchmarking.workload import random_prompts
from octavo.cli import options as opt
from octavo.cli.profile import print_profile
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM
    from octavo.sampling.params import SamplingParams

__all__ = [
    "AsJson",
    "InputLen",
    "OutputLen",
    "Profile",
    "Rounds",
    "about_model",
    "form_name",
    "greedy",
    "measure",
    "prompts",
    "start",
]

Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Rounds to measure, after one that is not counted.")]
InputLen = Annotated[int, typer.Option("--input-len", min=1, help="Tokens of each prompt (random words).")]
OutputLen = Annotated[int, typer.Option("--output-len", min=1, help="Tokens generated for each prompt.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")]
Profile = Annotated[
    bool,
    typer.Option("--profile", help="Print where the time went, by phase and operation, and keep it in the record."),
]

Prompt = dict[str, list[int]]


def start(
    model: str,
    quantization: opt.Quantization | None,
    threads: int | None,
    *,
    length: int,
    profile: bool,
    max_num_seqs: int = 1,
) -> LLM:
    """Start an engine and check that it can hold ``length`` tokens a sequence."""
    llm = opt.load_llm(model, quantization=quantization, threads=threads, max_num_seqs=max_num_seqs, profile=profile)
    if length > llm.max_model_len:
        limit = llm.max_model_len
        llm.close()
        raise ConfigError(
            f"--input-len plus --output-len must be at most {limit} (the longest the model takes here), got {length}"
        )
    return llm


def measure(llm: LLM, rounds: int, one: Callable[[int], dict[str, float]], *, profile: bool) -> dict[str, Any]:
    """The figures of ``rounds`` rounds after one that is not counted, and their profile if wanted; frees the engine.

    ``one`` runs a round on the seed it is given.
    """
    from octavo.benchmarking.record import median_of_rounds

    try:
        llm.wait_for_memory()
        one(0)
        if profile:
            llm.reset_profile()
        figures = median_of_rounds([one(seed) for seed in range(1, rounds + 1)])
        if profile:
            figures["profile"] = print_profile(llm)
    finally:
        llm.close()
    return figures


def prompts(llm: LLM, count: int, length: int, *, seed: int) -> list[Prompt]:
    """Random-word prompts; another seed each round keeps the prefix cache out of the figures."""
    return [{"prompt_token_ids": ids} for ids in random_prompts(llm.get_tokenizer(), count, length, seed=seed)]


def greedy(output_len: int) -> SamplingParams:
    """Exactly ``output_len`` tokens, always the likeliest."""
    from octavo.sampling.params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def about_model(model: str, quantization: opt.Quantization | None) -> dict[str, Any]:
    """Which model it was, in which form, and how far that is from float32, as recorded."""
    from octavo.benchmarking.quality import recorded_quality
    from octavo.benchmarking.record import model_sha256
    from octavo.weights.hub import resolve_model

    digest = model_sha256(resolve_model(model))
    quality = recorded_quality(digest, None if quantization is None else quantization.value)
    return {"model": model, "model_sha256": digest, "form": form_name(quantization), "quality": quality}


def form_name(quantization: opt.Quantization | None) -> str:
    """The weight form as recorded."""
    return quantization.value if quantization is not None else "as in the file"
