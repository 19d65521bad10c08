"""Quality against bytes (and speed) of a model in every form: a record, a table for the docs, and a plot.

    python benchmarks/quality_table.py MODEL [--also NAME=PATH ...] [--speed] [--text builtin]

MODEL is a checkpoint directory. Measured are the forms octavo makes of it while loading, and whatever is named with
--also: GGUF files of the same model, directories that octavo quantize or others wrote. The reference of all is octavo's
own float32 arithmetic on MODEL's weights, on the windows of quality.py (or a text of one's own).

--speed adds tokens a second of one answer and of a prompt; run it on a machine that does nothing else. With --update
FILE speeds are added to a record made before, whose quality is kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality import cut_windows, default_files
from recording import REPOSITORY, RESULTS, dashed, model_sha256, provenance, write

from octavo.benchmarking.plots import Series, chart
from octavo.cli.options import Quantization
from octavo.evaluation.evaluate import Logits, evaluate, open_model, windows_of
from octavo.evaluation.texts import read_text
from octavo.evaluation.windows import Window
from octavo.frontend.llm import LLM
from octavo.sampling.params import SamplingParams

PROMPT_TOKENS, ANSWER_TOKENS = 512, 128


def forms(arguments: argparse.Namespace) -> Iterator[tuple[str, Path, str | None]]:
    """Name, model and weight form of everything to measure."""
    for each in arguments.also:
        name, _, path = each.partition("=")
        yield name, Path(path or name), None
    for form in Quantization:
        if form.value != "w4-g32":  # another name of w4
            yield ("bf16" if form.value == "none" else form.value), arguments.model, form.value


def file_bytes(model: Path) -> int:
    """The size of a .gguf file, or of a directory's weight files."""
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def kept_reference(model: Path, windows: Sequence[Window], threads: int | None, file: Path) -> Logits:
    """float32 logits of all windows, computed once and kept on disk."""
    with open_model(
        str(model), max(len(w.ids) for w in windows), quantization="f32", kv_cache_dtype="f32", threads=threads
    ) as llm:
        first = llm.prompt_logits(windows[0].ids)
        rows = sum(len(window.ids) for window in windows)
        kept = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(rows, first.shape[1]))
        places = {}
        start = 0
        for window in windows:
            end = start + len(window.ids)
            kept[start:end] = llm.prompt_logits(window.ids)
            places[tuple(window.ids)] = slice(start, end)
            start = end
    return lambda ids: kept[places[tuple(ids)]]


def quality_of(model: Path, form: str | None, windows: Sequence[Window], reference: Logits, threads: int | None) -> Any:
    """Quality and bytes in memory."""
    length = max(len(window.ids) for window in windows)
    with open_model(str(model), length, quantization=form, threads=threads) as llm:
        found = evaluate(llm.prompt_logits, windows, reference=reference).summary()
        plan = llm.memory_plan
        return {**found, "weights_bytes": None if plan is None else plan.weights_bytes}


def speed_of(model: Path, form: str | None, threads: int | None) -> dict[str, float]:
    """Tokens a second: of one answer after its first token, and of a prompt; the best of three rounds."""
    best = {"answer_tok_s": 0.0, "prompt_tok_s": 0.0}
    with LLM(str(model), quantization=form, threads=threads, max_num_seqs=1, enable_prefix_caching=False) as llm:
        llm.wait_for_memory()
        vocabulary = len(llm.prompt_logits([1])[0])
        ids = np.random.default_rng(0).integers(100, vocabulary - 100, PROMPT_TOKENS).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for _ in range(3):
            (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
            metrics = output.metrics
            assert metrics is not None
            first = metrics.first_token_time - metrics.arrival_time
            rest = metrics.finished_time - metrics.first_token_time
            best["prompt_tok_s"] = max(best["prompt_tok_s"], PROMPT_TOKENS / first)
            best["answer_tok_s"] = max(best["answer_tok_s"], (ANSWER_TOKENS - 1) / rest)
    return best


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything, as it is recorded."""
    with open_model(str(arguments.model), 512, threads=arguments.threads) as llm:
        tokenizer = llm.get_tokenizer()
        if arguments.text is None:
            windows = cut_windows(
                lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
                default_files(),
                arguments.windows,
                512,
            )
        else:
            windows = windows_of(llm, read_text(arguments.text), 512, most=arguments.windows)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        reference = kept_reference(arguments.model, windows, arguments.threads, Path(folder) / "reference.npy")
        for name, model, form in forms(arguments):
            row = {"name": name, "form": form, "file_bytes": file_bytes(model)}
            row |= quality_of(model, form, windows, reference, arguments.threads)
            rows.append(row)
            if arguments.json:  # so that a run that is stopped leaves what it has measured
                write({"rows": rows}, arguments.json)
            print(f"{name}: KL {row['divergence']['mean_kl']:.3e}, top-1 {row['divergence']['top1']:.2%}", flush=True)
    return {
        "benchmark": "quality table",
        "what": "KL(reference || form), reference: octavo float32",
        **provenance(["numpy"]),
        "model": arguments.model.name,
        "model_sha256": model_sha256(arguments.model),
        "windows": [f"{window.text}:{window.start}" for window in windows],
        "rows": rows,
    }


def add_speeds(record: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Measure the speed of every row."""
    models = {name: (model, form) for name, model, form in forms(arguments)}
    for row in record["rows"]:
        if row["name"] in models:
            row["speed"] = speed_of(*models[row["name"]], arguments.threads)
            print(f"{row['name']}: {row['speed']}", flush=True)


def table(record: dict[str, Any]) -> str:
    """The table for the docs."""
    lines = [
        "| form | MB in memory | mean KL | 99 % below | top-1 | perplexity | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(record["rows"], key=lambda row: row["divergence"]["mean_kl"]):
        kl, memory, speed = row["divergence"], row["weights_bytes"], row.get("speed")
        lines.append(
            f"| {row['name']} | {memory / 1e6:.1f} | {kl['mean_kl']:.2e} | {kl['p99_kl']:.1e} | {kl['top1']:.1%} | "
            f"{row['perplexity']['perplexity']:.2f} | {'' if speed is None else format(speed['answer_tok_s'], '.0f')} |"
        )
    return "\n".join(lines)


def plot(record: dict[str, Any]) -> str:
    """Divergence over bytes, a dot for each form."""
    series = [
        Series(row["name"], [(row["weights_bytes"] / 1e6, row["divergence"]["mean_kl"])], line=False)
        for row in record["rows"]
    ]
    return chart(
        series, title=f"{record['model']}: quality against bytes", x_label="MB of weights in memory",
        y_label="mean KL to float32, nats", y_log=True, width=760, height=560,
    )  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument(
        "--also", nargs="*", default=[], help="NAME=PATH of other files or directories of the same model"
    )
    parser.add_argument("--text", help="a file or 'builtin'; else the windows of quality.py")
    parser.add_argument("--windows", type=int, default=10, help="windows of 512 tokens")
    parser.add_argument("--threads", type=int, help="worker threads")
    parser.add_argument("--speed", action="store_true", help="measure speed too")
    parser.add_argument("--update", type=Path, help="add speeds to this record instead of measuring quality")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    record = json.loads(arguments.update.read_text()) if arguments.update else measure(arguments)
    if arguments.speed or arguments.update:
        add_speeds(record, arguments)
    name = dashed(f"table {record['model']} {record['date'][:10]}.json")
    path = arguments.json or arguments.update or RESULTS / name
    write(record, path)
    (REPOSITORY / "docs" / "quality.svg").write_text(plot(record) + "\n", encoding="utf-8")
    print(table(record))
    print(f"written to {path.name} and docs/quality.svg")


if __name__ == "__main__":
    main()
