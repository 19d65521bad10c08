"""The text model inside a checkpoint that has parts for images as well; those are left out, and prompts are text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from octavo.models.config import ConfigReader
from octavo.models.graph import Graph

__all__ = ["build_text_part"]

# What a text model's tensors are called inside: by files of old, and by newer ones.
_RENAMES = (
    ("model.", "language_model.model."),
    ("model.", "model.language_model."),
    ("lm_head.", "language_model.lm_head."),
)
_PARTS = ("vision_tower", "vision_model", "multi_modal_projector")
_LEFT_OUT = tuple(f"{place}{part}." for place in ("", "model.") for part in _PARTS)
# What the whole says for its text model too: whatever that says itself, or unless it does.
_DECIDED, _SHARED = ("tie_word_embeddings",), ("dtype", "torch_dtype")


def build_text_part(
    config: ConfigReader, build: Callable[[ConfigReader], Graph], defaults: Mapping[str, Any] | None = None
) -> Graph:
    """The graph `build` makes of `text_config`; `defaults` are for fields that such an object leaves out."""
    given = config.mapping("text_config").values
    shared, decided = (
        {name: config.values[name] for name in names if config.has(name)} for names in (_SHARED, _DECIDED)
    )
    text = ConfigReader({**(defaults or {}), **shared, **given, **decided}, config.family, "text_config.")
    graph = build(text)
    return replace(
        graph,
        architecture=f"{graph.architecture} (text)",
        renames=(*graph.renames, *_RENAMES),
        unused=(*graph.unused, *_LEFT_OUT),
    )
