"""Tokenizers of Hugging Face directories: special tokens, flags, every EOS id, templates, damaged files refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, ParameterError
from octavo.frontend.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.corpus import CORPUS
from tests.frontend.reference_bpe import byte_characters

BOS, EOS, EXTRA = 256, 257, 258


def backend(frame: bool = True) -> Backend:
    """Each byte is a token; <bos> and <eos> are special, <tool> is not."""
    tokenizer = Backend(models.BPE({character: value for value, character in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    return tokenizer


def directory(path: Path, files: dict[str, Any] | None = None, *, frame: bool = True) -> Path:
    backend(frame).save(str(path / "tokenizer.json"))
    for name, content in (files or {}).items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def load(path: Path, settings: dict[str, Any] | None = None, frame: bool = True, **files: Any) -> Tokenizer:
    named = {f"{name}.json": content for name, content in files.items()}
    if settings is not None:
        named["tokenizer_config.json"] = settings
    return load_tokenizer(directory(path, named, frame=frame))


NAMES = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}


def test_texts_survive_encoding_and_decoding(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, NAMES)
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())


def test_each_token_can_be_found_in_the_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory(tmp_path))
    text = "aé<tool>b"
    found = tokenizer.encode_with_offsets(text)
    assert [token for token, _, _ in found] == tokenizer.encode(text)
    assert [text[start:stop] for _, start, stop in found] == ["", "a", "é", "é", "<tool>", "b"]
    assert len(tokenizer.encode_with_offsets(text, add_special_tokens=False)) == len(found) - 1
    with pytest.raises(ParameterError, match="surrogates"):
        tokenizer.encode_with_offsets("\ud800")


def test_special_tokens_and_sizes_are_known(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {**NAMES, "pad_token": None})
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.vocab_size) == (BOS, (EOS,), None, 259)
    assert tokenizer.special_ids == frozenset({BOS, EOS})
    assert tokenizer.id_to_token(EOS) == "<eos>"
    assert tokenizer.token_to_id("<eos>") == EOS
    assert tokenizer.is_special(EOS)
    assert not tokenizer.is_special(EXTRA)
    assert tokenizer.token_to_id("no such") is None
    assert tokenizer.decode([104, EXTRA, EOS]) == "h<tool>"


def test_tokenizer_json_decides_the_bos_unless_the_configuration_says(tmp_path: Path) -> None:
    assert load(tmp_path, NAMES).encode("a") == [BOS, 97]
    assert load(tmp_path, {**NAMES, "add_bos_token": False}).encode("a") == [97]
    assert load(tmp_path, {**NAMES, "add_eos_token": True}).encode("a") == [BOS, 97, EOS]
    assert load(tmp_path, {**NAMES, "add_bos_token": False, "add_eos_token": True}).encode("a") == [97, EOS]
    assert load(tmp_path, NAMES, frame=False).encode("a") == [97]
    assert load(tmp_path, {**NAMES, "add_bos_token": True}, frame=False).encode("a") == [BOS, 97]
    assert load(tmp_path, {**NAMES, "add_bos_token": True}).encode("a", add_special_tokens=False) == [97]


def test_every_eos_id_is_merged_in_order(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, NAMES, generation_config={"eos_token_id": [10, EOS]}, config={"eos_token_id": 11})
    assert tokenizer.eos_ids == (10, EOS, 11)
    assert load(tmp_path, {}, generation_config={"eos_token_id": 3}, config={}).eos_ids == (3,)


def test_a_checkpoint_gives_its_configurations(tmp_path: Path) -> None:
    class Opened:
        gguf_metadata = None
        path = directory(tmp_path, {"tokenizer_config.json": NAMES})
        config = {"eos_token_id": 5}  # noqa: RUF012
        generation_config = {"eos_token_id": 6}  # noqa: RUF012

    assert load_tokenizer(Opened()).eos_ids == (6, EOS, 5)  # type: ignore[arg-type]


def test_special_tokens_map_is_read_and_the_configuration_wins(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {"eos_token": "<eos>"}, special_tokens_map={"bos_token": "<bos>", "eos_token": "<bos>"})
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, (EOS,))


def test_tokens_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    added = {
        "259": {"content": "<|end|>", "special": True},
        "260": {"content": "<think>", "special": False},
        "258": {"content": "<tool>", "special": True},
    }
    tokenizer = load(tmp_path, {**NAMES, "added_tokens_decoder": added})
    assert tokenizer.encode("<|end|><think>x", add_special_tokens=False) == [259, 260, 120]
    assert tokenizer.special_ids == frozenset({BOS, EOS, EXTRA, 259})
    with pytest.raises(ModelError, match=r"'<gap>' the id 300, tokenizer\.json gives 259"):
        load(tmp_path, {"added_tokens_decoder": {"300": {"content": "<gap>"}}})


def test_additional_special_tokens_are_left_out_of_text(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {**NAMES, "additional_special_tokens": ["<tool>", {"content": "<eos>"}]})
    assert tokenizer.decode([104, EXTRA, 105]) == "hi"


def test_truncation_and_padding_of_the_file_are_not_kept(tmp_path: Path) -> None:
    limited = backend()
    limited.enable_truncation(4)
    limited.enable_padding(length=8)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("a long text")) == 12


def test_a_tokenizer_is_found_by_its_file_too(tmp_path: Path) -> None:
    directory(tmp_path)
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a") == load_tokenizer(str(tmp_path)).encode("a")


def test_a_tokenizer_serves_several_threads(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {**NAMES, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(50):
            text = name * 20
            if tokenizer.decode(tokenizer.encode(text)) != text:
                wrong.append(name)
            if tokenizer.apply_chat_template([{"role": "user", "content": text}]) != text:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("é", "b", "中", "🎉")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("\ud800", "text without lone surrogates"),
        ("a\udfffb", "text without lone surrogates"),
        (5, "a string"),
        (None, "a string"),
        (["a"], "a string"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path: Path, text: Any, limit: str) -> None:
    with pytest.raises(ParameterError) as caught:
        load(tmp_path).encode(text)
    assert (caught.value.field, caught.value.limit) == ("prompt", limit)


# -- chat templates of directories ------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "hi"}]


def test_chat_templates_come_as_text_list_object_or_file(tmp_path: Path) -> None:
    assert load(tmp_path, {"chat_template": "T{{ messages|length }}"}).apply_chat_template(CHAT) == "T1"
    listed = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    tokenizer = load(tmp_path, {"chat_template": listed})
    assert tokenizer.apply_chat_template(CHAT) == "D"
    assert tokenizer.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "U"
    assert tokenizer.apply_chat_template(CHAT, chat_template="tool_use") == "U"
    assert tokenizer.apply_chat_template(CHAT, chat_template="X{{ messages[0].role }}") == "Xuser"
    assert load(tmp_path, {"chat_template": {"default": "O"}}).chat_template == "O"
    (tmp_path / "chat_template.jinja").write_text("F\u00e9", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R", encoding="utf-8")
    tokenizer = load(tmp_path, {"chat_template": "T"})
    assert tokenizer.chat_template == "F\u00e9"
    assert tokenizer.apply_chat_template(CHAT, chat_template="rag") == "R"


def test_templates_see_special_tokens_and_extra_arguments(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ mood }}{{ pad_token }}"
    tokenizer = load(tmp_path, {**NAMES, "chat_template": template})
    assert tokenizer.apply_chat_template(CHAT, mood="!") == "<bos><eos>!"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, NAMES)
    assert tokenizer.chat_template is None
    with pytest.raises(ModelError, match="no default chat template"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ParameterError, match="chat_template must be"):
        tokenizer.apply_chat_template(CHAT, chat_template="no such name")


def test_a_callers_broken_template_is_the_callers_error(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, {**NAMES, "chat_template": "{% if %}"})
    with pytest.raises(ModelError, match="line 1"):
        tokenizer.apply_chat_template(CHAT)
    with pytest.raises(ParameterError, match="chat_template"):
        tokenizer.apply_chat_template(CHAT, chat_template="{{ x")


# -- damaged and hostile directories ----------------------------------------------------------------------------------


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"model": 1}',
        "\x00" * 100,
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        '{"version": "1.0", "model": {"type": "Unknown"}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_json_on_which_the_library_panics_is_refused(tmp_path: Path) -> None:
    state = json.loads(backend().to_str())
    state["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer octavo can read"):
        load_tokenizer(tmp_path)


def test_dropout_is_turned_off(tmp_path: Path) -> None:
    state = json.loads(backend().to_str())
    state["model"]["vocab"]["aa"] = 259
    state["model"]["merges"] = [["a", "a"]]
    state["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path)
    assert {tuple(tokenizer.encode("aa")) for _ in range(20)} == {(BOS, 259)}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", {"bos_token": 5}),
        ("tokenizer_config.json", {"bos_token": {"content": ["a"]}}),
        ("tokenizer_config.json", {"bos_token": "x" * 5000}),
        ("tokenizer_config.json", {"bos_token": "\ud800"}),
        ("tokenizer_config.json", {"additional_special_tokens": ["a\udfff"]}),
        ("tokenizer_config.json", {"add_bos_token": "yes", "bos_token": "<bos>"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"additional_special_tokens": "<tool>"}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"259": "a"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"99999999999": {"content": "a"}}}),
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", {"chat_template": ["x"]}),
        ("tokenizer_config.json", {"chat_template": {"default": 1}}),
        ("generation_config.json", {"eos_token_id": "2"}),
        ("generation_config.json", {"eos_token_id": [2, None]}),
        ("generation_config.json", {"eos_token_id": -7}),
        ("generation_config.json", {"eos_token_id": True}),
        ("generation_config.json", {"eos_token_id": list(range(5000))}),
        ("special_tokens_map.json", "nonsense"),
    ],
)
def test_damaged_files_beside_it_are_refused(tmp_path: Path, file: str, content: Any) -> None:
    with pytest.raises(ModelError, match=file) as caught:
        load_tokenizer(directory(tmp_path, {file: content}))
    assert len(str(caught.value).splitlines()) == 1


def test_a_template_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (directory(tmp_path) / "chat_template.jinja").write_bytes(b"\xff\xfe{{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_tokenizer(tmp_path)


def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    directory(tmp_path)
    with (tmp_path / "tokenizer_config.json").open("wb") as file:
        file.truncate(1 << 30)  # a hole: takes no space
    with pytest.raises(ModelError, match="1073741824 bytes, the limit is"):
        load_tokenizer(tmp_path)
