"""Reading JSON that may be hostile: size bounded, duplicate keys and non-numbers refused, deep nesting an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from octavo.errors import WeightsError

__all__ = ["MAX_JSON_FILE_BYTES", "parse_json_object", "read_json_object"]

MAX_JSON_FILE_BYTES = 32 << 20


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``text``; ``where`` starts the message of the WeightsError raised for anything else."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise WeightsError(f"{where}: the key {key[:120]!r} appears twice")
                seen.add(key)
        return result

    def no_constant(name: str) -> NoReturn:
        raise WeightsError(f"{where}: {name} is not a JSON number")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant)
    except UnicodeDecodeError as error:
        raise WeightsError(f"{where}: is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:  # json's own guard against deep nesting
        raise WeightsError(f"{where}: is nested too deeply") from error
    except ValueError as error:
        raise WeightsError(f"{where}: is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{where}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file ``path``."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_JSON_FILE_BYTES + 1)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_JSON_FILE_BYTES:
        raise WeightsError(f"{path}: is larger than {MAX_JSON_FILE_BYTES} bytes, the limit for a JSON file")
    return parse_json_object(text, str(path))
