"""Writes the logits another engine gives for windows of tokens; run for quality_peers.py by the engine's own Python.

python peers_logits.py openvino|vllm MODEL SETTINGS WINDOWS.json OUT.npy
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Logits = Callable[[list[int]], Any]


def openvino(model: str, settings: dict[str, Any]) -> Logits:
    """The model as exported, with the arithmetic asked for."""
    import openvino as ov

    properties = {"INFERENCE_PRECISION_HINT": settings["arithmetic"]}
    request = ov.Core().compile_model(f"{model}/openvino_model.xml", "CPU", properties).create_infer_request()

    def logits(ids: list[int]) -> Any:
        request.reset_state()
        length = len(ids)
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, length), dtype=np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return request.infer(inputs)["logits"][0]

    return logits


def vllm(model: str, settings: dict[str, Any]) -> Logits:
    """Everything the model's last layer gives while the log-probabilities of a prompt are made."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    seen: list[Any] = []
    inner = LogitsProcessor.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        seen.append(result.float().numpy().copy())
        return result

    LogitsProcessor.forward = forward
    llm = LLM(
        model,
        dtype=settings["dtype"],
        max_model_len=2048,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)

    def logits(ids: list[int]) -> Any:
        seen.clear()
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        # One row for the token sampled, which is the last position, and the others for the prompt.
        rows = sorted((part for part in seen if len(part)), key=len, reverse=True)
        return np.concatenate(rows)

    return logits


def main() -> None:
    engine, model, settings, windows, out = sys.argv[1:]
    logits = {"openvino": openvino, "vllm": vllm}[engine](model, json.loads(settings))
    rows = []
    for ids in json.loads(Path(windows).read_text(encoding="utf-8")):
        found = np.asarray(logits(ids), dtype=np.float32)
        if len(found) != len(ids):
            raise SystemExit(f"{len(ids)} positions were asked for, {len(found)} came")
        rows.append(found)
    np.save(out, np.stack(rows))


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
