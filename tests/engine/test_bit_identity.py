"""Equal bits whatever the load: the engine on the real CPU back end with a small random model, in every weight form."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.backends.cpu import CpuBackend
from octavo.backends.interface import SampledToken
from octavo.engine.config import EngineConfig
from octavo.engine.core import Engine
from octavo.engine.request import EngineRequest, ProducedSequence
from octavo.kv_cache import KV_CACHE_TYPES
from octavo.models.registry import build_graph
from octavo.models.rewrites import optimize
from octavo.sampling.params import SamplingParams
from octavo.weights.checkpoint import open_checkpoint

VOCAB, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, LAYERS = 331, 128, 320, 4, 2, 3
FORMS = ("none", "w8", "w8-wide", "w4")
Result = dict[tuple[str, int], tuple[list[Any], list[Any]]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with heads wide enough, and weights large enough, that its distributions are far from flat."""
    rng = np.random.default_rng(7)
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
                "mlp.up_proj": (FEED_FORWARD, HIDDEN),
                "mlp.down_proj": (HIDDEN, FEED_FORWARD),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    tensors = {
        name: (rng.normal(0, 0.1, shape) if len(shape) == 2 else rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def load(model_path: Path) -> Iterator[Any]:
    """Makes the back end for a weight form, a number of threads and a type of the KV cache, once each."""
    checkpoint = open_checkpoint(model_path)
    graph = optimize(build_graph(checkpoint.config))

    @cache
    def make(form: str, threads: int = 1, kv: str = "bf16") -> CpuBackend:
        return CpuBackend.load(
            graph,
            checkpoint,
            quantization=form,
            kv_cache_dtype=kv,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            max_model_len=1024,
            num_blocks=400,
            threads=threads,
        )

    yield make
    for form in FORMS:
        make(form).close()
    checkpoint.close()


def requests() -> list[EngineRequest]:
    """32 of them: greedy and seeded, one answer and several, shared prefixes, everything that changes a row."""
    rng = random.Random(5)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    found = []
    for number in range(32):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 16, 17, 40, 150)))]
        if number % 2:
            prompt = shared[: rng.choice((16, 40, 64, 70))] + prompt
        greedy = number % 3 == 0
        values = {
            "n": 1 if greedy else rng.choice((1, 1, 3)),
            "temperature": 0.0 if greedy else rng.choice((0.7, 1.0, 1.5)),
            "top_p": rng.choice((1.0, 0.9)),
            "top_k": rng.choice((0, 40)),
            "seed": number,
            "max_tokens": rng.choice((1, 4, 20, 33)),
            "logprobs": 2,
            "prompt_logprobs": rng.choice((None, None, None, 1)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.3)),
            "ignore_eos": True,
            "watermark": number % 5 == 2,
        }
        words = None
        if number % 4 == 1:
            values |= {"frequency_penalty": 0.4, "presence_penalty": 0.3, "min_tokens": min(3, values["max_tokens"])}
            values |= {"stop_token_ids": list(range(0, VOCAB, 9)), "bad_words": ["a word and its like"]}
            words = [(token, other) for token in range(0, VOCAB, 40) for other in range(1, VOCAB, 40)]
        params = SamplingParams.from_mapping(values, bad_words_ids=words)
        found.append(EngineRequest(f"r{number}", prompt, params))
    return found


def run(
    backend: CpuBackend,
    items: list[EngineRequest],
    *,
    alone: bool = False,
    rounds: int = 1,
    preempt: bool = False,
    pause: bool = False,
    crash: bool = False,
    **more: Any,
) -> Result:
    """The ids and log-probabilities of the last round, as exact values."""
    config = EngineConfig(**({"num_blocks": 400, "max_model_len": 1024} | more))
    engine = Engine(config, backend)
    rng = random.Random(1)
    results: Result = {}
    finished: set[tuple[str, int]] = set()
    paused: list[str] = []
    crashes = 0
    for _ in range(rounds):
        results = {}
        for batch in [[item] for item in items] if alone else [items]:
            for item in batch:
                engine.add(item)
            while engine.has_work() or paused:
                if pause and engine.scheduler.running and rng.random() < 0.5:
                    paused.append(rng.choice(engine.scheduler.running).request_id)
                    assert engine.pause(paused[-1])
                if paused and (rng.random() < 0.4 or not engine.has_work()):
                    assert engine.resume(paused.pop(rng.randrange(len(paused))))
                if crash and rng.random() < 0.3:
                    crashes += 1
                    if rng.random() < 0.5:
                        engine.step()  # what came of it is lost with the engine
                    engine = Engine(config, backend)
                    for item in batch:
                        again = replay(item, results, finished)
                        if again is not None:
                            engine.add(again)
                    if not engine.has_work():
                        break
                if preempt and engine.scheduler.running and rng.random() < 0.5:
                    engine.scheduler._preempt(rng.choice(engine.scheduler.running))
                for output in engine.step():
                    tokens, scores = results.setdefault((output.request_id, output.index), ([], []))
                    tokens += [exact(token) for token in output.new_tokens]
                    scores += [score and exact(score) for score in output.prompt_logprobs or ()]
                    if output.finished:
                        finished.add((output.request_id, output.index))
            assert engine.check() == []
    assert not preempt or engine.counters.preemptions > 10
    assert not pause or engine.counters.pauses > 10
    assert not crash or crashes > 5
    return results


def replay(item: EngineRequest, results: Result, finished: set[tuple[str, int]]) -> EngineRequest | None:
    """What a new engine is given to go on after these results; None when the request is complete."""
    keys = [(item.request_id, index) for index in range(item.params.num_sequences)]
    if finished.issuperset(keys):
        return None
    produced = [
        ProducedSequence([token[0] for token in results.get(key, ([], []))[0]], key in finished) for key in keys
    ]
    return replace(item, produced=produced)


def exact(token: SampledToken) -> tuple[int, str, int, tuple[tuple[int, str], ...]]:
    """Everything the back end said of a token, floats bit by bit."""
    return token.token, token.logprob.hex(), token.rank, tuple((other, value.hex()) for other, value in token.top)


@pytest.fixture(scope="module")
def alone(load: Any) -> Any:
    """Each request by itself, with nothing cached: what every other run must give again."""

    @cache
    def run_alone(form: str, kv: str = "bf16") -> Result:
        return run(load(form, 1, kv), requests(), alone=True, enable_prefix_caching=False)

    return run_alone


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64},
        {"rounds": 2},
        {"num_blocks": 24},
        {"preempt": True, "max_num_batched_tokens": 100},
        {"preempt": True, "max_num_batched_tokens": 100, "enable_prefix_caching": False},
        {"crash": True},
        {"crash": True, "max_num_batched_tokens": 100, "num_blocks": 24, "enable_prefix_caching": False},
        {"pause": True, "max_num_batched_tokens": 100},
        {"alone": True},
        {"threads": 2},
        {"policy": "shortest", "capacity": "no_evict"},
    ],
    ids=str,
)
def test_ids_and_log_probabilities_are_the_same_bits_as_alone(
    load: Any, alone: Any, form: str, settings: dict[str, Any]
) -> None:
    items = requests()
    if not settings.get("alone"):
        random.Random(str(settings)).shuffle(items)
    backend = load(form, settings.get("threads", 1))
    found = run(backend, items, **{name: value for name, value in settings.items() if name != "threads"})
    expected = alone(form)
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []


@pytest.mark.parametrize("kv", [name for name in KV_CACHE_TYPES if name != "bf16"])
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 64, "rounds": 2},
        {"preempt": True, "pause": True, "max_num_batched_tokens": 100},
        {"crash": True, "num_blocks": 24},
    ],
    ids=str,
)
def test_every_type_of_kv_cache_gives_the_same_bits_as_alone(
    load: Any, alone: Any, kv: str, settings: dict[str, Any]
) -> None:
    items = requests()
    random.Random(str(settings)).shuffle(items)
    assert run(load("w4", 2, kv), items, **settings) == alone("w4", kv)


def test_the_requests_are_not_all_alike(alone: Any) -> None:
    results = alone("none")
    assert len({tuple(token[0] for token in tokens) for tokens, _ in results.values() if len(tokens) > 3}) > 20
    assert len({token[0] for tokens, _ in results.values() for token in tokens}) > 100
