"""Command line options shared by several commands: which model, how the engine is set up, how tokens are chosen.

Help texts of engine settings come from EngineOptions, so that the command line and the Python API say the same.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.frontend.options import DEFAULT_MODEL, option_documentation

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

__all__ = [
    "DEFAULT_MODEL",
    "FrequencyPenalty",
    "KvCacheDtype",
    "KvCacheDtypeOption",
    "MaxModelLen",
    "MaxNumBatchedTokens",
    "MaxNumSeqs",
    "MaxTokens",
    "MemoryUtilization",
    "MinP",
    "Model",
    "PresencePenalty",
    "Quantization",
    "QuantizationOption",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "Temperature",
    "Threads",
    "TopK",
    "TopP",
    "engine_help",
    "load_llm",
]

_DOC = option_documentation()


def engine_help(name: str) -> str:
    """The documentation of an engine setting as a help text."""
    text = _DOC[name]
    return f"{text[0].upper()}{text[1:]}."


class Quantization(StrEnum):
    """Weight forms that can be asked for."""

    none = "none"
    w8 = "w8"
    w8_wide = "w8-wide"
    w8_channel = "w8-channel"
    w4 = "w4"
    w4_g32 = "w4-g32"
    w4_g64 = "w4-g64"
    w4_g128 = "w4-g128"
    fp8 = "fp8"


class KvCacheDtype(StrEnum):
    """Types of the KV cache: octavo.kv_cache.KV_CACHE_DTYPES."""

    auto = "auto"
    bf16 = "bf16"
    f16 = "f16"
    f32 = "f32"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    fp8_per_token_head = "fp8_per_token_head"
    int8 = "int8"
    int4 = "int4"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    fp8 = "fp8"
    int8_per_token_head = "int8_per_token_head"
    int4_per_token_head = "int4_per_token_head"


# Engine.
Model = Annotated[str, typer.Option("--model", "-m", help=engine_help("model"))]
QuantizationOption = Annotated[
    Quantization | None, typer.Option("--quantization", "-q", help=engine_help("quantization"))
]
KvCacheDtypeOption = Annotated[KvCacheDtype, typer.Option("--kv-cache-dtype", help=engine_help("kv_cache_dtype"))]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", min=2, help=engine_help("max_model_len"))]
MemoryUtilization = Annotated[
    float, typer.Option("--memory-utilization", min=0.01, max=1.0, help=engine_help("memory_utilization"))
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help=engine_help("max_num_seqs"))]
MaxNumBatchedTokens = Annotated[
    int, typer.Option("--max-num-batched-tokens", min=1, help=engine_help("max_num_batched_tokens"))
]
Threads = Annotated[int | None, typer.Option("--threads", "-t", min=1, help=engine_help("threads"))]

# Sampling.
Temperature = Annotated[
    float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token; higher is more varied.")
]
TopP = Annotated[float, typer.Option("--top-p", help="Choose among the likeliest tokens that together reach this.")]
TopK = Annotated[int, typer.Option("--top-k", help="Choose among this many of the likeliest tokens; 0: all.")]
MinP = Annotated[
    float, typer.Option("--min-p", help="Leave out tokens less likely than this share of the likeliest one.")
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 makes tokens that were there before less likely.")
]
PresencePenalty = Annotated[
    float, typer.Option("--presence-penalty", help="Taken once from the score of a token already generated.")
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="Taken from a token's score for each time it was generated.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes random choices repeatable; default: a fresh one.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", "-n", min=1, help="Longest answer in tokens; default: what the context holds."),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be given several times.")
]


def load_llm(model_name: str, **settings: Any) -> LLM:
    """Fetch the model if it is not here (with a progress bar) and start the engine."""
    from octavo.cli.console import download_progress, settled
    from octavo.frontend.llm import LLM
    from octavo.weights.hub import resolve_model

    with download_progress() as progress:
        path: Path = resolve_model(model_name, progress=progress)
    llm = LLM(str(path), **{name: _plain(value) for name, value in settings.items() if value is not None})
    settled()
    return llm


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
