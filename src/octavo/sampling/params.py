"""SamplingParams: what a request may ask of generation, with vLLM's names, meanings and limits, checked when made."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.errors import ParameterError

__all__ = [
    "DEFAULT_MAX_LOGPROBS",
    "GREEDY_BELOW",
    "MAX_LOGPROB_ENTRIES",
    "SamplingParams",
    "WordEncoder",
]

GREEDY_BELOW = 1e-5  # temperatures below this are greedy
DEFAULT_MAX_LOGPROBS = 20  # per position, unless the engine is configured otherwise
MAX_LOGPROB_ENTRIES = 1 << 22  # most log-probabilities of one sequence, where it asks for more than the default each
MAX_SEQUENCES = 16384
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_TOKENS = 1024
MAX_TEMPERATURE = 1e6
LOGIT_BIAS_BOUND = 100.0
MAX_WATERMARK_DELTA = 100.0
_INT32 = (1 << 31) - 1
_LEAST_SHARE = 2.0**-126  # the smallest normal float32


class WordEncoder(Protocol):
    """The one thing bad words need of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends.

    Immutable: ``clone(temperature=0.5)`` makes a changed copy. Anything wrong raises ``ParameterError`` naming the
    field, the value and the limit; nothing is accepted and ignored.

    - ``n``: answers returned. ``best_of``: answers generated, of which the ``n`` with the highest cumulative
      log-probability are returned; default ``n``. More than one needs sampling (temperature above 0).
    - ``presence_penalty``, ``frequency_penalty`` (-2 to 2): taken from the logit of a token that is in the output, once
      and per occurrence. ``repetition_penalty`` (> 0): logits of tokens in the prompt or the output are divided by it
      when positive, multiplied when negative.
    - ``temperature``: 0 (anything below 1e-5) is greedy, and top_p, top_k, min_p and typical_p then change nothing.
      Small temperatures are used as given (vLLM raises those below 0.01).
    - ``top_k``: the k most probable tokens; 0 or -1: all. ``top_p``: the most probable tokens that together reach p.
      ``min_p``: tokens at least this share as probable as the most probable one. ``typical_p``: locally typical
      sampling as in Text Generation Inference; 1 is off.
    - ``seed``: any 64-bit integer; -1 or None: the engine draws one.
    - ``stop``: up to 64 strings that end the answer; left out of the text unless ``include_stop_str_in_output``.
      ``stop_token_ids``: ids that end it, beside the model's own end tokens unless ``ignore_eos``.
    - ``bad_words``: up to 128 strings never generated (their last token is banned after the rest), tokenised by
      ``with_bad_words_ids`` at the start of a text and, where the tokenizer tells these apart, after a space.
    - ``max_tokens``: None: as many as the context holds. ``min_tokens``: no end token before this many.
    - ``watermark``: prefer, at each token, a share of the vocabulary that the token before it decides:
      ``watermark_gamma`` (above 0, below 1) of it, by adding ``watermark_delta`` (above 0, at most 100) to its logits
      before anything else changes them; ``octavo.watermark`` finds the trace in the text. The lists are those of Text
      Generation Inference on a CPU. Gamma and delta do nothing by themselves.
    - ``logprobs``: how many of the most probable tokens to report beside the chosen one (0: the chosen one only); -1:
      the whole vocabulary; ``prompt_logprobs`` the same for prompt tokens. The highest allowed is the engine's
      ``max_logprobs``; see ``check_for_model``.
    - ``logprobs_mode``: "raw" log-probabilities are the model's own, before any other field here changes them;
      "processed" ones are those the token is drawn with, after all of them, temperature included (greedy: after all but
      temperature, top_k, top_p, min_p and typical_p, which then change nothing). A processed list leaves out tokens
      that cannot be drawn, so it may be shorter than asked. Prompt log-probabilities are always raw.
    - ``logit_bias``: added to logits, clamped to -100 .. 100 as in vLLM. ``allowed_token_ids``: the only ids that
      may be generated.
    - ``truncate_prompt_tokens``: keep the last that many prompt tokens; -1: as many as fit the context.
    - ``skip_special_tokens``: leave special tokens out of the text. ``priority``: lower is scheduled first.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    watermark: bool = False
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    priority: int = 0
    bad_words_ids: tuple[tuple[int, ...], ...] | None = field(default=None, init=False, repr=False)

    if not TYPE_CHECKING:  # a type checker should see the generated __init__ only

        def __new__(cls, *args: object, **kwargs: object) -> SamplingParams:
            if args:
                raise ParameterError("SamplingParams", args[0], "given by keyword arguments only")
            for name, value in kwargs.items():
                if name not in _FIELD_NAMES:
                    raise ParameterError(name, value, "absent", _unknown_message(name))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        put = object.__setattr__
        _integer("n", self.n, 1, MAX_SEQUENCES)
        if self.best_of is not None:
            _integer("best_of", self.best_of, 1, MAX_SEQUENCES)
            if self.best_of < self.n:
                raise ParameterError("best_of", self.best_of, f"at least n ({self.n})")
        put(self, "presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put(self, "frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put(self, "repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6))
        put(self, "temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        put(self, "top_p", _share("top_p", self.top_p))
        put(self, "typical_p", _share("typical_p", self.typical_p))
        put(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        _integer("top_k", self.top_k, -1, _INT32)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
            if self.seed == -1:
                put(self, "seed", None)
        put(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH))
        put(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_STRING_LENGTH))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids, _INT32)
            if not allowed:
                raise ParameterError("allowed_token_ids", [], "absent or a list of at least one token id")
            put(self, "allowed_token_ids", allowed)
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        put(self, "watermark_gamma", _open_share("watermark_gamma", self.watermark_gamma))
        put(self, "watermark_delta", _delta("watermark_delta", self.watermark_delta))
        if self.logprobs_mode not in ("raw", "processed"):
            raise ParameterError("logprobs_mode", self.logprobs_mode, '"raw" or "processed"')
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "watermark"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "True or False")
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32)
        _integer("min_tokens", self.min_tokens, 0, _INT32)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, _INT32)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, _INT32)
            if self.truncate_prompt_tokens == 0:
                raise ParameterError("truncate_prompt_tokens", 0, "-1 (what fits the context) or at least 1")
        _integer("priority", self.priority, -(1 << 63), (1 << 63) - 1)
        if self.greedy and self.num_sequences > 1:
            name, value = ("n", self.n) if self.n > 1 else ("best_of", self.best_of)
            raise ParameterError(name, value, "1 with greedy sampling (temperature 0), where every answer is the same")

    # -- what the fields come to

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Answers generated: best_of, else n."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, whether one or several or none were given."""
        stop = self.stop
        return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)

    def num_logprobs(self, vocab_size: int) -> int | None:
        """How many most probable tokens to report at each generated position; None: no log-probabilities at all.

        When one answer is chosen among several (best_of > n) log-probabilities are needed for the choice: 0 at least.
        """
        if self.logprobs is None:
            return 0 if self.num_sequences > self.n else None
        return vocab_size if self.logprobs == -1 else min(self.logprobs, vocab_size)

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        """How many most probable tokens to report at each prompt position; None: no prompt log-probabilities."""
        if self.prompt_logprobs is None:
            return None
        return vocab_size if self.prompt_logprobs == -1 else min(self.prompt_logprobs, vocab_size)

    # -- changed copies

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked again. Tokenised bad words are kept unless bad_words changes."""
        for name, value in changes.items():
            if name not in _FIELD_NAMES:
                raise ParameterError(name, value, "absent", _unknown_message(name))
        copy = replace(self, **changes)
        if "bad_words" not in changes:
            object.__setattr__(copy, "bad_words_ids", self.bad_words_ids)
        return copy

    @classmethod
    def from_mapping(
        cls, values: Mapping[str, Any], bad_words_ids: Sequence[Sequence[int]] | None = None
    ) -> SamplingParams:
        """Parameters from a mapping such as a JSON object; a name that is not a field is refused.

        ``bad_words_ids`` are the bad words tokenised before, by ``with_bad_words_ids``.
        """
        made = cls(**dict(values))
        if bad_words_ids is not None:
            object.__setattr__(made, "bad_words_ids", tuple(tuple(word) for word in bad_words_ids))
        return made

    def to_mapping(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as ``from_mapping`` takes them."""
        return {name: value for name in _FIELD_NAMES if (value := getattr(self, name)) != _DEFAULTS[name]}

    def with_bad_words_ids(self, tokenizer: WordEncoder) -> SamplingParams:
        """A copy whose bad words are tokenised; itself when there are none or it is done.

        Each word is encoded as at the start of a text and after a space; the second form is kept when it starts with
        another token and is as long as the first, which is how tokenizers that join the space to the word show it.
        """
        if not self.bad_words or self.bad_words_ids is not None:
            return self
        sequences: list[tuple[int, ...]] = []
        for word in self.bad_words:
            bare = word.lstrip()
            first = tuple(tokenizer.encode(bare, add_special_tokens=False))
            spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
            if not first and not spaced:
                raise ParameterError("bad_words", word, "a word the tokenizer can encode")
            if first:
                sequences.append(first)
            if spaced and (not first or (spaced[0] != first[0] and len(spaced) == len(first))):
                sequences.append(spaced)
        sequences = list(dict.fromkeys(sequences))
        tokens = sum(len(sequence) for sequence in sequences)
        if tokens > MAX_BAD_WORDS_TOKENS:
            raise ParameterError("bad_words", tokens, f"at most {MAX_BAD_WORDS_TOKENS} tokens in all")
        copy = replace(self)
        object.__setattr__(copy, "bad_words_ids", tuple(sequences))
        return copy

    # -- checks that need to know the model

    def check_ids(self, vocab_size: int) -> None:
        """Check that every token id named is one of the vocabulary."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
            ("bad_words", [token for sequence in self.bad_words_ids or () for token in sequence]),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ParameterError(
                        name, token, f"token ids of the vocabulary (0 to {vocab_size - 1})",
                        f"{name} must hold token ids of the vocabulary (0 to {vocab_size - 1}), got {token}",
                    )  # fmt: skip

    def check_for_model(
        self,
        vocab_size: int,
        *,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        prompt_tokens: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Check what depends on the model: token ids within the vocabulary, log-probabilities within the limits.

        ``logprobs`` and ``prompt_logprobs`` may be up to ``max_logprobs``, or -1 for the whole vocabulary as long as
        one sequence then has at most ``MAX_LOGPROB_ENTRIES`` of them (its tokens times what each reports).
        """
        self.check_ids(vocab_size)
        longest = max_model_len if self.max_tokens is None else self.max_tokens
        if max_model_len is not None and longest is not None:
            longest = min(longest, max_model_len)
        for name, asked, tokens in (
            ("logprobs", self.logprobs, longest),
            ("prompt_logprobs", self.prompt_logprobs, prompt_tokens),
        ):
            if asked is None:
                continue
            if asked > max_logprobs:
                raise ParameterError(name, asked, f"at most {max_logprobs} (or -1 for the whole vocabulary)")
            if asked == -1 and vocab_size * (tokens or 1) > MAX_LOGPROB_ENTRIES:
                most = MAX_LOGPROB_ENTRIES // vocab_size
                raise ParameterError(
                    name, asked, f"at most {max_logprobs} for {tokens or 1} tokens",
                    f"{name}=-1 (all {vocab_size} tokens of the vocabulary) is possible for at most {most} positions, "
                    f"this request has up to {tokens or 1}: ask for fewer tokens or for at most {max_logprobs}",
                )  # fmt: skip


def _unknown_message(name: str) -> str:
    close = difflib.get_close_matches(name, _FIELD_NAMES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the parameters are {', '.join(sorted(_FIELD_NAMES))}"
    return f"{name} is not a sampling parameter: {hint}"


def _integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _share(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value <= 1.0:
        raise ParameterError(name, value, "a number above 0 and at most 1")
    # The native sampler computes in float32, where a smaller share would be 0.
    return max(float(value), _LEAST_SHARE)


def _open_share(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value < 1.0:
        raise ParameterError(name, value, "a number above 0 and below 1")
    return float(value)


def _delta(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0.0 < value <= MAX_WATERMARK_DELTA:
        raise ParameterError(name, value, f"a number above 0 and at most {MAX_WATERMARK_DELTA:g}")
    return max(float(value), _LEAST_SHARE)


def _strings(name: str, value: object, most: int, longest: int) -> tuple[str, ...]:
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise ParameterError(name, value, "a string or a list of strings")
    if len(items) > most:
        raise ParameterError(name, len(items), f"at most {most} strings")
    for item in items:
        if not item or len(item) > longest:
            raise ParameterError(name, item, f"non-empty strings of at most {longest} characters")
    return tuple(items)


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ParameterError(name, value, "a list of token ids")
    ids = list(value)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= _INT32:
            raise ParameterError(name, token, "token ids (integers from 0)")
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > most:
        raise ParameterError(name, len(unique), f"at most {most} token ids")
    return unique


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", value, "a mapping from token id to a number")
    result: dict[int, float] = {}
    for key, bias in value.items():
        token = key
        if isinstance(key, str):  # JSON objects have string keys
            try:
                token = int(key)
            except ValueError:
                token = -1
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= _INT32:
            raise ParameterError("logit_bias", key, "a mapping from token id (an integer from 0) to a number")
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or math.isnan(bias):
            raise ParameterError("logit_bias", bias, "a mapping from token id to a number (not NaN)")
        result[token] = max(-LOGIT_BIAS_BOUND, min(LOGIT_BIAS_BOUND, float(bias)))
    return result


_FIELD_NAMES = frozenset(item.name for item in fields(SamplingParams) if item.init)
_DEFAULTS = {item.name: item.default for item in fields(SamplingParams) if item.init}
