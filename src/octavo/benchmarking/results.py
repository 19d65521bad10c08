"""Where results are kept: the file names of ``vllm bench serve``, JSON alone or a line added to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.benchmarking.options import BenchOptions

__all__ = ["result_path", "save"]


def result_path(options: BenchOptions, result: Mapping[str, Any]) -> Path:
    """{label}-{rate}qps[-concurrencyN]-{model}-{date}.json in the folder of the options, or the name they give."""
    folder = Path(options.result_dir or ".")
    if options.result_filename is not None:
        return folder / options.result_filename
    limit = f"-concurrency{options.max_concurrency}" if options.max_concurrency is not None else ""
    model = str(result["model_id"]).rsplit("/", 1)[-1]
    label = options.label or options.backend
    return folder / f"{label}-{float(options.request_rate)}qps{limit}-{model}-{result['date']}.json"


def save(result: Mapping[str, Any], path: Path, *, append: bool = False) -> None:
    """Write ``result`` to ``path``, or add it as one more line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(result), ensure_ascii=False)
    if append:
        with path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        path.write_text(text + "\n", encoding="utf-8")
