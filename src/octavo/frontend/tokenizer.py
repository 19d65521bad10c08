"""The tokenizer of a model: text to ids and back, special tokens, every EOS id, and the chat template.

Read from a Hugging Face directory (tokenizer.json and the files beside it) or from the metadata of a GGUF file.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, ParameterError, WeightsError
from octavo.frontend.detokenizer import DecodeStyle, Pieces
from octavo.frontend.gguf_vocab import build_gguf_vocabulary, frame_processor
from octavo.weights.built import is_built

if TYPE_CHECKING:
    from octavo.frontend.chat_template import ChatTemplate
    from octavo.weights.checkpoint import Checkpoint

__all__ = ["Tokenizer", "give_back_memory", "load_tokenizer"]

# What is read before it is known to be sane: the largest tokenizer.json in use has about 35 MB.
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 32 << 20
_MAX_TEMPLATE_BYTES = 4 << 20
_MAX_ADDED_TOKENS = 1 << 17
_LONG_TEXT = 4096  # characters
_HUGE_TEXT = 200_000  # characters: an encoding takes hundreds of bytes a token, so these are encoded one at a time

_TOKEN_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def give_back_memory() -> None:
    """Have the C library return free memory to the system; what was freed piece by piece stays with it otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


class Tokenizer:
    """What octavo needs of a tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_id: int | None,
        eos_ids: tuple[int, ...],
        pad_id: int | None,
        unk_id: int | None,
        special_ids: frozenset[int],
        chat_templates: Mapping[str, str],
        special_tokens: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.pad_id = pad_id
        self.unk_id = unk_id
        self.special_ids = special_ids
        self.chat_templates = dict(chat_templates)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_tokens = dict(special_tokens or {})
        style = DecodeStyle.of(backend)
        self._shown = Pieces(backend, style, special_ids)
        self._all = Pieces(backend, style, frozenset())
        self._compiled: dict[str, ChatTemplate] = {}
        self._one_huge_text = threading.Lock()
        self._longest_token: int | None = None  # in characters; 0: unknown

    def least_tokens(self, text: str) -> int:
        """A number of tokens the text has at least, known without encoding it.

        It is 0 for texts that cost little to encode, of which the true number had better be said, and where the
        tokenizer may make a text shorter first.
        """
        if len(text) < _HUGE_TEXT:
            return 0
        if self._longest_token is None:
            self._longest_token = 0
            if self.backend.normalizer is None:
                self._longest_token = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=0)
        return -(-len(text) // self._longest_token) if self._longest_token else 0

    # -- ids and text -------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; with the BOS and EOS the model wants unless ``add_special_tokens`` is false."""
        return list(self._encode(text, add_special_tokens, offsets=False).ids)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> list[tuple[int, int, int]]:
        """The ids of a text, each with the characters of the text it covers (start, stop; both 0 for an added one)."""
        encoding = self._encode(text, add_special_tokens, offsets=True)
        return [(token, *place) for token, place in zip(encoding.ids, encoding.offsets, strict=True)]

    def _encode(self, text: str, add_special_tokens: bool, *, offsets: bool) -> Encoding:
        try:
            if len(text) < _LONG_TEXT:
                return self.backend.encode(text, add_special_tokens=add_special_tokens)
            # Only a batch is encoded without the interpreter's lock: 1.3 s of standstill for 300,000 words otherwise.
            encode = self.backend.encode_batch if offsets else self.backend.encode_batch_fast
            if len(text) < _HUGE_TEXT:
                return encode([text], add_special_tokens=add_special_tokens)[0]
            with self._one_huge_text:
                encoding = encode([text], add_special_tokens=add_special_tokens)[0]
                give_back_memory()
                return encoding
        except (UnicodeEncodeError, TypeError):  # which of the two depends on the version of tokenizers
            limit = "text without lone surrogates" if isinstance(text, str) else "a string"
            raise ParameterError("prompt", text, limit) from None
        except BaseException as error:
            raise _explained(error, "the tokenizer fails on this text; its files are damaged") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, *, continues: bool = False) -> str:
        """The text of ids; ``continues`` when they follow others, so that a leading space is kept."""
        return self.pieces(skip_special_tokens).text(ids, at_start=not continues)

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        """The text or bytes of each token, as the detokeniser adds them up."""
        return self._shown if skip_special_tokens else self._all

    def shows_any(self, ids: Sequence[int], skip_special_tokens: bool) -> bool:
        """Whether any of these ids is visible as text."""
        if not skip_special_tokens:
            return len(ids) > 0
        special = self.special_ids
        return any(token_id not in special for token_id in reversed(ids))

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None when there is no such id."""
        if not 0 <= token_id < 1 << 32:
            return None
        return self.backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, None when there is no such token."""
        return self.backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text by ``skip_special_tokens``."""
        return token_id in self.special_ids

    # -- chat ---------------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """The model's chat template, None when it has none."""
        return self.chat_templates.get("default")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation, as the model's template writes it.

        ``chat_template`` is the name of one of the model's templates or the text of another one. The prompt holds the
        special tokens the template writes, so it is to be encoded with ``add_special_tokens=False``.
        """
        template = self._template(chat_template, tools is not None)
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self._special_tokens, **kwargs},
        )

    def _template(self, wanted: str | None, with_tools: bool) -> ChatTemplate:
        if wanted is None:
            named = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
            source = self.chat_templates.get(named)
            if source is None:
                names = ", ".join(self.chat_templates) or "none"
                raise ModelError(
                    f"the model has no default chat template (it has: {names}); name one with chat_template"
                )
        elif wanted in self.chat_templates:
            source = self.chat_templates[wanted]
        elif "{" in wanted:
            source = wanted
        else:
            names = ", ".join(self.chat_templates) or "none"
            raise ParameterError("chat_template", wanted, f"the text of a template or one of the model's ({names})")
        # Imported here because Jinja takes a while to import, and plain prompts do without it.
        from octavo.frontend.chat_template import ChatTemplate

        template = self._compiled.get(source)
        if template is None:
            if len(self._compiled) >= 16:  # requests can bring their own templates
                self._compiled.clear()
            try:
                template = ChatTemplate(source)
            except ModelError as error:
                if wanted is None or wanted in self.chat_templates:
                    raise
                raise ParameterError("chat_template", wanted, f"a template that compiles ({error})") from error
            self._compiled[source] = template
        return template


def load_tokenizer(source: Checkpoint | str | Path) -> Tokenizer:
    """The tokenizer of an opened checkpoint, of a directory with a tokenizer.json, of a .gguf file or a built model."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if is_built(path) or (path.is_file() and path.name != "tokenizer.json"):
            from octavo.weights.checkpoint import open_checkpoint

            checkpoint = open_checkpoint(path)
            try:
                return load_tokenizer(checkpoint)
            finally:
                checkpoint.close()
        return _from_directory(path.parent if path.is_file() else path, None, None)
    if source.gguf_metadata is not None:
        return _from_gguf(source.gguf_metadata)
    path = Path(source.path)
    return _from_directory(path if path.is_dir() else path.parent, source.config, source.generation_config)


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    vocabulary = build_gguf_vocabulary(metadata)
    roles = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_ids[0] if vocabulary.eos_ids else None,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    return Tokenizer(
        vocabulary.backend,
        bos_id=vocabulary.bos_id,
        eos_ids=vocabulary.eos_ids,
        pad_id=vocabulary.pad_id,
        unk_id=vocabulary.unk_id,
        special_ids=vocabulary.special_ids,
        chat_templates=vocabulary.chat_templates,
        special_tokens={
            role: vocabulary.backend.id_to_token(place) for role, place in roles.items() if place is not None
        },
    )


# -- Hugging Face directories -----------------------------------------------------------------------------------------


def _from_directory(
    directory: Path, config: Mapping[str, Any] | None, generation_config: Mapping[str, Any] | None
) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{directory} has no tokenizer.json; put the model's tokenizer.json there or name another tokenizer"
        )
    _check_size(file, _MAX_TOKENIZER_BYTES)
    try:
        backend = Backend.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None) is not None:
            # A means of training, which would make ids random.
            backend.model.dropout = None
        backend.encode("a")
    except BaseException as error:
        raise _explained(error, f"{file} is not a tokenizer octavo can read") from error
    settings = _read_json(directory / "tokenizer_config.json")
    config = _read_json(directory / "config.json") if config is None else config
    if generation_config is None:
        generation_config = _read_json(directory / "generation_config.json")

    special_ids = _add_tokens(backend, settings, file)
    roles: dict[str, str] = {}
    texts = {**_read_json(directory / "special_tokens_map.json"), **settings}
    for role in _TOKEN_ROLES:
        text = _token_text(texts.get(role), role, file)
        if text is not None:
            roles[role] = text
    more = _token_texts(texts.get("additional_special_tokens"), file)
    ids = {role: backend.token_to_id(text) for role, text in roles.items()}
    special_ids.update(place for place in ids.values() if place is not None)
    special_ids.update(place for place in map(backend.token_to_id, more) if place is not None)

    ends = [*_ids(generation_config.get("eos_token_id"), "generation_config.json")]
    ends += _ids(ids.get("eos_token"), "tokenizer_config.json")
    ends += _ids(config.get("eos_token_id"), "config.json")
    eos_ids = tuple(dict.fromkeys(ends))
    _frame(backend, settings, ids.get("bos_token"), ids.get("eos_token"), file)
    return Tokenizer(
        backend,
        bos_id=ids.get("bos_token"),
        eos_ids=eos_ids,
        pad_id=ids.get("pad_token"),
        unk_id=ids.get("unk_token"),
        special_ids=frozenset(special_ids),
        chat_templates=_directory_templates(directory, settings),
        special_tokens={**roles, **({"additional_special_tokens": more} if more else {})},
    )


def _add_tokens(backend: Backend, settings: Mapping[str, Any], file: Path) -> set[int]:
    """Add the tokens that only tokenizer_config.json names; returns the ids of all tokens marked special."""
    special = {place for place, token in backend.get_added_tokens_decoder().items() if token.special}
    extra = settings.get("added_tokens_decoder") or {}
    if not isinstance(extra, dict) or len(extra) > _MAX_ADDED_TOKENS:
        raise ModelError(f"{file.parent / 'tokenizer_config.json'}: added_tokens_decoder must be an object of tokens")
    wanted: list[tuple[int, str, bool, dict[str, Any]]] = []
    for key, value in extra.items():
        text = _token_text(value, f"added_tokens_decoder[{key}]", file)
        if text is None or not isinstance(value, dict) or not key.isdecimal() or len(key) > 9:
            raise ModelError(f"{file.parent / 'tokenizer_config.json'}: added_tokens_decoder[{key[:40]!r}] is no token")
        wanted.append((int(key), text, bool(value.get("special", False)), value))
    for place, text, is_special, value in sorted(wanted, key=lambda entry: entry[0]):
        known = backend.token_to_id(text)
        if known is None:
            flags = {flag: bool(value.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
            backend.add_tokens([AddedToken(text, special=is_special, **flags)])
            known = backend.token_to_id(text)
        if known != place:
            raise ModelError(
                f"{file.parent / 'tokenizer_config.json'} gives {text[:40]!r} the id {place}, "
                f"tokenizer.json gives {known}"
            )
        if is_special:
            special.add(place)
    return special


def _frame(backend: Backend, settings: Mapping[str, Any], bos_id: int | None, eos_id: int | None, file: Path) -> None:
    """Let explicit add_bos_token and add_eos_token decide what is put around a text; else tokenizer.json does."""
    flags: dict[str, bool] = {}
    for name, place in (("add_bos_token", bos_id), ("add_eos_token", eos_id)):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, bool):
            raise ModelError(
                f"{file.parent / 'tokenizer_config.json'}: {name} must be true or false, got {value!r:.40}"
            )
        if value and place is None:
            raise ModelError(f"{file.parent / 'tokenizer_config.json'}: {name} is true, but the token is not known")
        flags[name] = value
    if not flags:
        return
    begins, ends = _present_frame(backend, bos_id, eos_id)
    begins = flags.get("add_bos_token", begins)
    ends = flags.get("add_eos_token", ends)
    frame = frame_processor(backend, bos_id if begins else None, eos_id if ends else None)
    # ``None`` cannot be assigned to take a processor away; the byte-level one leaves ids alone.
    from tokenizers import processors

    backend.post_processor = frame if frame is not None else processors.ByteLevel(trim_offsets=False)


def _present_frame(backend: Backend, bos_id: int | None, eos_id: int | None) -> tuple[bool, bool]:
    """Whether tokenizer.json itself puts the BOS before and the EOS after a text."""
    ids = backend.encode("", add_special_tokens=True).ids
    return bool(ids) and ids[0] == bos_id, bool(ids) and ids[-1] == eos_id and (len(ids) > 1 or bos_id != eos_id)


def _directory_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    templates: dict[str, str] = {}
    given = settings.get("chat_template")
    where = directory / "tokenizer_config.json"
    if isinstance(given, str):
        templates["default"] = given
    elif isinstance(given, list):
        for entry in given[:64]:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise ModelError(f"{where}: chat_template must be a string or a list of named templates")
            template = entry.get("template")
            if not isinstance(template, str):
                raise ModelError(f"{where}: the chat template {entry['name'][:40]!r} has no text")
            templates[entry["name"]] = template
    elif isinstance(given, dict):
        if not all(isinstance(name, str) and isinstance(template, str) for name, template in given.items()):
            raise ModelError(f"{where}: chat_template must map names to templates")
        templates.update(given)
    elif given is not None:
        raise ModelError(f"{where}: chat_template must be a string, a list or an object, got {type(given).__name__}")
    for file in [directory / "chat_template.jinja", *sorted((directory / "additional_chat_templates").glob("*.jinja"))]:
        if file.is_file():
            _check_size(file, _MAX_TEMPLATE_BYTES)
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelError(f"{file} cannot be read as text: {error}") from error
            templates["default" if file.parent == directory else file.stem] = text
    return templates


def _explained(error: BaseException, message: str) -> BaseException:
    """What to raise for an error of the tokenizer library, whose failed assertions are no ordinary exceptions."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ModelError(f"{message}: {' '.join(str(error).split())[:200]}")
    return error


def _check_size(file: Path, limit: int) -> None:
    size = file.stat().st_size
    if size > limit:
        raise ModelError(f"{file} has {size} bytes, the limit is {limit}")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    _check_size(file, _MAX_CONFIG_BYTES)
    try:
        value = json.loads(file.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # JSON can spell lone surrogates, which are not text
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not valid JSON: {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: Any, role: str, file: Path) -> str | None:
    """A special token is written as its text or as an object with its text."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and (not isinstance(value, str) or len(value) > 4096):
        raise ModelError(f"{file.parent / 'tokenizer_config.json'}: {role[:60]} must be a token")
    return value or None


def _token_texts(value: Any, file: Path) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_ADDED_TOKENS:
        raise ModelError(f"{file.parent / 'tokenizer_config.json'}: additional_special_tokens must be a list of tokens")
    texts = [_token_text(entry, "additional_special_tokens", file) for entry in value]
    return [text for text in texts if text is not None]


def _ids(value: Any, where: str) -> Iterable[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for entry in values:
        if isinstance(entry, bool) or not isinstance(entry, int) or not -1 <= entry < 1 << 31 or len(values) > 1024:
            raise WeightsError(f"{where}: eos_token_id must be a token id or a list of them, got {str(value)[:60]}")
    return [entry for entry in values if entry >= 0]
