"""Measures how far other engines' next-token distributions are from float32, on the windows of quality.py.

    python benchmarks/quality_peers.py openvino|vllm --python FILE --models DIR [--name smollm2-135m] [--json FILE]

FILE is the Python of an environment with the engine, DIR the folder of models of peers.py. OpenVINO's logits are those
of the exported model run as a whole, so its cache of keys and values (8 bits in OpenVINO GenAI) plays no part in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peers_engines import Engines, Form, forms
from quality import compare, cut_windows, default_files, reference_logits
from recording import RESULTS, dashed, model_sha256, provenance, write

from octavo.evaluation.evaluate import Logits
from octavo.evaluation.windows import Window
from octavo.frontend.tokenizer import load_tokenizer
from octavo.weights.checkpoint import open_checkpoint

_WORKER = Path(__file__).resolve().parent / "peers_logits.py"


def peer_logits(form: Form, python: Path, windows: Sequence[Window], folder: Path) -> NDArray[np.float32]:
    """The logits of all windows, on disk."""
    asked, out = folder / "windows.json", folder / "logits.npy"
    asked.write_text(json.dumps([window.ids for window in windows]), encoding="utf-8")
    words = [python, _WORKER, form.engine, form.model, json.dumps(form.settings), asked, out]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENVINO_TELEMETRY": "0", "VLLM_NO_USAGE_STATS": "1"}
    subprocess.run([str(word) for word in words], env=environment, stdout=subprocess.DEVNULL, check=True)
    loaded: NDArray[np.float32] = np.load(out, mmap_mode="r")
    return loaded


def looked_up(windows: Sequence[Window], rows: NDArray[np.float32]) -> Logits:
    """Logits that were made before, by window."""
    places = {tuple(window.ids): number for number, window in enumerate(windows)}
    return lambda ids: rows[places[tuple(ids)]]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every form of the engine."""
    directory = arguments.models / arguments.name
    tokenizer = load_tokenizer(open_checkpoint(directory))
    windows = cut_windows(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        default_files(),
        arguments.windows,
        arguments.window_tokens,
    )
    peer = {"openvino_python": None, "vllm_python": None, f"{arguments.engine}_python": arguments.python}
    engines = Engines(Path("python"), None, None, threads=1, **peer)
    found: dict[str, Any] = {}
    for form in forms(arguments.models, arguments.name, engines):
        if form.engine != arguments.engine:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows = peer_logits(form, arguments.python, windows, Path(folder))
            result = compare(windows, reference_logits(directory), looked_up(windows, rows))
        found[form.name] = result.summary()["divergence"]
        print(f"{form.title}: mean KL {found[form.name]['mean_kl']:.2e}, top-1 {found[form.name]['top1']:.2%}")
    ids = np.array([window.ids for window in windows], dtype="<i4")
    return {
        "what": f"KL(reference || {arguments.engine}), reference: transformers float32",
        **provenance(["numpy", "torch", "transformers"]),
        "engine": arguments.engine,
        "peers": engines.versions(),
        "model": directory.name,
        "model_sha256": model_sha256(directory),
        "windows": [f"{window.text}:{window.start}" for window in windows],
        "window_tokens": arguments.window_tokens,
        "tokens_sha256": hashlib.sha256(ids.tobytes()).hexdigest(),
        "forms": found,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("engine", choices=("openvino", "vllm"))
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with the engine")
    parser.add_argument("--models", type=Path, required=True, help="folder of models")
    parser.add_argument("--name", default="smollm2-135m", help="the model's name in that folder")
    parser.add_argument("--windows", type=int, default=10, help="number of windows")
    parser.add_argument("--window-tokens", type=int, default=512, help="tokens of a window")
    parser.add_argument("--json", type=Path, help="file to write; else one in benchmarks/results")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse()
    record = measure(arguments)
    path = arguments.json or RESULTS / dashed(f"quality {arguments.engine} {record['date'][:10]}.json")
    write(record, path)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
