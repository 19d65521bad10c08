"""Tells by its fields which kind of request a body is, for routes that take several."""

from __future__ import annotations

from enum import Enum

import msgspec
from msgspec import UNSET, Raw, UnsetType

__all__ = ["Shape", "shape_of"]


class Shape(Enum):
    """The kinds of body, in the order in which TGI tries them."""

    generate = "inputs"
    chat = "messages"
    completion = "prompt"
    other = ""


class _Fields(msgspec.Struct):
    inputs: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(_Fields)


def shape_of(body: bytes) -> Shape:
    """The kind of a body; one that is no JSON object, is nested too deeply, or has none of the fields, is ``other``."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Shape.other
    for shape in (Shape.generate, Shape.chat, Shape.completion):
        if getattr(fields, shape.value) is not UNSET:
            return shape
    return Shape.other
