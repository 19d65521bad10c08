"""Log-probabilities in the shapes of chat, of completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.server.openai.schemas_chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from octavo.server.openai.schemas_completions import CompletionLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo.frontend.outputs import Logprob
    from octavo.frontend.tokenizer import Tokenizer

__all__ = ["LogprobWriter", "prompt_logprobs_json"]

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


class LogprobWriter:
    """Writes the log-probabilities of one request; ``top`` is how many alternatives were asked for (-1: all)."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces(False)
        self._top = top
        self._as_ids = as_ids

    def _text(self, token: int, entry: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self._tokenizer.decode([token], skip_special_tokens=False, continues=True)

    def _bytes(self, token: int) -> list[int]:
        # The token's own bytes, also where they are only part of a character.
        piece = self._pieces[token]
        return list(piece if isinstance(piece, bytes) else piece.encode())

    def chat(self, token_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob]]) -> ChatLogprobs:
        """The shape of chat: one entry a token, with the most probable tokens in order."""
        content = []
        for token, position in zip(token_ids, positions, strict=True):
            chosen = position[token]
            top = self._ranked(position) if self._top else []
            content.append(
                ChatTokenLogprob(
                    self._text(token, chosen),
                    max(chosen.logprob, LEAST),
                    self._bytes(token),
                    [
                        TopLogprob(self._text(other, entry), max(entry.logprob, LEAST), self._bytes(other))
                        for other, entry in top
                    ],
                )
            )
        return ChatLogprobs(content)

    def _ranked(self, position: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
        """The most probable tokens; the chosen one is among them only where it belongs there."""
        ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
        return ranked if self._top == -1 else ranked[: self._top]

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[Mapping[int, Logprob] | None],
        offset: int,
    ) -> tuple[CompletionLogprobs, int]:
        """The shape of completions, and the offset at which the text of the next token begins.

        Each position names the chosen token beside the most probable ones, as OpenAI does; a position without
        log-probabilities (the first of a prompt) has nulls.
        """
        found = CompletionLogprobs([], [], [], [])
        for token, position in zip(token_ids, positions, strict=True):
            entry = None if position is None else position[token]
            text = self._text(token, entry)
            found.text_offset.append(offset)
            found.tokens.append(text)
            offset += len(text)
            if position is None or entry is None:
                found.token_logprobs.append(None)
                found.top_logprobs.append(None)
                continue
            found.token_logprobs.append(max(entry.logprob, LEAST))
            top: dict[str, float] = {}
            for place, (other, alternative) in enumerate(position.items()):
                if place > self._top >= 0:
                    break
                # Several tokens can have one text: the first stays, which is the chosen or the more probable one.
                top.setdefault(self._text(other, alternative), max(alternative.logprob, LEAST))
            found.top_logprobs.append(top)
        return found, offset


def prompt_logprobs_json(
    positions: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each token of the prompt null (the first) or entries by token id."""
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": max(entry.logprob, LEAST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in positions or ()
    ]
