"""GGUF vocabularies: equal ids to independent tokenizers, flags and special tokens, hostile metadata refused."""

from __future__ import annotations

import io
import math
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from octavo.errors import ModelError, WeightsError
from octavo.frontend.gguf_vocab import GgufVocabulary, build_gguf_vocabulary
from octavo.frontend.tokenizer import load_tokenizer
from octavo.frontend.tokenizer_pre import PRE_TOKENIZERS, find_pre_tokenizer
from octavo.weights.checkpoint import open_checkpoint
from tests.frontend import reference_bpe
from tests.frontend.corpus import CORPUS, TRAINING_TEXT, random_texts

PREFIX = "tokenizer.ggml."


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(smollm2_path)
    metadata = dict(checkpoint.gguf_metadata or {})
    checkpoint.close()
    return metadata


class Reference:
    """The plain Python tokenizer on the same vocabulary."""

    def __init__(self, metadata: dict[str, Any], pre: str) -> None:
        self.pre = pre
        self.vocab = {token: place for place, token in enumerate(metadata[PREFIX + "tokens"])}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata[PREFIX + "merges"])}

    def encode(self, text: str) -> list[int]:
        whole = PRE_TOKENIZERS[self.pre].ignore_merges
        return list(reference_bpe.encode(text, self.pre, self.vocab, self.ranks, whole))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=sorted(reference_bpe.WORDS))
def both(request: pytest.FixtureRequest, smollm2: dict[str, Any]) -> tuple[GgufVocabulary, Reference]:
    metadata = {**smollm2, PREFIX + "pre": request.param}
    return build_gguf_vocabulary(metadata), Reference(metadata, request.param)


def test_byte_bpe_equals_the_reference_on_the_corpus(both: tuple[GgufVocabulary, Reference]) -> None:
    vocabulary, reference = both
    assert len(CORPUS) >= 200
    for text in CORPUS:
        assert vocabulary.backend.encode(text, add_special_tokens=False).ids == reference.encode(text), text


def test_byte_bpe_equals_the_reference_on_random_text(both: tuple[GgufVocabulary, Reference]) -> None:
    vocabulary, reference = both

    @settings(max_examples=150, deadline=None)
    @given(random_texts())
    def check(text: str) -> None:
        assert vocabulary.backend.encode(text, add_special_tokens=False).ids == reference.encode(text)

    check()


def test_the_default_model_is_read_as_its_file_says(smollm2: dict[str, Any]) -> None:
    vocabulary = build_gguf_vocabulary(smollm2)
    assert vocabulary.size == 49152
    assert (vocabulary.bos_id, vocabulary.pad_id, vocabulary.unk_id) == (1, 2, 0)
    assert vocabulary.eos_ids == (2, 0)  # <|im_end|>, and <|endoftext|> which ends the text of the base model
    assert vocabulary.special_ids == frozenset(range(17))
    assert "<|im_start|>" in vocabulary.chat_templates["default"]
    assert vocabulary.backend.encode("a").ids == vocabulary.backend.encode("a", add_special_tokens=False).ids
    ids = vocabulary.backend.encode("<|im_start|>user\nHi<|im_end|>").ids
    assert ids[0] == 1
    assert ids[-1] == 2


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def train(**options: Any) -> tuple[sentencepiece.SentencePieceProcessor, dict[str, Any]]:
    """A SentencePiece BPE model of the corpus, and the same vocabulary as GGUF metadata."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT * 2),
        model_writer=model,
        model_type="bpe",
        normalization_rule_name="identity",
        minloglevel=2,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        hard_vocab_limit=False,
        character_coverage=0.98,
        **{"vocab_size": 1400, "byte_fallback": True, "remove_extra_whitespaces": False, **options},
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.getvalue())
    metadata = {
        PREFIX + "model": "llama",
        PREFIX + "tokens": [piece.piece for piece in proto.pieces],
        PREFIX + "scores": [piece.score for piece in proto.pieces],
        PREFIX + "token_type": [piece.type for piece in proto.pieces],
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
        PREFIX + "unknown_token_id": 0,
        PREFIX + "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        PREFIX + "remove_extra_whitespaces": proto.normalizer_spec.remove_extra_whitespaces,
    }
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), metadata


SENTENCEPIECE_KINDS: dict[str, dict[str, Any]] = {
    "as Llama 2": {},
    "larger": {"vocab_size": 3000},
    "no dummy prefix": {"add_dummy_prefix": False},
    "no byte tokens": {"byte_fallback": False},
    "extra white space removed": {"remove_extra_whitespaces": True},
    "user-defined pieces": {"add_dummy_prefix": False, "user_defined_symbols": ["the", "<sep>", "ab", "\u2581\u2581"]},
}


@pytest.mark.parametrize("kind", SENTENCEPIECE_KINDS)
def test_sentencepiece_vocabularies_give_the_ids_of_sentencepiece(kind: str) -> None:
    theirs, metadata = train(**SENTENCEPIECE_KINDS[kind])
    ours = build_gguf_vocabulary(metadata).backend
    generator = random.Random(20)
    characters = [character for text in CORPUS for character in text]
    mixed = ["".join(generator.choices(characters, k=generator.randrange(60))) for _ in range(300)]
    few = ["".join(generator.choices("ab the\n", k=generator.randrange(60))) for _ in range(300)]
    for text in [*CORPUS, *mixed, *few]:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_sentencepiece_equals_sentencepiece_on_random_text() -> None:
    theirs, metadata = train()
    ours = build_gguf_vocabulary(metadata).backend

    @settings(max_examples=200, deadline=None)
    @given(random_texts())
    def check(text: str) -> None:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text)

    check()


def test_sentencepiece_adds_a_bos_unless_the_file_says_no() -> None:
    theirs, metadata = train()
    ids = theirs.encode("hello")
    assert build_gguf_vocabulary(metadata).backend.encode("hello").ids == [1, *ids]
    quiet = {**metadata, PREFIX + "add_bos_token": False, PREFIX + "add_eos_token": True}
    assert build_gguf_vocabulary(quiet).backend.encode("hello").ids == [*ids, 2]


# -- pre-tokenizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_character(name: str) -> None:
    characters = reference_bpe.byte_characters()
    cut = PRE_TOKENIZERS[name].build(False)
    for text in CORPUS:
        words = [word for word, _ in cut.pre_tokenize_str(text)]
        assert "".join(words) == "".join(characters[value] for value in text.encode()), text


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        (("gpt-2", "olmo", "mpt", "phi-2"), "It's 1234  ok!\n\n", "It|'s| 1234| | ok|!|\n\n"),
        (("smollm", "starcoder", "refact", "command-r"), "It's 1234  ok!\n\n", "It|'s| |1|2|3|4| | ok|!|\n\n"),
        (
            ("llama3", "llama-bpe", "dbrx", "smaug-bpe", "chatglm-bpe"),
            "IT'S 1234 (ok)!\n x",
            "IT|'S| |123|4| (|ok|)!\n| x",
        ),
        (("qwen2", "deepseek-r1-qwen"), "IT'S 1234 (ok)!\n x", "IT|'S| |1|2|3|4| (|ok|)!\n| x"),
        (("qwen35",), "क्षि 12", "क्षि| |1|2"),
        (("qwen2",), "क्षि", "क|्ष|ि"),
        (("tekken",), "camelCase ABCd 12 a/b\n/x", "camel|Case| ABCd| |1|2| a|/b|\n|/x"),
        (("gpt-4o", "llama4"), "camelCase's DON'T 1234", "camel|Case's| DON'T| |123|4"),
        (("deepseek-llm",), "ab 12，x 中文y\n", "ab| |1|2|，|x| |中文|y|\n"),
        (("deepseek-coder",), "ab 12,x 中文\n", "ab| |1|2|,|x| |中文|\n"),
        (("deepseek-v3",), "ab 1234 中文y_x _z", "ab| |123|4| |中文|y|_x| _|z"),
        (("bloom", "poro-chat"), "Hi, it's 1234.", "Hi|,| it's| 1234|."),
        (("viking",), "Hi 12.", "Hi| |1|2|."),
        (("falcon",), "a+b 12345.", "a|+|b| |123|45|."),
        (("bailingmoe",), "it's\n\nx 12", "it|'s|\n\n|x| |1|2"),
        (("seed-coder",), "x!\ny 12", "x|!|\n|y| |1|2"),
    ],
)
def test_pre_tokenizers_cut_words_as_their_models_do(names: tuple[str, ...], text: str, words: str) -> None:
    characters = reference_bpe.byte_characters()
    expected = ["".join(characters[value] for value in word.encode()) for word in words.split("|")]
    for name in names:
        assert [word for word, _ in find_pre_tokenizer(name).build(False).pre_tokenize_str(text)] == expected, name


def test_models_trained_on_composed_characters_get_them() -> None:
    for name in ("qwen2", "command-r", "olmo"):
        normalizer = find_pre_tokenizer(name).normalizer()
        assert normalizer.normalize_str("e\u0301") == unicodedata.normalize("NFC", "e\u0301")
    assert find_pre_tokenizer("llama-bpe").normalizer() is None


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'new-words' is not supported"):
        build_gguf_vocabulary({**tiny(), PREFIX + "pre": "new-words"})


# -- small vocabularies: flags and special tokens ---------------------------------------------------------------------


def tiny(**changes: Any) -> dict[str, Any]:
    """Every byte, a few merges, a control token and a user-defined one."""
    characters = reference_bpe.byte_characters()
    tokens = [*characters, "he", "ll", "hell", "hello", "<|eos|>", "<think>", "<|bos|>", "\u0120h", "\u0120hello"]
    merges = ["h e", "l l", "he ll", "hell o", "\u0120 h", "\u0120 hello"]
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "merges": merges,
        "token_type": [1] * 260 + [3, 4, 3, 1, 1],
        "eos_token_id": 260,
        "bos_token_id": 262,
    }
    metadata.update(changes)
    return {PREFIX + key: value for key, value in metadata.items() if value is not None}


def encode(metadata: dict[str, Any], text: str) -> list[int]:
    return list(build_gguf_vocabulary(metadata).backend.encode(text).ids)


def test_bos_and_eos_are_added_as_the_flags_say() -> None:
    assert encode(tiny(), "hello") == [259]
    assert encode(tiny(add_bos_token=True), "hello") == [262, 259]
    assert encode(tiny(add_bos_token=True, add_eos_token=True), "hello") == [262, 259, 260]
    assert encode(tiny(pre="llama-bpe"), "hello") == [262, 259]
    assert encode(tiny(pre="llama-bpe", add_bos_token=False), "hello") == [259]


def test_a_prefix_space_is_added_where_bytes_alone_are_cut() -> None:
    assert encode(tiny(add_space_prefix=True), "hello") == [264]
    assert encode(tiny(pre="smollm", add_space_prefix=True), "hello") == [259]


def test_control_and_user_defined_tokens_are_found_in_text() -> None:
    vocabulary = build_gguf_vocabulary(tiny())
    assert vocabulary.backend.encode("he<think>he<|eos|>").ids == [256, 261, 256, 260]
    assert vocabulary.special_ids == frozenset({260, 262})


def test_every_end_the_file_names_is_an_eos() -> None:
    assert build_gguf_vocabulary(tiny(eot_token_id=256, eom_token_id=257)).eos_ids == (260, 256, 257)
    metadata = tiny()
    metadata[PREFIX + "tokens"][262] = "<|im_end|>"
    assert build_gguf_vocabulary(metadata).eos_ids == (260, 262)
    metadata[PREFIX + "tokens"][262] = "<|return|>"
    metadata[PREFIX + "tokens"][258] = "<|end|>"  # ends only a part of an answer where there is a <|return|>
    metadata[PREFIX + "token_type"][258] = 3
    metadata[PREFIX + "merges"] = []
    assert build_gguf_vocabulary(metadata).eos_ids == (260, 262)
    metadata[PREFIX + "token_type"][262] = 1  # ordinary text that only looks like it
    metadata[PREFIX + "bos_token_id"] = 0xFFFFFFFF
    vocabulary = build_gguf_vocabulary(metadata)
    assert vocabulary.eos_ids == (260, 258)
    assert vocabulary.bos_id is None


def test_named_chat_templates_are_read() -> None:
    metadata = tiny()
    metadata["tokenizer.chat_template"] = "A"
    metadata["tokenizer.chat_templates"] = ["tool_use", "rag"]
    metadata["tokenizer.chat_template.tool_use"] = "B"
    assert build_gguf_vocabulary(metadata).chat_templates == {"default": "A", "tool_use": "B"}


def test_empty_tokens_are_kept_apart() -> None:
    metadata = tiny(tokens=[*tiny()[PREFIX + "tokens"], "", ""], token_type=None)
    assert build_gguf_vocabulary(metadata).size == 267


# -- hostile metadata -------------------------------------------------------------------------------------------------


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in tiny().items() if key.removeprefix(PREFIX) not in keys}


TOKENS: list[str] = tiny()[PREFIX + "tokens"]


@pytest.mark.parametrize(
    ("metadata", "error", "says"),
    [
        ({}, ModelError, "tokenizer.ggml.model is missing"),
        (tiny(model="bert"), ModelError, "'bert' is not supported"),
        (tiny(model=7), WeightsError, "tokenizer.ggml.model must be a string, got int"),
        (tiny(pre=["gpt-2"]), WeightsError, "tokenizer.ggml.pre must be a string"),
        (without("tokens"), WeightsError, "empty vocabulary"),
        (tiny(tokens=[]), WeightsError, "empty vocabulary"),
        (tiny(tokens="abc"), WeightsError, "must be an array, got str"),
        (tiny(tokens=[*TOKENS[:-1], 5]), WeightsError, "array of strings, found int"),
        (tiny(tokens=[*TOKENS[:-1], "he"]), WeightsError, "'he' twice, the second time at 264"),
        (tiny(tokens=[*TOKENS[:-1], "x" * 5000]), WeightsError, "string of 5000 characters, the limit is 4096"),
        (tiny(token_type=[1, 1]), WeightsError, "token_type has 2 entries, but the vocabulary has 265"),
        (tiny(token_type=[9] * 265), WeightsError, "token_type has 9"),
        (tiny(token_type=["a"] * 265), WeightsError, "array of integers"),
        (without("merges"), WeightsError, "no merges"),
        (tiny(merges=["he llx"]), WeightsError, "inconsistent"),
        (tiny(merges=["he l"]), WeightsError, "inconsistent"),
        (tiny(merges=["hell"]), WeightsError, r"merges\[0\] is 'hell', not two tokens"),
        (tiny(merges=["hell "]), WeightsError, "not two tokens"),
        (tiny(merges=[""]), WeightsError, "not two tokens"),
        (tiny(eos_token_id=265), WeightsError, "eos_token_id is 265, but the vocabulary has 265 tokens"),
        (tiny(bos_token_id=-5), WeightsError, "bos_token_id is -5"),
        (tiny(bos_token_id="x"), WeightsError, "must be an integer, got str"),
        (tiny(bos_token_id=True), WeightsError, "must be an integer, got bool"),
        (tiny(add_bos_token=1), WeightsError, "add_bos_token must be a boolean, got int"),
        (tiny(add_bos_token=True, bos_token_id=None), WeightsError, "no tokenizer.ggml.bos_token_id"),
        (tiny(add_eos_token=True, eos_token_id=None), WeightsError, "no tokenizer.ggml.eos_token_id"),
        ({**tiny(), "tokenizer.chat_template": 3}, WeightsError, "chat_template must be a string"),
        (tiny(model="llama"), WeightsError, "no scores"),
        (tiny(model="llama", scores=[0.0]), WeightsError, "scores has 1 entries"),
        (tiny(model="llama", scores=[math.nan] * 265), WeightsError, "finite numbers"),
        (tiny(model="llama", scores=[None] * 265), WeightsError, "finite numbers"),
        (tiny(model="llama", scores=[0.0] * 265, precompiled_charsmap=[1]), ModelError, "precompiled_charsmap"),
        (tiny(model="llama", scores=[0.0] * 265, tokens=[*TOKENS[:-1], "<0x00>"]), WeightsError, "1 of the 256 byte"),
    ],
)
def test_damaged_metadata_is_refused_with_what_is_wrong(
    metadata: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        build_gguf_vocabulary(metadata)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.text(max_size=6), st.integers(-2, 7), st.floats(), st.none()), max_size=12),
    st.lists(st.sampled_from([*TOKENS[60:110], "", " ", "<0x41>", "\u2581", "<s>"]), max_size=40),
    st.lists(st.integers(0, 6), min_size=265, max_size=265),
    st.lists(st.floats(-10, 10), min_size=265, max_size=265),
)
_KEYS = [
    *("model", "pre", "tokens", "merges", "token_type", "scores", "add_bos_token", "add_eos_token", "add_space_prefix"),
    *("remove_extra_whitespaces", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"),
]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.sampled_from(["gpt2", "llama"]),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, max_size=4),
    st.text(max_size=12),
)
def test_random_damage_gives_a_tokenizer_or_a_clear_error(model: str, changes: dict[str, Any], text: str) -> None:
    changes.setdefault("model", model)
    changes.setdefault("scores", [0.0] * 265)
    try:
        vocabulary = build_gguf_vocabulary(tiny(**changes))
    except ModelError:
        return
    ids = vocabulary.backend.encode(text).ids
    assert all(0 <= token_id < vocabulary.size for token_id in ids)
    assert isinstance(vocabulary.backend.decode(ids), str)


def test_a_tokenizer_is_loaded_from_a_gguf_file_by_path_or_checkpoint(smollm2_path: Path) -> None:
    by_path = load_tokenizer(smollm2_path)
    checkpoint = open_checkpoint(smollm2_path)
    by_checkpoint = load_tokenizer(checkpoint)
    checkpoint.close()
    text = "Hello, 1234 wörld! <|im_end|>"
    assert by_path.encode(text) == by_checkpoint.encode(text)
    assert by_path.decode(by_path.encode(text), skip_special_tokens=False) == text
