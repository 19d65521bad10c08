"""The named pre-tokenizers of GGUF byte-BPE vocabularies: how text is cut into words before merging.

A GGUF file stores only a name (``tokenizer.ggml.pre``); what the name means is a convention of the file format. Each
entry here states the cuts of the model's own tokenizer, which is what the model was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import ModelError

__all__ = ["PRE_TOKENIZERS", "PreTokenizer", "find_pre_tokenizer"]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting text: regular expressions in order, then the byte-level alphabet.

    Every match of an expression becomes a word of its own, and what lies between matches another; the next expression
    cuts each of those further. ``gpt2_words`` ends with GPT-2's own word expression, which byte-level encoding has.
    """

    splits: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_words: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self, add_prefix_space: bool) -> Any:
        """The ``tokenizers`` object that cuts and maps to the byte-level alphabet."""
        steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        # A prefix space has a meaning only where byte-level encoding alone cuts the text, as in GPT-2: after other cuts
        # it would be put before every word. Models with other cuts carry the flag without effect.
        prefix = add_prefix_space and not steps and self.gpt2_words
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=self.gpt2_words))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)

    def normalizer(self) -> Any:
        """The Unicode normalisation done before cutting, or None."""
        return normalizers.NFC() if self.nfc else None


# The building blocks. English contractions in any case; a word with at most one leading character that is neither a
# letter, a digit nor a line end; punctuation with an optional space before and line ends after; white space, leaving
# the last blank of a run to the word that follows.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATION_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_BLANKS = r"\s+(?!\S)|\s+"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"
_DIGIT = r"\p{N}"

# Words that also break at a change from lower to upper case ("camelCase"): upper then lower, or upper then maybe lower.
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*",
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _any_of(*alternatives: str) -> str:
    return "|".join(alternatives)


_LLAMA3 = _any_of(_CONTRACTIONS, _WORD, _UP_TO_3_DIGITS, _PUNCTUATION, _LINES, _BLANKS)
_QWEN2 = _any_of(_CONTRACTIONS, _WORD, _DIGIT, _PUNCTUATION, _LINES, _BLANKS)
_QWEN35 = _any_of(
    _CONTRACTIONS,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    _DIGIT,
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    _LINES,
    _BLANKS,
)
_TEKKEN = _any_of(*_CASED, _DIGIT, _PUNCTUATION_SLASH, _LINES, _BLANKS)
_GPT4O = _any_of(*(word + _CONTRACTIONS + "?" for word in _CASED), _UP_TO_3_DIGITS, _PUNCTUATION_SLASH, _LINES, _BLANKS)
_BAILING = _any_of(
    r"'(?i:[sdmt]|ll|ve|re)",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    _DIGIT,
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r"\s*[\r\n]",
    _BLANKS,
)
_SEED_CODER = _any_of(_CONTRACTIONS, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES, _BLANKS)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    _UP_TO_3_DIGITS,
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _any_of(
        _ASCII_PUNCTUATION + r"[A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        _LINES,
        _BLANKS,
    ),
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The first DeepSeek models list the letters that have an upper and a lower case by hand, and leave some scripts out:
# Armenian's and Georgian's small letters, the later additions to Latin, mathematical alphabets.
_DEEPSEEK_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{AB6F}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D8F}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?{_DEEPSEEK_CASED}+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK)

# Falcon's punctuation is every ASCII punctuation sign and Unicode's; runs of it are words. The last cut takes digits in
# threes from the left.
_FALCON_PUNCTUATION = r"[\p{P}$+<=>^~|`]+"

_LLAMA3_PRE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,))
_GPT2_PRE = PreTokenizer(gpt2_words=True)
_DIGITS_GPT2 = PreTokenizer(single_digits=True, gpt2_words=True)
_GPT4O_PRE = PreTokenizer((_GPT4O,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # Files from before the name existed: llama.cpp's guess at that time, kept because nothing better can be known.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "falcon": PreTokenizer((_FALCON_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    # GPT-2's words.
    "gpt-2": _GPT2_PRE,
    "phi-2": _GPT2_PRE,
    "jais": _GPT2_PRE,
    "exaone4": _GPT2_PRE,
    "gigachat": _GPT2_PRE,
    "mpt": PreTokenizer(gpt2_words=True, nfc=True),
    "olmo": PreTokenizer(gpt2_words=True, nfc=True),
    # Digits one by one, then GPT-2's words.
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "command-r": PreTokenizer(single_digits=True, gpt2_words=True, nfc=True),
    # Llama 3 and those that took its words.
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "llama-bpe": _LLAMA3_PRE,
    "falcon3": _LLAMA3_PRE,
    "falcon-h1": _LLAMA3_PRE,
    "pixtral": _LLAMA3_PRE,
    "midm-2.0": _LLAMA3_PRE,
    "lfm2": _LLAMA3_PRE,
    "dbrx": _LLAMA3_WORDS,
    "smaug-bpe": _LLAMA3_WORDS,
    "chatglm-bpe": _LLAMA3_WORDS,
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    # Qwen 2 and 3, and those that took their words but not the normalisation.
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "megrez": PreTokenizer((_QWEN2,)),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "deepseek-r1-qwen": PreTokenizer((_QWEN2,)),
    "hunyuan": PreTokenizer((_QWEN2,)),
    "grok-2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    # Others.
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM, single_digits=True),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER, single_digits=True),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O_PRE,
    "llama4": _GPT4O_PRE,
    "minimax-m2": _GPT4O_PRE,
    "bailingmoe": PreTokenizer((_BAILING,)),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bloom": PreTokenizer((_BLOOM,)),
    "gpt3-finnish": PreTokenizer((_BLOOM,)),
    "poro-chat": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM,), single_digits=True),
}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name; a name octavo does not know is refused, since a guess would degrade the model."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(
            f"GGUF pre-tokenizer {name[:80]!r} is not supported (supported: {known}); "
            "use the model's Hugging Face directory with its tokenizer.json instead"
        ) from None
