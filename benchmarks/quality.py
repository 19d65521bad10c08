"""Measures how far octavo's next-token distributions are from a float32 computation of the same checkpoint.

    python benchmarks/quality.py MODEL [--quantization FORM] [--kv-cache-dtype TYPE ...] [--files FILE ...]

The reference is transformers in float32, with the weights as the checkpoint holds them (a GGUF file's are dequantised).
Both sides get the same windows of token ids and are compared as `octavo eval` compares two models: for every position
there is the Kullback-Leibler divergence KL(reference || octavo) in nats and whether both find the same token the
likeliest, and the perplexity of both. Several types of the KV cache are measured one after another against the same
reference, each with a record of its own. Needs torch and transformers, and for a GGUF file also gguf and accelerate.

Speeds may be compared only between engines of the same class: 16-bit up to a mean KL of 1.5e-3 (what computing in bf16
gives), 8-bit up to 4e-3 (what activations of 8 bits in groups of 32 give).
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from recording import RESULTS, dashed, model_sha256, provenance, write

import octavo
from octavo.cli.options import KvCacheDtype, Quantization
from octavo.evaluation.evaluate import Evaluation, Logits, evaluate
from octavo.evaluation.windows import Window, alternating_windows
from octavo.weights.hub import resolve_model

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

_LICENCES = ("GPL-3", "Apache-2.0", "MPL-2.0", "LGPL-2.1", "Artistic")
_SOURCES = ("argparse", "asyncio/base_events", "json/decoder", "statistics", "threading")


def default_files() -> list[Path]:
    """Licence texts, where a system keeps them, and sources of Python's library; these are on most machines."""
    licences = [Path("/usr/share/common-licenses", name) for name in _LICENCES]
    library = Path(sysconfig.get_path("stdlib"))
    return [*licences, *(library / f"{name}.py" for name in _SOURCES)]


def cut_windows(encode: Callable[[str], list[int]], files: Sequence[Path], count: int, length: int) -> list[Window]:
    """``count`` windows of ``length`` tokens, from each file in turn; the first tokens of a file are left out."""
    texts = [(file.name, encode(file.read_text(encoding="utf-8"))) for file in files if file.is_file()]
    return alternating_windows(texts, count, length)


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


def compare(windows: Sequence[Window], reference: Logits, candidate: Logits) -> Evaluation:
    """Both sides on every window."""

    def told(window: Window, so_far: Evaluation) -> None:
        found = so_far.divergence.summary()
        print(
            f"window {so_far.windows}/{len(windows)} {window.text}: so far KL {found['mean_kl']:.2e}, "
            f"top-1 {found['top1']:.2%}",
            flush=True,
        )

    return evaluate(candidate, windows, reference=reference, progress=told)


def remembered(reference: Logits) -> Logits:
    """A reference that computes each window once: 100 MB for 512 tokens of a vocabulary of 49,152."""
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}

    def logits(ids: list[int]) -> NDArray[np.float32]:
        key = tuple(ids)
        if key not in known:
            known[key] = reference(ids)
        return known[key]

    return logits


def measure(arguments: argparse.Namespace, kind: str, reference: Logits) -> dict[str, Any]:
    """Run both engines, octavo with a type of the KV cache, and put together what is recorded."""
    model = resolve_model(arguments.model)
    reference_model = resolve_model(arguments.reference) if arguments.reference else model
    with octavo.LLM(
        model=str(model), quantization=arguments.quantization, kv_cache_dtype=kind, enable_prefix_caching=False
    ) as llm:
        tokenizer = llm.get_tokenizer()
        windows = cut_windows(
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            arguments.files or default_files(),
            arguments.windows,
            arguments.window_tokens,
        )
        result = compare(windows, reference, octavo_logits(llm))
        plan = llm.memory_plan
    found = result.summary()
    return {
        "what": "KL(reference || octavo), reference: transformers float32",
        **provenance(["numpy", "torch", "transformers"]),
        "model": model.name,
        "model_sha256": model_sha256(model),
        "reference_model": reference_model.name,
        "reference_sha256": model_sha256(reference_model),
        "form": arguments.quantization or "as stored",
        "kv_cache_dtype": kind,
        "kv_bytes_per_token": None if plan is None else plan.block_bytes / plan.block_size,
        "windows": [f"{window.text}:{window.start}" for window in windows],
        "window_tokens": arguments.window_tokens,
        "tokens_sha256": found["tokens_sha256"],
        "perplexity": found["perplexity"],
        "reference_perplexity": found["reference_perplexity"],
        "nll_difference": found["nll_difference"],
        "nll_difference_error": found["nll_difference_error"],
        **found["divergence"],
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
        "--kv-cache-dtype",
        choices=[kind.value for kind in KvCacheDtype],
        nargs="+",
        default=["auto"],
        help="types of octavo's KV cache, each for a record of its own",
    )
    parser.add_argument("--files", type=Path, nargs="+", help="text to read; else licences and Python's own library")
    parser.add_argument("--windows", type=int, default=10, help="number of windows")
    parser.add_argument("--window-tokens", type=int, default=512, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    arguments = parser.parse_args(argv)
    if arguments.json and len(arguments.kv_cache_dtype) > 1:
        parser.error("--json names one file, and each type of the KV cache has a record of its own")
    return arguments


def main() -> None:
    arguments = parse()
    reference = remembered(reference_logits(resolve_model(arguments.reference or arguments.model)))
    for kind in arguments.kv_cache_dtype:
        record = measure(arguments, kind, reference)
        what = f"{record['model']} {record['form']} {record['date'][:10]}"
        name = dashed(f"quality {what}.json" if kind == "auto" else f"quality kv {kind} {what}.json")
        path = arguments.json or RESULTS / name
        write(record, path)
        print(
            f"{record['model']}, {record['form']}, {kind} KV: mean KL {record['mean_kl']:.2e}, "
            f"top-1 {record['top1']:.2%}, -log p {record['nll_difference']:+.5f} of the reference's "
            f"over {record['positions']} positions; written to {path}"
        )


if __name__ == "__main__":
    main()
