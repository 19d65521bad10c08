"""Rebuilds the tokenizer of a GGUF file from its metadata: byte-level BPE and SentencePiece vocabularies.

The metadata is read as data from a stranger: everything is checked before it reaches the tokenizer library, and what
is wrong is refused with a message that names the key and the numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from octavo.errors import ModelError, WeightsError
from octavo.frontend.tokenizer_pre import PreTokenizer, find_pre_tokenizer

__all__ = ["GgufVocabulary", "build_gguf_vocabulary"]

_log = logging.getLogger(__name__)

# Limits of what is believed to be a vocabulary; the largest in use have about 300,000 tokens of up to 512 bytes.
_MAX_TOKENS = 1 << 21
_MAX_MERGES = 1 << 22
_MAX_TOKEN_CHARACTERS = 4096
_MAX_SPLIT_CHARACTERS = 1 << 23
_MAX_TEMPLATES = 64

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece's visible space

# Control tokens that end an answer. Files name one EOS id and perhaps an end-of-turn id, while the models they were
# made from often stop at several; these texts have no other use as control tokens.
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """A rebuilt tokenizer and the ids and templates that go with it."""

    backend: Tokenizer
    size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    unk_id: int | None
    special_ids: frozenset[int]
    chat_templates: dict[str, str] = field(default_factory=dict)


class _Metadata:
    """Typed, checked access to the tokenizer keys of a GGUF file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.{key}")

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise WeightsError(f"GGUF tokenizer.{key} must be a string, got {type(value).__name__}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
            return bool(value)
        raise WeightsError(f"GGUF tokenizer.{key} must be a boolean, got {type(value).__name__}")

    def token_id(self, key: str, size: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        number = _integer(value)
        if number is None:
            raise WeightsError(f"GGUF tokenizer.{key} must be an integer, got {type(value).__name__}")
        if number in (-1, 0xFFFFFFFF):  # how files write "none"
            return None
        if not 0 <= number < size:
            raise WeightsError(f"GGUF tokenizer.{key} is {number}, but the vocabulary has {size} tokens")
        return number

    def strings(self, key: str, limit: int, longest: int) -> list[str] | None:
        values = self._array(key, limit)
        if values is None:
            return None
        strings = list(values)
        if set(map(type, strings)) - {str}:
            wrong = next(value for value in strings if type(value) is not str)
            raise WeightsError(f"GGUF tokenizer.{key} must be an array of strings, found {type(wrong).__name__}")
        if strings and max(map(len, strings)) > longest:
            raise WeightsError(
                f"GGUF tokenizer.{key} has a string of {max(map(len, strings))} characters, the limit is {longest}"
            )
        return strings

    def numbers(self, key: str, size: int) -> list[Any] | None:
        values = self._array(key, _MAX_TOKENS)
        if values is None:
            return None
        if len(values) != size:
            raise WeightsError(f"GGUF tokenizer.{key} has {len(values)} entries, but the vocabulary has {size} tokens")
        return list(values.tolist()) if hasattr(values, "tolist") else list(values)

    def _array(self, key: str, limit: int) -> Any:
        values = self.get(key)
        if values is None:
            return None
        is_array = hasattr(values, "tolist") and hasattr(values, "__len__")
        if isinstance(values, (str, bytes, Mapping)) or not (isinstance(values, Sequence) or is_array):
            raise WeightsError(f"GGUF tokenizer.{key} must be an array, got {type(values).__name__}")
        if len(values) > limit:
            raise WeightsError(f"GGUF tokenizer.{key} has {len(values)} entries, the limit is {limit}")
        return values


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return int(value.__index__())
    except (AttributeError, TypeError):
        return None


def build_gguf_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """The tokenizer that ``tokenizer.*`` describes; ModelError when of an unknown kind, WeightsError when damaged."""
    data = _Metadata(metadata)
    kind = data.text("ggml.model")
    if kind is None:
        raise ModelError("the GGUF file has no tokenizer (tokenizer.ggml.model is missing); name one with --tokenizer")
    tokens = data.strings("ggml.tokens", _MAX_TOKENS, _MAX_TOKEN_CHARACTERS)
    if not tokens:
        raise WeightsError("the GGUF file has an empty vocabulary (tokenizer.ggml.tokens)")
    if "" in tokens:
        tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(tokens)]
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        seen: set[str] = set()
        for place, token in enumerate(tokens):
            if token in seen:
                raise WeightsError(f"GGUF tokenizer.ggml.tokens has {token[:40]!r} twice, the second time at {place}")
            seen.add(token)
    types = _token_types(data, len(tokens))
    if kind == "gpt2":
        name = data.text("ggml.pre")
        if not name:
            _log.warning("the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); words may be cut wrongly")
        pre = find_pre_tokenizer(name or "default")
        backend = _byte_level(data, pre, vocab)
        add_bos = pre.add_bos
        unk_id = data.token_id("ggml.unknown_token_id", len(tokens))
    elif kind == "llama":
        unk_id = data.token_id("ggml.unknown_token_id", len(tokens))
        if unk_id is None:
            unk_id = next((place for place, type_ in enumerate(types) if type_ == _UNKNOWN), None)
        backend = _sentencepiece(data, tokens, vocab, types, unk_id)
        add_bos = True
    else:
        raise ModelError(
            f"GGUF tokenizer model {kind[:80]!r} is not supported (supported: gpt2, llama); "
            "use the model's Hugging Face directory with its tokenizer.json instead"
        )
    return _finish(data, backend, tokens, vocab, types, add_bos, unk_id, sentencepiece=kind == "llama")


def _token_types(data: _Metadata, size: int) -> list[int]:
    types = data.numbers("ggml.token_type", size)
    if types is None:
        return [_NORMAL] * size
    if set(map(type, types)) - {int}:
        raise WeightsError("GGUF tokenizer.ggml.token_type must be an array of integers")
    if types and not (min(types) >= 0 and max(types) <= _BYTE):
        raise WeightsError(f"GGUF tokenizer.ggml.token_type has {max(types)}, known types are 0 to {_BYTE}")
    return types


def _construct(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    """The tokenizer library checks merges against the vocabulary; its errors become ours."""
    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    except Exception as error:
        raise WeightsError(f"the GGUF vocabulary is inconsistent: {str(error)[:200]}") from error


def _byte_level(data: _Metadata, pre: PreTokenizer, vocab: dict[str, int]) -> Tokenizer:
    merges = data.strings("ggml.merges", _MAX_MERGES, 2 * _MAX_TOKEN_CHARACTERS + 1)
    if merges is None:
        raise WeightsError("the GGUF file has no merges (tokenizer.ggml.merges), which byte-level BPE needs")
    # Tens of thousands of merges are taken apart while a user waits, so the usual form goes the short way.
    pairs = [(left, right) for left, _, right in map(str.partition, merges, repeat(" ")) if left and right]
    if len(pairs) != len(merges):
        pairs = [_merge(place, merge) for place, merge in enumerate(merges)]
    backend = _construct(vocab, pairs, ignore_merges=pre.ignore_merges)
    normalizer = pre.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre.build(data.flag("ggml.add_space_prefix", False))
    backend.decoder = decoders.ByteLevel()
    return backend


def _merge(place: int, merge: str) -> tuple[str, str]:
    """The two tokens of a merge; the first is never empty, so a space the merge begins with belongs to it."""
    cut = merge.find(" ", 1)
    if cut < 0 or cut == len(merge) - 1:
        raise WeightsError(f"GGUF tokenizer.ggml.merges[{place}] is {merge[:40]!r}, not two tokens")
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(
    data: _Metadata, tokens: list[str], vocab: dict[str, int], types: list[int], unk_id: int | None
) -> Tokenizer:
    if data.get("ggml.precompiled_charsmap") is not None:
        raise ModelError(
            "the GGUF tokenizer has a normalisation table (tokenizer.ggml.precompiled_charsmap), which octavo does not "
            "read; use the model's Hugging Face directory with its tokenizer.json instead"
        )
    pairs = _score_merges(data, tokens, vocab, types)
    options: dict[str, Any] = {"fuse_unk": True}
    if unk_id is not None:
        options["unk_token"] = tokens[unk_id]
    byte_tokens = sum(f"<0x{code:02X}>" in vocab for code in range(256))
    if byte_tokens not in (0, 256):
        raise WeightsError(f"the GGUF vocabulary has {byte_tokens} of the 256 byte tokens <0x00> to <0xFF>")
    backend = _construct(vocab, pairs, byte_fallback=byte_tokens == 256, **options)
    steps: list[Any] = []
    if data.flag("ggml.remove_extra_whitespaces", False):
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    prefix = data.flag("ggml.add_space_prefix", True)
    if prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    tail = [decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tail.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), *tail])
    return backend


def _score_merges(data: _Metadata, tokens: list[str], vocab: dict[str, int], types: list[int]) -> list[tuple[str, str]]:
    """The merges that the scores of a SentencePiece BPE vocabulary stand for.

    SentencePiece merges the two neighbours whose joint piece has the highest score; so every way of putting a piece
    together from two others is a merge, and merges are ranked by the score of what they make.
    """
    scores = data.numbers("ggml.scores", len(tokens))
    if scores is None:
        raise WeightsError(
            "the GGUF file has no scores (tokenizer.ggml.scores), which a SentencePiece vocabulary needs"
        )
    if set(map(type, scores)) - {float, int} or not all(map(math.isfinite, scores)):
        raise WeightsError("GGUF tokenizer.ggml.scores must be an array of finite numbers")
    mergeable = {
        token: place
        for token, place, type_ in zip(tokens, range(len(tokens)), types, strict=True)
        if type_ in (_NORMAL, _USER_DEFINED, 0)
    }
    work = sum(map(len, mergeable))
    if work > _MAX_SPLIT_CHARACTERS:
        raise WeightsError(f"the GGUF vocabulary has {work} characters, the limit is {_MAX_SPLIT_CHARACTERS}")
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, place in mergeable.items():
        if len(token) < 2 or types[place] == _USER_DEFINED:
            continue
        score = -scores[place]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in mergeable:
                right = token[cut:]
                if right in mergeable:
                    ranked.append((score, mergeable[left], mergeable[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _finish(
    data: _Metadata,
    backend: Tokenizer,
    tokens: list[str],
    vocab: dict[str, int],
    types: list[int],
    add_bos: bool,
    unk_id: int | None,
    *,
    sentencepiece: bool,
) -> GgufVocabulary:
    size = len(tokens)
    bos_id = data.token_id("ggml.bos_token_id", size)
    eos_id = data.token_id("ggml.eos_token_id", size)
    pad_id = data.token_id("ggml.padding_token_id", size)
    if sentencepiece:
        # Files from before the keys existed rely on SentencePiece's usual places.
        bos_id = vocab.get("<s>") if bos_id is None else bos_id
        eos_id = vocab.get("</s>") if eos_id is None else eos_id
    ends = [eos_id]
    ends += [data.token_id(f"ggml.{name}_token_id", size) for name in ("eot", "eom")]
    texts = [text for text in _END_TEXTS if text in vocab and types[vocab[text]] == _CONTROL]
    if "<|return|>" in texts and "<|end|>" in texts:
        texts.remove("<|end|>")  # where an answer has several parts, this ends a part
    ends += [vocab[text] for text in texts]
    eos_ids = tuple(dict.fromkeys(end for end in ends if end is not None))

    unusual = [place for place, type_ in enumerate(types) if type_ != _NORMAL]
    special = {place for place in unusual if types[place] in (_CONTROL, _UNKNOWN)}
    special.update(place for place in (bos_id, *eos_ids, pad_id) if place is not None)
    # Text that spells a special token is that token, everywhere; user-defined tokens likewise, but they are shown.
    prefixed = sentencepiece and data.flag("ggml.add_space_prefix", True)
    added = [AddedToken(tokens[place], special=True, normalized=False) for place in sorted(special)]
    added += [
        AddedToken(tokens[place], special=False, normalized=sentencepiece and not prefixed)
        for place in unusual
        if types[place] == _USER_DEFINED and place not in special
    ]
    backend.add_tokens(added)
    if backend.get_vocab_size(with_added_tokens=True) != size:
        raise WeightsError(f"the GGUF vocabulary of {size} tokens does not hold together with its special tokens")

    begin = bos_id if data.flag("ggml.add_bos_token", add_bos) else None
    end = eos_id if data.flag("ggml.add_eos_token", False) else None
    if data.flag("ggml.add_bos_token", False) and bos_id is None:
        raise WeightsError("GGUF tokenizer.ggml.add_bos_token is set, but there is no tokenizer.ggml.bos_token_id")
    if data.flag("ggml.add_eos_token", False) and eos_id is None:
        raise WeightsError("GGUF tokenizer.ggml.add_eos_token is set, but there is no tokenizer.ggml.eos_token_id")
    frame = frame_processor(backend, begin, end)
    if frame is not None:
        backend.post_processor = frame
    return GgufVocabulary(backend, size, bos_id, eos_ids, pad_id, unk_id, frozenset(special), _chat_templates(data))


def frame_processor(backend: Tokenizer, begin: int | None, end: int | None) -> Any:
    """The post-processor that puts a BOS before and an EOS after a text, or None."""
    if begin is None and end is None:
        return None
    # The library takes the names of special pieces apart, so they get plain names here, not the tokens' own text.
    single = [*(["bos"] if begin is not None else []), "$A", *(["eos"] if end is not None else [])]
    special: list[Any] = [
        {"id": name, "ids": [place], "tokens": [backend.id_to_token(place)]}
        for name, place in (("bos", begin), ("eos", end))
        if place is not None
    ]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=special)


def _chat_templates(data: _Metadata) -> dict[str, str]:
    templates: dict[str, str] = {}
    default = data.text("chat_template")
    if default is not None:
        templates["default"] = default
    for name in data.strings("chat_templates", _MAX_TEMPLATES, 256) or ():
        template = data.text(f"chat_template.{name}")
        if template is not None:
            templates[name] = template
    return templates
