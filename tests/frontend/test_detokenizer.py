"""Incremental detokenisation: deltas add up to the one-shot text, whole characters only, spaces kept as in context."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError
from octavo.frontend.detokenizer import DecodeStyle, IncrementalDetokenizer, Pieces
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.corpus import CORPUS


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def deltas(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = (), skip: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.finish()]


def make(backend: Backend, special: Sequence[str] = ()) -> Tokenizer:
    return Tokenizer(
        backend,
        bos_id=None,
        eos_ids=(),
        pad_id=None,
        unk_id=None,
        special_ids=frozenset(backend.token_to_id(token) for token in special),
        chat_templates={},
    )


PIECES = [
    "<s>",
    "\u2581",
    "\u2581Hello",
    "\u2581world",
    "!",
    "é",
    "\u2581\u2581a",
    *(f"<0x{code:02X}>" for code in range(256)),
]


def sentencepiece(strip: bool = True) -> Tokenizer:
    """A vocabulary whose decoder is that of SentencePiece tokenizers."""
    backend = Backend(models.BPE({piece: place for place, piece in enumerate(PIECES)}, [], byte_fallback=True))
    backend.add_tokens([AddedToken("<s>", special=True)])
    tail = [decoders.Strip(" ", 1, 0)] if strip else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return make(backend, ["<s>"])


def ids_of(*pieces: str | int) -> list[int]:
    return [PIECES.index(f"<0x{piece:02X}>" if isinstance(piece, int) else piece) for piece in pieces]


# -- byte-level -------------------------------------------------------------------------------------------------------


def test_deltas_of_encoded_texts_are_the_texts(smollm2: Tokenizer) -> None:
    for text in CORPUS:
        ids = smollm2.encode(text)
        whole = smollm2.backend.decode(ids, skip_special_tokens=False)
        assert smollm2.decode(ids, skip_special_tokens=False) == whole
        assert "".join(deltas(smollm2, ids, skip=False)) == whole


def test_a_character_split_over_tokens_comes_whole_with_its_last_byte(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a🎉b")
    assert len(ids) > 3
    parts = deltas(smollm2, ids)
    assert [part for part in parts if part] == ["a", "🎉", "b"]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_of_random_ids_add_up_to_the_one_shot_text(smollm2: Tokenizer, data: st.DataObject, skip: bool) -> None:
    # Small ids are special tokens and single bytes, so characters are often broken.
    ids = data.draw(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 49151)), max_size=40))
    whole = smollm2.backend.decode(ids, skip_special_tokens=skip)
    parts = deltas(smollm2, ids, prompt=[1, 2, 3], skip=skip)
    assert "".join(parts) == whole == smollm2.decode(ids, skip_special_tokens=skip)


def test_every_delta_is_final(smollm2: Tokenizer) -> None:
    generator = random.Random(7)
    for _ in range(100):
        ids = [generator.choice([generator.randrange(300), generator.randrange(49152)]) for _ in range(20)]
        parts = deltas(smollm2, ids)
        shown = ""
        for end, part in enumerate(parts[:-1], 1):
            shown += part
            whole = smollm2.decode(ids[:end])
            assert whole.startswith(shown)
            assert set(whole[len(shown) :]) <= {"\ufffd"}  # at most an unfinished character is missing


def test_special_tokens_are_left_out_or_kept(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert "".join(deltas(smollm2, ids)) == "user\nHi"
    assert "".join(deltas(smollm2, ids, skip=False)) == "<|im_start|>user\nHi<|im_end|>"


def test_ids_outside_the_vocabulary_have_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([49152, 60000, -1]) == ""
    assert smollm2.id_to_token(49152) is None
    assert smollm2.id_to_token(-1) is None


def test_an_unfinished_character_at_the_end_becomes_one_replacement_character(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("é")
    first = [token for token in range(17, 300) if smollm2.pieces(True)[token] == "é".encode()[:1]]
    assert len(ids) == 1
    assert deltas(smollm2, first) == ["", "\ufffd"]


# -- SentencePiece ----------------------------------------------------------------------------------------------------


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start_of_a_text() -> None:
    tokenizer = sentencepiece()
    ids = ids_of("\u2581Hello", "\u2581world")
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "Hello world"
    assert deltas(tokenizer, ids, prompt=ids_of("!")) == [" Hello", " world", ""]
    assert tokenizer.decode(ids, continues=True) == " Hello world"
    assert deltas(tokenizer, ids, prompt=ids_of("<s>")) == ["Hello", " world", ""]
    assert deltas(tokenizer, ids, prompt=ids_of("<s>"), skip=False) == [" Hello", " world", ""]
    assert deltas(sentencepiece(strip=False), ids) == [" Hello", " world", ""]


def test_byte_tokens_make_characters() -> None:
    tokenizer = sentencepiece()
    ids = ids_of("!", 0xF0, 0x9F, 0x8E, 0x89, 0x0A, "é")
    assert deltas(tokenizer, ids) == ["!", "", "", "", "🎉", "\n", "é", ""]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_bytes_that_are_no_character_become_one_replacement_character_each() -> None:
    tokenizer = sentencepiece()
    ids = ids_of("!", 0xF0, 0x9F, "é", 0xFF, 0xC3, 0xA9, 0xE2)
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == "!\ufffd\ufffdé\ufffdé\ufffd"
    broken = ids_of("!", 0xF0, 0x9F, "é")
    assert tokenizer.decode(broken) == tokenizer.backend.decode(broken)


def test_a_left_out_special_token_does_not_break_a_character() -> None:
    tokenizer = sentencepiece()
    ids = ids_of("!", 0xC3, "<s>", 0xA9)
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "!é"
    assert "".join(deltas(tokenizer, ids, skip=False)) == "!\ufffd<s>\ufffd"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(PIECES) - 1), max_size=30), st.booleans(), st.booleans())
def test_sentencepiece_deltas_add_up_to_the_one_shot_text(ids: list[int], skip: bool, prompted: bool) -> None:
    tokenizer = sentencepiece()
    parts = deltas(tokenizer, ids, prompt=ids_of("!") if prompted else (), skip=skip)
    assert "".join(parts) == tokenizer.decode(ids, skip_special_tokens=skip, continues=prompted)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 6), st.sampled_from(ids_of(0x41, 0x20, 0x0A))), max_size=30), st.booleans())
def test_valid_sentencepiece_output_decodes_as_the_library_does(ids: list[int], skip: bool) -> None:
    tokenizer = sentencepiece()
    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=12))
def test_metaspace_output_decodes_as_the_library_does(ids: list[int]) -> None:
    backend = Backend(models.BPE({piece: place for place, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.Metaspace()
    tokenizer = make(backend)
    assert tokenizer.decode(ids) == "".join(deltas(tokenizer, ids)) == backend.decode(ids)


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    with pytest.raises(ModelError, match="missing"):
        DecodeStyle.of(backend)
    backend.decoder = decoders.CTC()
    with pytest.raises(ModelError, match="CTC"):
        DecodeStyle.of(backend)


# -- WordPiece --------------------------------------------------------------------------------------------------------


def test_word_pieces_are_joined_and_words_parted() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "hello": 1, "##s": 2, "world": 3, "##wide": 4}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    pieces = Pieces(backend, DecodeStyle.of(backend), frozenset())
    for ids in ([1, 2, 3, 4], [3], [2, 1], [1, 3, 3, 2]):
        expected = backend.decode(ids)
        assert pieces.text(ids, at_start=True) == (expected if ids[0] != 2 else expected.removeprefix("##"))
