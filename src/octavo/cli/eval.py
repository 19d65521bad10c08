"""``octavo eval``: perplexity of a text, and how far a model or a form of it is from another."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress, settled, table, work_progress
from octavo.errors import ConfigError
from octavo.planning.units import format_bytes

if TYPE_CHECKING:
    from octavo.evaluation.evaluate import Evaluation
    from octavo.evaluation.texts import Text
    from octavo.evaluation.windows import Window
    from octavo.frontend.llm import LLM

__all__ = ["Side", "measure", "register"]

BUILTIN = "builtin"


REFERENCE_FORMS = ("f32", "stored", *(form.value for form in opt.Quantization))


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("eval", short_help="Measure perplexity, and divergence between models.")(evaluate)


def evaluate(
    model: Annotated[str, typer.Argument(help=opt.engine_help("model"))] = opt.DEFAULT_MODEL,
    ppl: Annotated[
        str | None,
        typer.Option("--ppl", help="Measure the perplexity of this text: a file, or 'builtin'; default: none."),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option(
            "--kl",
            help="Measure the divergence from this model (named like MODEL), and both perplexities; default: none.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--text", help="What --kl reads: a file, or 'builtin'; default: that of --ppl, else builtin."),
    ] = None,
    quantization: opt.QuantizationOption = None,
    kv_cache_dtype: opt.KvCacheDtypeOption = opt.KvCacheDtype.auto,
    reference_quantization: Annotated[
        str,
        typer.Option(
            "--reference-quantization",
            help="Weights of the reference: f32 (as in the file, all arithmetic in float32, with a float32 KV cache), "
            "stored (as MODEL runs without --quantization), or a form of --quantization.",
        ),
    ] = "f32",
    windows: Annotated[
        int | None, typer.Option("--windows", min=1, help="Read so many windows at the most; default: the whole text.")
    ] = None,
    window_tokens: Annotated[int, typer.Option("--window-tokens", min=2, help="Tokens of a window.")] = 512,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride",
            min=1,
            help="A window begins so many tokens after the one before, and only what is new in it counts; "
            "default: windows do not overlap.",
        ),
    ] = None,
    threads: opt.Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print the whole record as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the record to this file too; default: nowhere.", dir_okay=False),
    ] = None,
) -> None:
    """Measure how well a model predicts a text, or how far it is from another model or form, through the engine itself.

    octavo eval smollm2-135m -q w4 --kl smollm2-135m
    """
    from octavo.benchmarking.record import make_record
    from octavo.evaluation.texts import read_text

    if ppl is None and kl is None:
        raise ConfigError("nothing to measure: give --ppl FILE, --kl MODEL or both")
    if text is not None and (kl is None or ppl is not None):
        raise ConfigError("--text is what --kl reads when there is no --ppl: leave one of the two out")
    if reference_quantization not in REFERENCE_FORMS:
        raise ConfigError(
            f"--reference-quantization must be one of {', '.join(REFERENCE_FORMS)}, got {reference_quantization!r}"
        )
    content = read_text(ppl or text or BUILTIN)
    own = Side(model, None if quantization is None else quantization.value, kv_cache_dtype.value)
    other = None
    if kl is not None:
        form = None if reference_quantization == "stored" else reference_quantization
        other = Side(kl, form, "f32" if form == "f32" else "auto")
    figures = measure(
        own, content, reference=other, windows=windows, window_tokens=window_tokens, stride=stride, threads=threads
    )
    record = make_record(
        "eval", figures, threads=threads, quality={"mean_kl": None, "reason": "it is what is measured"}
    )
    if output is not None:
        output.write_text(jsonlib.dumps(record, indent=1) + "\n", encoding="utf-8")
    typer.echo(jsonlib.dumps(record, indent=1) if json else report(figures))


@dataclass(frozen=True, slots=True)
class Side:
    """A model as it is to be run. ``quantization`` None: as stored."""

    model: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def form(self) -> str:
        """The weight form as recorded."""
        return self.quantization or "as stored"

    def open(self, window_tokens: int, threads: int | None) -> LLM:
        """The engine."""
        from octavo.evaluation.evaluate import open_model
        from octavo.weights.hub import resolve_model

        with download_progress() as progress:
            path = resolve_model(self.model, progress=progress)
        return open_model(
            str(path),
            window_tokens,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            threads=threads,
        )

    def about(self, llm: LLM) -> dict[str, Any]:
        """What is recorded of it: its name without folders, form, and the bytes its weights take in memory."""
        plan = llm.memory_plan
        return {
            "model": Path(self.model).name,
            "form": self.form,
            "kv_cache_dtype": self.kv_cache_dtype,
            "weights_bytes": None if plan is None else plan.weights_bytes,
        }


def measure(
    own: Side,
    text: Text,
    *,
    reference: Side | None = None,
    windows: int | None = None,
    window_tokens: int = 512,
    stride: int | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """Load one model or both, run them over the text with progress on stderr, and give what is recorded."""
    from octavo.evaluation.evaluate import evaluate as run
    from octavo.evaluation.evaluate import windows_of

    llm = own.open(window_tokens, threads)
    other = None
    try:
        cut = windows_of(llm, text, window_tokens, stride=stride, most=windows)
        other = None if reference is None else reference.open(window_tokens, threads)
        settled()
        with work_progress("window", len(cut)) as progress:

            def tell(window: Window, so_far: Evaluation) -> None:
                progress(so_far.windows, _state(so_far))

            expected = None if other is None else other.prompt_logits
            result = run(llm.prompt_logits, cut, reference=expected, progress=tell)
        figures: dict[str, Any] = {
            **own.about(llm),
            "text": text.name,
            "window_tokens": window_tokens,
            "stride": stride,
        }
        if other is not None and reference is not None:
            figures["reference"] = reference.about(other)
        return figures | result.summary()
    finally:
        llm.close()
        if other is not None:
            other.close()


def _state(so_far: Evaluation) -> str:
    parts = [f"perplexity {so_far.model.summary()['perplexity']:.4g}"]
    if so_far.compared:
        found = so_far.divergence.summary()
        parts.append(f"KL {found['mean_kl']:.2e}, top-1 {found['top1']:.2%}")
    return ", ".join(parts)


def report(figures: dict[str, Any]) -> str:
    """The figures as a table and some lines."""
    sides = [("model", figures, figures["perplexity"])]
    if "reference" in figures:
        sides.append(("reference", figures["reference"], figures["reference_perplexity"]))
    rows = [
        (
            f"{title}: {about['model']}, {about['form']}",
            f"{found['perplexity']:.4f}",
            f"{found['perplexity_error']:.4f}",
            f"{found['tokens']:,}",
            "" if about["weights_bytes"] is None else format_bytes(about["weights_bytes"]),
        )
        for title, about, found in sides
    ]
    parts = [table(("", "perplexity", "±", "tokens", "weights"), rows)]
    if "divergence" in figures:
        found = figures["divergence"]
        parts.append(
            f"KL(reference || model), nats: mean {found['mean_kl']:.3e} ± {found['mean_kl_error']:.1e}, median "
            f"{found['median_kl']:.3e}, 99 % below {found['p99_kl']:.3e}, most {found['max_kl']:.3e}\n"
            f"same token likeliest: {found['top1']:.2%} ± {found['top1_error']:.2%}, {found['positions']:,} positions\n"
            f"log perplexity, model less reference: {figures['nll_difference']:+.5f} ± "
            f"{figures['nll_difference_error']:.5f}"
        )
    parts.append(f"{figures['text']}, {figures['windows']} windows of {figures['window_tokens']} tokens")
    return "\n\n".join(parts)
