"""SamplingParams: what is accepted, what is refused and how the refusal names it."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ParameterError
from octavo.sampling.params import MAX_LOGPROB_ENTRIES, SamplingParams

REFUSED = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("n", 16385),
    ("best_of", 0),
    ("presence_penalty", 2.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "0"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf),
    ("temperature", -0.1),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("typical_p", 0.0),
    ("typical_p", 2),
    ("watermark", 1),
    ("watermark", "yes"),
    ("watermark_gamma", 0.0),
    ("watermark_gamma", 1.0),
    ("watermark_gamma", math.nan),
    ("watermark_gamma", True),
    ("watermark_delta", 0.0),
    ("watermark_delta", -2.0),
    ("watermark_delta", 100.1),
    ("watermark_delta", math.inf),
    ("watermark_delta", math.nan),
    ("logprobs_mode", "cooked"),
    ("logprobs_mode", None),
    ("logprobs_mode", ["raw"]),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("seed", True),
    ("stop", 5),
    ("stop", ["a", 5]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 65),
    ("stop", "a" * 1025),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 3),
    ("stop_token_ids", [[1]]),
    ("bad_words", [""]),
    ("bad_words", [None]),
    ("bad_words", ["a"] * 129),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", None),
    ("skip_special_tokens", "yes"),
    ("max_tokens", 0),
    ("max_tokens", 1 << 31),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("logprobs", True),
    ("prompt_logprobs", -2),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: None}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [1.5]),
    ("allowed_token_ids", [{}]),
    ("priority", 0.5),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=str)
def test_a_value_outside_the_limits_is_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.limit
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_parameter_is_refused_with_a_suggestion():
    with pytest.raises(ParameterError, match="did you mean temperature") as caught:
        SamplingParams(temprature=0.5)
    assert caught.value.field == "temprature"
    with pytest.raises(ParameterError, match="use_beam_search"):
        SamplingParams.from_mapping({"use_beam_search": True})
    with pytest.raises(ParameterError):
        SamplingParams().clone(bad_words_ids=((1,),))


def test_positional_arguments_are_refused():
    with pytest.raises(ParameterError, match="keyword"):
        SamplingParams(0.5)


def test_the_defaults_are_those_of_vllm():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (p.seed, p.logprobs, p.prompt_logprobs, p.skip_special_tokens, p.ignore_eos) == (
        None,
        None,
        None,
        True,
        False,
    )


def test_stop_may_be_one_string_or_several_or_none():
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="x").stop_strings == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop_strings == ("x", "y")


def test_seed_minus_one_is_no_seed():
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_logit_bias_takes_string_ids_and_is_clamped():
    assert SamplingParams(logit_bias={"7": 250, 8: -math.inf, 9: 0.5}).logit_bias == {7: 100.0, 8: -100.0, 9: 0.5}


def test_repeated_ids_count_once():
    assert SamplingParams(stop_token_ids=[3, 3, 1], allowed_token_ids=[5, 5]).stop_token_ids == (3, 1)


@pytest.mark.parametrize("temperature", [0, 0.0, 9e-6])
def test_tiny_temperatures_are_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-5).greedy


@pytest.mark.parametrize("field", ["top_p", "typical_p"])
def test_shares_below_what_float32_holds_stay_above_zero(field):
    assert np.float32(getattr(SamplingParams(**{field: 1e-300}), field)) > 0


def test_several_answers_need_sampling():
    for values in ({"n": 2}, {"best_of": 2}):
        with pytest.raises(ParameterError, match="greedy") as caught:
            SamplingParams(temperature=0, **values)
        assert caught.value.field in values


def test_best_of_is_at_least_n_and_asks_for_log_probabilities():
    with pytest.raises(ParameterError, match="best_of"):
        SamplingParams(n=3, best_of=2)
    p = SamplingParams(n=2, best_of=3)
    assert p.num_sequences == 3
    assert p.num_logprobs(100) == 0
    assert SamplingParams(n=2).num_logprobs(100) is None
    assert SamplingParams(logprobs=5).num_logprobs(3) == 3
    assert SamplingParams(prompt_logprobs=-1).num_prompt_logprobs(50) == 50


def test_a_clone_changes_and_checks_and_the_original_stays():
    p = SamplingParams(temperature=0.5, stop=["a"])
    q = p.clone(temperature=0.7)
    assert (p.temperature, q.temperature, q.stop) == (0.5, 0.7, ("a",))
    with pytest.raises(ParameterError):
        p.clone(top_p=2)
    with pytest.raises(ParameterError, match="foo"):
        p.clone(foo=1)
    with pytest.raises(AttributeError):
        p.temperature = 1.0


def test_copies_and_pickles_are_equal():
    p = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2.0}, allowed_token_ids=[1, 2])
    assert pickle.loads(pickle.dumps(p)) == p
    assert copy.deepcopy(p) == p


WORDS = {"bad": [1], " bad": [2], "worse": [3, 4], " worse": [5, 4], "odd": [6], " odd": [6, 7]}


class SpaceJoining:
    """Encodes like a byte-pair tokenizer whose tokens include the space before a word."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return WORDS.get(text, [])


def test_bad_words_are_tokenised_with_and_without_a_space():
    p = SamplingParams(bad_words=[" bad", "worse", "odd"]).with_bad_words_ids(SpaceJoining())
    assert p.bad_words_ids == ((1,), (2,), (3, 4), (5, 4), (6,))
    assert p.with_bad_words_ids(SpaceJoining()) is p
    assert p.clone(temperature=0.3).bad_words_ids == p.bad_words_ids
    assert p.clone(bad_words=["odd"]).bad_words_ids is None
    with pytest.raises(ParameterError, match="can encode"):
        SamplingParams(bad_words=["unknown"]).with_bad_words_ids(SpaceJoining())


def test_bad_words_of_too_many_tokens_are_refused():
    class Long:
        def encode(self, text, add_special_tokens=True):
            return list(range(600)) if text.startswith(" ") else list(range(1, 601))

    with pytest.raises(ParameterError, match="1024"):
        SamplingParams(bad_words=["a"]).with_bad_words_ids(Long())


@pytest.mark.parametrize("token", [100, 10**9])
@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name(field, token):
    p = SamplingParams(**{field: {token: 1.0} if field == "logit_bias" else [token]})
    with pytest.raises(ParameterError) as caught:
        p.check_for_model(100)
    assert caught.value.field == field
    p.check_for_model(token + 1)


def test_log_probabilities_are_limited():
    with pytest.raises(ParameterError, match="at most 20"):
        SamplingParams(logprobs=21).check_for_model(1000)
    with pytest.raises(ParameterError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=6).check_for_model(1000, max_logprobs=5)
    SamplingParams(logprobs=30).check_for_model(1000, max_logprobs=30)


def test_the_whole_vocabulary_is_limited_by_the_number_of_positions():
    positions = MAX_LOGPROB_ENTRIES // 50_000
    SamplingParams(logprobs=-1, max_tokens=positions).check_for_model(50_000)
    with pytest.raises(ParameterError, match=f"at most {positions} positions"):
        SamplingParams(logprobs=-1, max_tokens=positions + 1).check_for_model(50_000)
    SamplingParams(logprobs=-1, max_tokens=None).check_for_model(50_000, max_model_len=positions)
    with pytest.raises(ParameterError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1).check_for_model(50_000, prompt_tokens=positions + 1)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-5, 300), max_size=4),
    st.lists(st.text(max_size=3), max_size=4),
    st.dictionaries(st.integers(-5, 300), st.floats(), max_size=3),
)
names = sorted(set(SamplingParams.__dataclass_fields__) - {"bad_words_ids"})


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from(names), anything, max_size=3))
def test_any_values_either_make_valid_parameters_or_a_parameter_error(values):
    refused = None
    try:
        p = SamplingParams(**values)
    except ParameterError as error:
        refused = error.field
    if refused is not None:
        assert refused in {*values, "n", "best_of", "min_tokens"}
        return
    assert p.n >= 1
    assert p.num_sequences >= p.n
    assert 0.0 < p.top_p <= 1.0
    assert math.isfinite(p.temperature)
    assert p.clone() == p


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    n=st.integers(1, 16384),
    temperature=st.floats(0.01, 2.0),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.integers(-1, 100_000),
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    presence_penalty=st.floats(-2, 2),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=10), max_size=64),
)
def test_everything_inside_the_limits_is_accepted(**values):
    p = SamplingParams(**values)
    assert p.temperature == values["temperature"]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    watermark=st.booleans(),
    watermark_gamma=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
    watermark_delta=st.floats(0.0, 100.0, exclude_min=True),
    logprobs_mode=st.sampled_from(["raw", "processed"]),
)
def test_watermarks_inside_the_limits_survive_a_mapping(**values):
    p = SamplingParams(**values)
    assert p.watermark_gamma == values["watermark_gamma"]
    assert np.float32(p.watermark_delta) > 0
    assert SamplingParams.from_mapping(p.to_mapping()) == p
