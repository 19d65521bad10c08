"""Measures how far octavo's next-token distributions are from a float32 computation of the same checkpoint.

    python benchmarks/quality.py MODEL [--quantization FORM] [--files FILE ...] [--json FILE]

The reference is transformers in float32, with the weights as the checkpoint holds them (a GGUF file's are dequantised).
Both sides get the same windows of token ids; for every position there is the Kullback-Leibler divergence
KL(reference || octavo) in nats and whether both find the same token the likeliest. Needs torch and transformers,
and for a GGUF file also gguf and accelerate.

Speeds may be compared only between engines of the same class: 16-bit up to a mean KL of 1.5e-3 (what computing in bf16
gives), 8-bit up to 4e-3 (what activations of 8 bits in groups of 32 give).
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from recording import RESULTS, dashed, model_sha256, provenance, write

import octavo
from octavo.cli.options import Quantization
from octavo.weights.hub import resolve_model

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

Logits = Callable[[list[int]], NDArray[np.float32]]

_LICENCES = ("GPL-3", "Apache-2.0", "MPL-2.0", "LGPL-2.1", "Artistic")
_SOURCES = ("argparse", "asyncio/base_events", "json/decoder", "statistics", "threading")


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of one file."""

    file: Path
    start: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The divergence and the agreement at every position of some windows."""

    divergence: NDArray[np.float64]
    agrees: NDArray[np.bool_]

    def summary(self) -> dict[str, Any]:
        """The figures to keep."""
        return {
            "positions": int(self.divergence.size),
            "mean_kl": float(self.divergence.mean()),
            "median_kl": float(np.median(self.divergence)),
            "p99_kl": float(np.percentile(self.divergence, 99)),
            "max_kl": float(self.divergence.max()),
            "top1": float(self.agrees.mean()),
        }


def default_files() -> list[Path]:
    """Licence texts, where a system keeps them, and sources of Python's library; these are on most machines."""
    licences = [Path("/usr/share/common-licenses", name) for name in _LICENCES]
    library = Path(sysconfig.get_path("stdlib"))
    return [*licences, *(library / f"{name}.py" for name in _SOURCES)]


def cut_windows(encode: Callable[[str], list[int]], files: Sequence[Path], count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens, from each file in turn; the first tokens of a file are left out."""
    found = [file for file in files if file.is_file()]
    tokens = {file: encode(file.read_text(encoding="utf-8")) for file in found}
    windows: list[Window] = []
    start = length
    while len(windows) < count:
        long_enough = [file for file in found if len(tokens[file]) >= start + length]
        if not long_enough:
            raise SystemExit(
                f"the {len(found)} files give {len(windows)} windows of {length} tokens, {count} were asked for: "
                "name more text with --files, or lower --windows"
            )
        windows += [Window(file, start, tokens[file][start : start + length]) for file in long_enough]
        start += length
    return windows[:count]


def octavo_logits(llm: LLM) -> Logits:
    """octavo's side of the comparison."""
    return llm.prompt_logits


def reference_logits(model: Path) -> Logits:
    """The reference: transformers in float32. torch is needed here only."""
    import torch
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": model}
    if model.is_file():
        place = {"pretrained_model_name_or_path": model.parent, "gguf_file": model.name}
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)

    def logits(ids: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            rows: NDArray[np.float32] = network(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        return rows

    return logits


def compare(windows: Sequence[Window], reference: Logits, candidate: Logits) -> Comparison:
    """Both sides on every window."""
    parts = list(_compare_each(windows, reference, candidate))
    return Comparison(
        np.concatenate([part.divergence for part in parts]), np.concatenate([part.agrees for part in parts])
    )


def _compare_each(windows: Sequence[Window], reference: Logits, candidate: Logits) -> Iterator[Comparison]:
    for number, window in enumerate(windows, 1):
        expected, got = _log_softmax(reference(window.ids)), _log_softmax(candidate(window.ids))
        if expected.shape != got.shape:
            raise SystemExit(f"octavo gave logits of shape {got.shape}, the reference {expected.shape}")
        part = Comparison(
            (np.exp(expected) * (expected - got)).sum(axis=-1), expected.argmax(axis=-1) == got.argmax(axis=-1)
        )
        print(
            f"window {number}/{len(windows)} {window.file.name}: KL {part.divergence.mean():.2e}, "
            f"top-1 {part.agrees.mean():.2%}",
            flush=True,
        )
        yield part


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both engines and put together what is recorded."""
    model = resolve_model(arguments.model)
    reference_model = resolve_model(arguments.reference) if arguments.reference else model
    with octavo.LLM(
        model=str(model),
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        enable_prefix_caching=False,
    ) as llm:
        tokenizer = llm.get_tokenizer()
        windows = cut_windows(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            arguments.files or default_files(),
            arguments.windows,
            arguments.window_tokens,
        )
        result = compare(windows, reference_logits(reference_model), octavo_logits(llm))
    ids = np.array([window.ids for window in windows], dtype="<i4")
    return {
        "what": "KL(reference || octavo), reference: transformers float32",
        **provenance(["numpy", "torch", "transformers"]),
        "model": model.name,
        "model_sha256": model_sha256(model),
        "reference_model": reference_model.name,
        "reference_sha256": model_sha256(reference_model),
        "form": arguments.quantization or "as stored",
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "windows": [f"{window.file.name}:{window.start}" for window in windows],
        "window_tokens": arguments.window_tokens,
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        **result.summary(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("model", help="what octavo runs: a known name, a directory or a .gguf file")
    parser.add_argument("--reference", help="model the reference is computed from, if not the same")
    parser.add_argument(
        "--quantization",
        choices=[form.value for form in Quantization],
        help="weights; else as they are in the file",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "bf16", "f32"), default="auto", help="type of octavo's KV cache"
    )
    parser.add_argument("--files", type=Path, nargs="+", help="text to read; else licences and Python's own library")
    parser.add_argument("--windows", type=int, default=10, help="number of windows")
    parser.add_argument("--window-tokens", type=int, default=512, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    record = measure(arguments)
    name = dashed(f"quality {record['model']} {record['form']} {record['date'][:10]}.json")
    path = arguments.json or RESULTS / name
    write(record, path)
    print(
        f"{record['model']}, {record['form']}: mean KL {record['mean_kl']:.2e}, top-1 {record['top1']:.2%} "
        f"over {record['positions']} positions; written to {path}"
    )


if __name__ == "__main__":
    main()
