"""From token ids to text as they are generated, and the search for stop strings in that text."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenizers import Tokenizer as Backend

    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["DecodeStyle", "IncrementalDetokenizer", "Pieces", "StopStringScanner", "byte_level_alphabet"]

_BYTEWISE = "octavo.bytewise"
_HEX = frozenset("0123456789abcdefABCDEF")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Every byte that is not part of a character becomes one U+FFFD, which is SentencePiece's rule."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_BYTEWISE, _replace_each_byte)


def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, a convention set by GPT-2.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are the characters from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(code): code for code in printable}
    rest = [code for code in range(256) if chr(code) not in alphabet]
    alphabet.update({chr(256 + place): code for place, code in enumerate(rest)})
    return alphabet


_ALPHABET = byte_level_alphabet()


@dataclass(frozen=True, slots=True)
class DecodeStyle:
    """How the tokens of a vocabulary become text.

    ``byte_level``: tokens are written in the byte alphabet. Otherwise they are text in which ``mark`` is a space, and
    with ``byte_fallback`` tokens like <0x0A> are bytes. ``strip`` says what is taken from the start of a text: nothing,
    "space" one leading space, "piece" every leading space of the first token. With ``continues`` (WordPiece) a token
    that begins with it joins the one before, and any other begins a word; the spaces such vocabularies lose before
    punctuation are not taken out again.
    """

    byte_level: bool
    mark: str = "\u2581"
    byte_fallback: bool = False
    strip: str = ""
    continues: str = ""

    @classmethod
    def of(cls, backend: Backend) -> DecodeStyle:
        """Read from the decoder of a ``tokenizers`` object; ModelError when it is one octavo cannot stream."""
        state: Any = {"type": "missing"} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        steps = state.get("decoders", []) if state.get("type") == "Sequence" else [state]
        kinds = tuple(step.get("type") for step in steps)
        if kinds == ("ByteLevel",):
            return cls(True)
        if kinds == ("Metaspace",):
            strips = steps[0].get("prepend_scheme", "always") != "never"
            return cls(False, mark=steps[0].get("replacement", "\u2581"), strip="piece" if strips else "")
        if kinds == ("WordPiece",):
            return cls(False, strip="space", continues=steps[0].get("prefix") or "##")
        if kinds[:1] == ("Replace",) and steps[0].get("content") == " ":
            mark = (steps[0].get("pattern") or {}).get("String")
            rest = tuple(kind for kind in kinds[1:] if kind != "Fuse")
            strip = steps[-1] if rest[-1:] == ("Strip",) else None
            if strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0):
                rest = rest[:-1] if strip is not None else rest
                if mark and rest in ((), ("ByteFallback",)):
                    return cls(False, mark=mark, byte_fallback=bool(rest), strip="" if strip is None else "space")
        raise ModelError(
            f"the tokenizer's decoder ({', '.join(map(str, kinds))[:200]}) is not supported: octavo reads byte-level, "
            "SentencePiece and WordPiece decoders"
        )


class Pieces(dict[int, "str | bytes"]):
    """What each token adds to the text: characters, or bytes that make characters together with their neighbours.

    Filled as tokens are met, so opening a vocabulary costs nothing.
    """

    def __init__(self, backend: Backend, style: DecodeStyle, hidden: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._byte_level = style.byte_level
        self._byte_fallback = style.byte_fallback
        self._mark = style.mark
        self._continues = style.continues
        self._hidden = hidden
        self.strip = style.strip
        self.errors = "replace" if style.byte_level else _BYTEWISE

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> str | bytes:
        nothing: str | bytes = b"" if self._byte_level else ""
        if token_id in self._hidden or token_id < 0:
            return nothing
        token = self._backend.id_to_token(token_id)
        if token is None:
            # Models often have more rows in the embedding than the vocabulary has tokens.
            return nothing
        if self._byte_level:
            try:
                return bytes([_ALPHABET[character] for character in token])
            except KeyError:
                # Added tokens are written as they are, not in the byte alphabet.
                return token.encode("utf-8", "replace")
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            digits = token[3:5]
            if _HEX.issuperset(digits):
                return bytes([int(digits, 16)])
        if self._continues:
            joined = token.startswith(self._continues)
            return token.removeprefix(self._continues) if joined else f" {token}"
        return token.replace(self._mark, " ")

    def text(self, token_ids: Iterable[int], *, at_start: bool) -> str:
        """The text of these ids in one go; ``at_start`` when nothing visible comes before them."""
        if self._byte_level:
            return b"".join([self[token_id] for token_id in token_ids]).decode("utf-8", "replace")  # type: ignore[misc]
        stream = PieceStream(self, at_start=at_start)
        deltas = [stream.push(token_id) for token_id in token_ids]
        deltas.append(stream.finish())
        return "".join(deltas)


class PieceStream:
    """Adds up pieces to text, one token at a time, keeping back the bytes of an unfinished character."""

    __slots__ = ("_decoder", "_pending", "_pieces", "_start")

    def __init__(self, pieces: Pieces, *, at_start: bool) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._pending = False
        self._start = at_start and pieces.strip != ""

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            if not self._pending and piece.isascii():
                text = piece.decode("ascii")  # most are, and the incremental decoder takes five times as long
            else:
                text = self._decoder.decode(piece)
                self._pending = self._decoder.getstate()[0] != b""
        elif self._pending and piece:
            text = self._flush() + piece
        else:
            text = piece
        return self._first(text) if self._start and text else text

    def _first(self, text: str) -> str:
        self._start = False
        return text.lstrip(" ") if self._pieces.strip == "piece" else text.removeprefix(" ")

    def _flush(self) -> str:
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        self._pending = False
        return text

    def finish(self) -> str:
        """What is left of an unfinished character, as U+FFFD."""
        return self._flush() if self._pending else ""


class IncrementalDetokenizer:
    """The text of a growing output: ``push`` each token, then ``finish``; never half a character.

    The deltas add up to ``tokenizer.decode(output_ids, skip_special_tokens, continues=...)``: the text is that of the
    output read after the prompt, so a space with which the output begins is kept where the prompt shows any token.
    Each token costs the same however long the output is.
    """

    __slots__ = ("_finish", "push")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        pieces = tokenizer.pieces(skip_special_tokens)
        at_start = pieces.strip != "" and not tokenizer.shows_any(prompt_ids, skip_special_tokens)
        stream = PieceStream(pieces, at_start=at_start)
        self.push = stream.push
        self._finish = stream.finish

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._finish()


class StopStringScanner:
    """Finds stop strings in text that arrives in pieces of any size.

    The text is read character by character, so what is found does not depend on how it was cut: the stop string that is
    complete first wins, and of those complete at the same character, the longest. Text that may turn out to begin a
    stop string is held back. While ``may_stop`` is false (the first ``min_tokens`` tokens), no stop string can be
    completed, but one may begin there and be completed later, which is vLLM's meaning.
    """

    __slots__ = ("_firsts", "_held", "_include", "_states", "_stops", "_tables")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted({stop for stop in stops if stop}, key=len, reverse=True)
        self._include = include
        self._tables = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""

    def feed(self, delta: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; returns the text that is safe to show now, and the stop string that ends the output, if any.

        The text after a stop string is dropped; the stop string itself is part of the safe text only with ``include``.
        """
        if not self._held and self._firsts.isdisjoint(delta):
            return delta, None
        text = self._held + delta
        stops, tables, states = self._stops, self._tables, self._states
        for place in range(len(self._held), len(text)):
            character = text[place]
            found = None
            for which, stop in enumerate(stops):
                state = states[which]
                table = tables[which]
                while state and stop[state] != character:
                    state = table[state]
                if stop[state] == character:
                    state += 1
                    if state == len(stop):
                        if may_stop and found is None:
                            found = stop
                        state = table[state]
                states[which] = state
            if found is not None:
                self._held = ""
                self._states = [0] * len(stops)
                end = place + 1
                return text[: end if self._include else end - len(found)], found
        keep = len(text) - max(states)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """The text held back, when no more comes and no stop string was completed."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _fallbacks(stop: str) -> list[int]:
    """For each matched length, the next shorter match that is still possible (the table of Knuth, Morris and Pratt)."""
    table = [0] * (len(stop) + 1)
    state = 0
    for length in range(1, len(stop)):
        while state and stop[length] != stop[state]:
            state = table[state]
        if stop[length] == stop[state]:
            state += 1
        table[length + 1] = state
    return table
