"""Detection of watermarks: the statistic, what it refuses, and texts of the real model with and without one."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import LLM, EngineOptions, ParameterError, RequestOutput, SamplingParams
from octavo.engine.request import EngineRequest, ProducedSequence
from octavo.frontend.loading import load_engine
from octavo.watermark import FLAG_ABOVE, WatermarkScore, detect, green_list


def marked_ids(length: int, vocab_size: int, gamma: float = 0.5) -> list[int]:
    """A walk through green lists only."""
    rng = np.random.default_rng(0)
    ids = [3]
    while len(ids) < length:
        ids.append(int(rng.choice(green_list(ids[-1], vocab_size, gamma))))
    return ids


def test_a_text_of_green_tokens_only_is_flagged():
    score = detect(marked_ids(101, 500), vocab_size=500, ignore_repeated_bigrams=False)
    assert score == WatermarkScore(100, 100, 10.0, score.p_value, True)
    assert score.p_value == pytest.approx(0.5 * math.erfc(10 / math.sqrt(2)))


def test_random_tokens_score_like_a_standard_normal():
    rng = np.random.default_rng(1)
    for gamma in (0.25, 0.5):
        z = [detect(rng.integers(0, 300, 200), vocab_size=300, gamma=gamma).z for _ in range(100)]
        assert abs(np.mean(z)) < 0.4
        assert 0.75 < np.std(z) < 1.25
        assert max(z) < FLAG_ABOVE


def test_another_gamma_or_vocabulary_does_not_see_the_watermark():
    ids = marked_ids(400, 500, gamma=0.25)
    assert detect(ids, vocab_size=500, gamma=0.25).flagged
    assert not detect(ids, vocab_size=501, gamma=0.25).flagged


def test_repeated_pairs_count_once_unless_told_otherwise():
    green = int(green_list(5, 100, 0.5)[0])
    ids = [5, green] * 50
    assert detect(ids, vocab_size=100).num_tokens == 2
    assert detect(ids, vocab_size=100, ignore_repeated_bigrams=False).num_tokens == 99


@pytest.mark.parametrize("ids", [[], [7]])
def test_nothing_to_look_at_is_not_flagged(ids):
    assert detect(ids, vocab_size=100) == WatermarkScore(0, 0, 0.0, 1.0, False)


def test_the_threshold_decides_the_flag():
    ids = marked_ids(26, 500)
    score = detect(ids, vocab_size=500, threshold=4.0)
    assert score.z == 5.0
    assert score.flagged
    assert not detect(ids, vocab_size=500, threshold=5.0).flagged


def test_a_string_needs_a_tokenizer_and_takes_its_vocabulary():
    class Letters:
        vocab_size = 26

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return [ord(c) - 97 for c in text]

    text = "".join(chr(97 + token) for token in marked_ids(80, 26))
    assert detect(text, tokenizer=Letters()).flagged
    with pytest.raises(ParameterError, match="tokenizer"):
        detect("abc", vocab_size=26)
    with pytest.raises(ParameterError, match="vocab_size"):
        detect([1, 2, 3])


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("gamma", 0.0), ("gamma", 1.0), ("gamma", math.nan), ("gamma", "half"), ("vocab_size", 0),
        ("vocab_size", 1 << 40), ("vocab_size", True), ("threshold", 0.0), ("threshold", math.nan),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(field, wrong):
    with pytest.raises(ParameterError) as caught:
        detect([1, 2, 3], **{"vocab_size": 100, field: wrong})
    assert caught.value.field == field


def test_ids_outside_the_vocabulary_are_refused():
    for ids in ([1, 100], [-1, 1]):
        with pytest.raises(ParameterError, match="text"):
            detect(ids, vocab_size=100)
    with pytest.raises(ParameterError, match="previous"):
        green_list(100, 100)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 19), max_size=60), st.floats(0.01, 0.99), st.booleans())
def test_scores_of_any_ids_are_finite_and_consistent(ids, gamma, once):
    score = detect(ids, vocab_size=20, gamma=gamma, ignore_repeated_bigrams=once)
    assert 0 <= score.green <= score.num_tokens <= max(0, len(ids) - 1)
    assert math.isfinite(score.z)
    assert 0.0 <= score.p_value <= 1.0


# -- the real model. Few texts, to keep the suite short; the soak test has a hundred of each.

OPENINGS = ["Once upon a time", "The history of the city of", "In this article, we will", "My favourite recipe"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path):
    with LLM(str(smollm2_path), max_model_len=512) as made:
        yield made


def texts(llm: LLM, seeds: range, **params) -> list[RequestOutput]:
    prompts = [OPENINGS[seed % len(OPENINGS)] for seed in seeds]
    made = {"max_tokens": 201, "ignore_eos": True, **params}
    return llm.generate(prompts, [SamplingParams(seed=seed, **made) for seed in seeds], use_tqdm=False)


def scores(outputs: list[RequestOutput]) -> list[float]:
    # With repeated pairs, so that each text counts 200 tokens.
    found = [
        detect(output.outputs[0].token_ids, vocab_size=49_152, ignore_repeated_bigrams=False) for output in outputs
    ]
    assert all(score.num_tokens == 200 for score in found)
    return [score.z for score in found]


def test_watermarked_texts_of_200_tokens_are_found_and_others_are_not(llm):
    marked = texts(llm, range(3), watermark=True)
    plain = texts(llm, range(4))
    assert min(scores(marked)) > FLAG_ABOVE
    assert max(map(abs, scores(plain))) < FLAG_ABOVE
    # Encoding the text again gives nearly the same tokens.
    for output in marked:
        assert detect(output.outputs[0].text, tokenizer=llm.get_tokenizer()).flagged


def test_a_watermarked_answer_is_the_same_alone_and_among_others(llm):
    together = texts(llm, range(8), watermark=True, max_tokens=24)
    for seed in (0, 5):
        (alone,) = texts(llm, range(seed, seed + 1), watermark=True, max_tokens=24)
        assert alone.outputs[0].token_ids == together[seed].outputs[0].token_ids


def test_a_preempted_watermarked_answer_goes_on_as_if_nothing_had_happened(smollm2_path, llm):
    expected = [output.outputs[0].token_ids for output in texts(llm, range(4), watermark=True, max_tokens=60)]
    with LLM(str(smollm2_path), max_model_len=128, num_gpu_blocks_override=10) as small:
        found = [output.outputs[0].token_ids for output in texts(small, range(4), watermark=True, max_tokens=60)]
        assert small.stats().counters.preemptions > 0
    assert found == expected


@pytest.fixture
def engine(smollm2_path: Path):
    with closing(load_engine(EngineOptions(model=str(smollm2_path), max_model_len=128))) as loaded:
        yield loaded.engine


def test_a_replayed_watermarked_answer_goes_on_bit_by_bit(engine):
    params = SamplingParams(
        watermark=True, seed=4, max_tokens=24, logprobs=2, logprobs_mode="processed", top_p=0.95, ignore_eos=True
    )

    def run(*produced: ProducedSequence) -> list[tuple[object, ...]]:
        engine.add(EngineRequest("a", [504, 1463, 282], params, produced=produced))
        tokens = []
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.new_tokens]
        return [(token.token, token.logprob, token.rank, token.top) for token in tokens]

    whole = run()
    assert len(whole) == 24
    for count in (1, 11, 23):
        before = [int(token) for token, *_ in whole[:count]]
        assert run(ProducedSequence(before)) == whole[count:]


@pytest.mark.soak
def test_a_hundred_texts_of_each_kind_are_told_apart(llm):
    assert min(scores(texts(llm, range(100), watermark=True))) > FLAG_ABOVE
    plain = scores(texts(llm, range(100)))
    assert max(map(abs, plain)) < FLAG_ABOVE
    assert 0.6 < np.std(plain) < 1.4
