"""Greedy answers on the real model against transformers in float32, recorded in tests/golden."""

from __future__ import annotations

import json
from pathlib import Path

from octavo import SamplingParams
from tests.e2e.smollm2 import Form

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
# Logit margins that rounding the inputs of products to bf16 may overturn; seen: at most 0.04.
TIE = 0.1


def test_bf16_answers_equal_those_of_transformers_up_to_ties(smollm2_path: Path, smollm2_directory: Path) -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    with Form("bf16", smollm2_path, smollm2_directory).load() as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": case["prompt_ids"]} for case in cases],
            SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, logprobs=2),
            use_tqdm=False,
        )
    equal = 0
    for case, output in zip(cases, outputs, strict=True):
        answer = output.outputs[0]
        first = next((i for i, (a, b) in enumerate(zip(case["ids"], answer.token_ids, strict=True)) if a != b), None)
        if first is None:
            equal += 1
            continue
        assert answer.logprobs is not None
        best, second = sorted((entry.logprob for entry in answer.logprobs[first].values()), reverse=True)[:2]
        report = f"{case['prompt'][:40]!r} differs first at {first}: margins {case['margins'][first]}, {best - second}"
        print(report)
        assert case["margins"][first] < TIE, report
        assert best - second < TIE, report
    assert equal >= 14, f"{equal} of {len(cases)} answers are equal; ties alone explain a few"
