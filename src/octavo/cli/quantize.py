"""``octavo quantize``: a checkpoint rounded to few bits with calibration, in a layout that other engines read too."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli import options as opt
from octavo.cli.console import download_progress, remark, settled, table, work_progress
from octavo.errors import ConfigError
from octavo.planning.units import format_bytes

if TYPE_CHECKING:
    from octavo.ptq.settings import QuantizeSettings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("quantize", short_help="Quantise a checkpoint with AWQ, GPTQ or SmoothQuant.")(quantize)


def quantize(
    model: Annotated[str, typer.Argument(help="The checkpoint: a directory with safetensors, or ORG/NAME of the hub.")],
    out: Annotated[Path, typer.Argument(help="The directory to write.", file_okay=False)],
    method: Annotated[
        str,
        typer.Option("--method", help="rtn (plain rounding), awq, gptq, or smoothquant (8 bits, activations too)."),
    ] = "awq",
    bits: Annotated[
        int | None,
        typer.Option(
            "--bits",
            help="Bits a weight: 4 (awq), 2, 3, 4, 8 (gptq), 4 or 8 (compressed-tensors); default: 4 (smoothquant: 8).",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Weights with one scale; -1: whole rows; default: 128 (smoothquant: -1)."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Layout: awq, gptq or compressed-tensors; default: that of the method (rtn: gptq, smoothquant: "
            "compressed-tensors).",
        ),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without zero points, or with them.")
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            "--calibration", help="Text to calibrate with: a file, or 'builtin'; default: builtin (rtn: none)."
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Sequences of the text to use, at the most.")] = 64,
    seq_len: Annotated[int, typer.Option("--seq-len", min=2, help="Tokens of a sequence.")] = 512,
    clip: Annotated[
        bool, typer.Option("--clip/--no-clip", help="awq, gptq: search how far the range of each group is best cut.")
    ] = True,
    act_order: Annotated[
        bool, typer.Option("--act-order/--no-act-order", help="gptq: begin with the largest inputs (static groups).")
    ] = True,
    damping: Annotated[
        float, typer.Option("--damping", help="gptq: added to the diagonal, as a share of its mean.")
    ] = 0.01,
    smoothing: Annotated[
        float,
        typer.Option(
            "--smoothing", help="smoothquant: how much of the activations' range moves to the weights, 0 to 1."
        ),
    ] = 0.5,
    static_scales: Annotated[
        str | None,
        typer.Option(
            "--static-scales",
            help="smoothquant: one scale for each activation tensor, from its max, percentile or mse; "
            "default: activations are scaled token by token when they are there.",
        ),
    ] = None,
    percentile: Annotated[
        float, typer.Option("--percentile", help="Share of magnitudes, in percent, within --static-scales percentile.")
    ] = 99.99,
    evaluate: Annotated[
        bool,
        typer.Option("--evaluate/--no-evaluate", help="Measure perplexity and KL before and after, for the report."),
    ] = True,
    text: Annotated[str, typer.Option("--text", help="What to evaluate on: a file, or 'builtin'.")] = "builtin",
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of 512 tokens to evaluate on.")] = 20,
    threads: opt.Threads = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantise a checkpoint layer by layer and report what it costs: octavo quantize MODEL OUT --method gptq --bits 4

    A run that is stopped goes on where it was when the same command is given again.
    """
    from octavo.evaluation.texts import read_text
    from octavo.ptq.settings import DEFAULT_FORMATS, QuantizeSettings

    smooth = method == "smoothquant"
    values: dict[str, Any] = {
        "method": method,
        "bits": bits or (8 if smooth else 4),
        "group_size": group_size or (-1 if smooth else 128),
        "format": format or DEFAULT_FORMATS.get(method, "gptq"),
        "symmetric": symmetric,
        "clip": clip,
        "act_order": act_order,
        "damping": damping,
        "samples": samples,
        "seq_len": seq_len,
        "smoothing": smoothing,
        "static_scales": static_scales,
        "percentile": percentile,
    }
    settings = QuantizeSettings(**values)
    wanted = calibration or ("builtin" if settings.calibrated else None)
    content = None if wanted is None else read_text(wanted, "calibration")
    measured_on = read_text(text) if evaluate else None
    report = _run(model, out, settings, content, measured_on, windows, threads)
    typer.echo(jsonlib.dumps(report, indent=1) if json else _summary(report, out))


def _run(
    model: str,
    out: Path,
    settings: QuantizeSettings,
    calibration: Any,
    text: Any,
    windows: int,
    threads: int | None,
) -> dict[str, Any]:
    from octavo.benchmarking.record import provenance
    from octavo.cli.eval import Side, measure
    from octavo.ptq.pipeline import quantize_checkpoint
    from octavo.ptq.report import make_report, report_page
    from octavo.weights.hub import resolve_model

    with download_progress() as progress:
        source = resolve_model(model, progress=progress)
    if not source.is_dir():
        raise ConfigError(f"{model}: is a file; what can be quantised is a directory with config.json and safetensors")
    settled()
    try:
        with work_progress("layer", _layers(source)) as tell:
            done = quantize_checkpoint(
                source, out, settings, calibration, lambda finished, total, state: tell(finished, state)
            )
    except KeyboardInterrupt:
        remark("stopped; the same command goes on from here")
        raise
    evaluations: dict[str, Any] = {}
    if text is not None:
        reference = Side(str(source), "f32", "f32")
        for title, side in (("before", Side(str(source))), ("after", Side(str(out)))):
            remark(f"measuring: {title}")
            evaluations[title] = measure(side, text, reference=reference, windows=windows, threads=threads)
    report = make_report(settings, source.name, done, evaluations) | provenance(threads)
    (out / "report.json").write_text(jsonlib.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "report.html").write_text(report_page(report), encoding="utf-8")
    return report


def _layers(source: Path) -> int:
    from octavo.models.registry import build_graph
    from octavo.weights.json_files import read_json_object

    return build_graph(read_json_object(source / "config.json")).num_layers


def _summary(report: dict[str, Any], out: Path) -> str:
    shrunk = f"{format_bytes(report['source_bytes'])} became {format_bytes(report['bytes'])}"
    parts = [f"{shrunk} in {report['seconds']:.0f} s, {out}"]
    if report["evaluations"]:
        rows = [
            (
                title,
                f"{found['perplexity']['perplexity']:.3f} ± {found['perplexity']['perplexity_error']:.3f}",
                f"{found['divergence']['mean_kl']:.2e} ± {found['divergence']['mean_kl_error']:.0e}",
                f"{found['divergence']['top1']:.2%}",
            )
            for title, found in report["evaluations"].items()
        ]
        parts.append(table(("", "perplexity", "KL to float32", "same likeliest token"), rows))
    worst = [(one["name"], f"{one['error']:.2e}") for one in report["worst"][:5]]
    parts.append(table((f"worst, error of {report['error_of']}", ""), worst))
    return "\n\n".join(parts)
