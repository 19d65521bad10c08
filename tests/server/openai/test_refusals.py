"""Fields that are not built: refused by name, but not where their value changes nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.errors import ParameterError
from octavo.server.openai.schemas import refuse_not_built
from octavo.server.openai.schemas_chat import ChatRequest
from octavo.server.openai.schemas_completions import CompletionRequest

BOTH: dict[str, tuple[list[Any], list[Any]]] = {  # field: neutral values, refused ones
    "response_format": ([{"type": "text"}], [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "x"]),
    "structured_outputs": ([{}], [{"regex": "a"}, {"json": {}}]),
    "use_beam_search": ([False], [True, 1]),
    "length_penalty": ([1.0, 1], [0.9, True, "1"]),
    "early_stopping": ([False], [True, "never"]),
    "logprob_token_ids": ([[]], [[1]]),
    "repetition_detection": ([], [{"max_pattern_size": 3}]),
    "thinking_token_budget": ([-1], [0, 100]),
    "kv_transfer_params": ([{}], [{"do_remote_decode": True}]),
    "ec_transfer_params": ([{}], [{"a": 1}]),
    "vllm_xargs": ([{}], [{"a": 1}]),
    "routed_experts_prompt_start": ([0], [1]),
    "return_token_offsets": ([False], [True]),
    "service_tier": (["auto", "default"], ["flex", "priority"]),
    "store": ([False], [True]),
    "prompt_cache_retention": (["in_memory"], ["24h"]),
    "prompt_cache_options": ([{}], [{"mode": "explicit"}]),
}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    "tools": ([[]], [[{"type": "function", "function": {"name": "f"}}]]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none"], ["auto", {"name": "f"}]),
    "audio": ([{}], [{"voice": "alloy", "format": "wav"}]),
    "modalities": ([["text"]], [["text", "audio"], []]),
    "moderation": ([], [{"model": "x"}]),
    "prediction": ([], [{"type": "content", "content": "a"}]),
    "verbosity": (["medium"], ["low", "high"]),
    "web_search_options": ([], [{}]),
    "include_reasoning": ([True], [False]),
    "media_io_kwargs": ([{}], [{"image": {}}]),
    "mm_processor_kwargs": ([{}], [{"a": 1}]),
    "return_assistant_tokens_mask": ([False], [True]),
}
COMPLETIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "suffix": ([""], ["the end"]),
    "prompt_embeds": ([[]], ["AAAA"]),
}


def parse(kind: str, **fields: Any) -> ChatRequest | CompletionRequest:
    if kind == "chat":
        return msgspec.convert({"messages": [{"role": "user", "content": "a"}], **fields}, ChatRequest)
    return msgspec.convert({"prompt": "a", **fields}, CompletionRequest)


CASES = [
    (kind, field, *values)
    for kind, table in (("chat", {**BOTH, **CHAT}), ("completions", {**BOTH, **COMPLETIONS}))
    for field, values in table.items()
]


@pytest.mark.parametrize(("kind", "field", "neutral", "refused"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_a_field_that_is_not_built_takes_only_what_changes_nothing(
    kind: str, field: str, neutral: list[Any], refused: list[Any]
) -> None:
    for value in (None, *neutral):
        refuse_not_built(parse(kind, **{field: value}))
    for value in refused:
        with pytest.raises(ParameterError) as caught:
            refuse_not_built(parse(kind, **{field: value}))
        assert caught.value.field == field
        assert str(caught.value).startswith(f"{field} must be ")


def test_padding_of_events_is_refused() -> None:
    refuse_not_built(parse("chat", stream=True, stream_options={"include_obfuscation": False}))
    with pytest.raises(ParameterError, match="include_obfuscation"):
        refuse_not_built(parse("chat", stream=True, stream_options={"include_obfuscation": True}))


def test_labels_of_the_client_are_accepted() -> None:
    labels: dict[str, Any] = {
        "user": "somebody",
        "session_id": "s1",
        "metadata": {"run": "7"},
        "safety_identifier": "x",
        "prompt_cache_key": "k",
    }
    refuse_not_built(parse("chat", parallel_tool_calls=False, **labels))
    refuse_not_built(parse("completions", **labels))
