"""``octavo plan``: what a model needs on this machine, without loading its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress, table
from octavo.errors import CapacityError, ModelError

if TYPE_CHECKING:
    from octavo.frontend.description import ModelDescription
    from octavo.frontend.options import EngineOptions
    from octavo.planning.hardware import Hardware

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("plan", short_help="Show where the memory would go.")(plan)


def plan(
    model: Annotated[str, typer.Argument(help=opt.engine_help("model"))] = opt.DEFAULT_MODEL,
    quantization: opt.QuantizationOption = None,
    kv_cache_dtype: opt.KvCacheDtypeOption = opt.KvCacheDtype.auto,
    max_model_len: opt.MaxModelLen = None,
    max_num_seqs: opt.MaxNumSeqs = 64,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = 2048,
    memory_utilization: opt.MemoryUtilization = 0.9,
    graph: Annotated[bool, typer.Option("--graph", help="Print the operations the model is run as.")] = False,
) -> None:
    """Show where the memory would go, what fits in each weight form, and (--graph) the model's operations."""
    from octavo.frontend.description import describe_model, memory_needs
    from octavo.frontend.options import EngineOptions
    from octavo.planning import plan_memory, probe
    from octavo.weights.hub import resolve_model

    with download_progress() as progress:
        path = resolve_model(model, progress=progress)
    options = EngineOptions(
        model=str(path),
        quantization=quantization.value if quantization else None,
        kv_cache_dtype=kv_cache_dtype.value,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
    )
    hardware = probe()
    with describe_model(path) as description:
        typer.echo(f"model    {model}: {description.summary}")
        typer.echo(f"machine  {hardware.describe()}")
        if graph:
            typer.echo(f"\n{description.graph}")
        typer.echo(f"\n{_what_fits(description, options, hardware)}\n")
        typer.echo(plan_memory(memory_needs(description, options), hardware).render())


def _what_fits(description: ModelDescription, options: EngineOptions, hardware: Hardware) -> str:
    """A row for each weight form and, with the form chosen, each KV type: its sizes, and what the pool then holds."""
    from octavo.frontend.description import memory_needs
    from octavo.kv_cache import KV_CACHE_TYPES, kv_cache_type
    from octavo.planning.memory import plan_memory
    from octavo.planning.units import format_bytes
    from octavo.weights.built import BuiltCheckpoint

    form, kv = options.quantization, kv_cache_type(options.kv_cache_dtype).name
    forms = (
        (None,)
        if isinstance(description.checkpoint, BuiltCheckpoint)
        else (None, "none", "w8", "w8-wide", "w8-channel", "w4", "w4-g64", "w4-g128", "fp8")
    )
    choices = [(each, kv) for each in forms]
    choices += [(form, each) for each in KV_CACHE_TYPES if each != kv]
    rows = []
    for choice in choices:
        changed = replace(options, quantization=choice[0], kv_cache_dtype=choice[1])
        try:
            needs = memory_needs(description, changed, alternatives=False)
        except ModelError:  # such as groups or types that do not divide this model's widths
            if choice == (form, kv):
                raise
            rows.append((f"{choice[0] or 'as in the file'}, {choice[1]} KV", "not for this model", "", "", "", ""))
            continue
        name = f"{needs.weights_form}, {choice[1]} KV" + (" (chosen)" if choice == (form, kv) else "")
        weights = format_bytes(needs.weights_bytes)
        per_token = format_bytes(needs.block_bytes // needs.block_size)
        try:
            fitted = plan_memory(needs, hardware)
        except CapacityError as error:
            missing = format_bytes((error.needed or 0) - (error.available or 0))
            rows.append((name, weights, per_token, f"{missing} missing", "", ""))
            continue
        sequences = f"{fitted.full_sequences:.1f}".removesuffix(".0")
        rows.append((name, weights, per_token, format_bytes(fitted.kv_bytes), f"{fitted.max_model_len:,}", sequences))
    header = ("form", "weights", "KV a token", "KV pool", "longest", "such sequences")
    return table(header, rows)
