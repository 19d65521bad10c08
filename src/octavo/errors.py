"""The exceptions octavo raises: one family, each message one line that says what is wrong and what to do."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CapacityError",
    "ConfigError",
    "DownloadError",
    "EngineCrashedError",
    "EngineDeadError",
    "GenerationError",
    "ModelError",
    "OctavoError",
    "ParameterError",
    "WeightsError",
]


class OctavoError(Exception):
    """The base of every error octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """A setting of the engine or of a command is wrong or contradicts another."""


class ModelError(OctavoError):
    """A model cannot be read or is of a kind octavo does not support."""


class WeightsError(ModelError):
    """A weight file is damaged, truncated or hostile; names the file, the tensor and the numbers."""


class ParameterError(OctavoError, ValueError):
    """A parameter of a request is outside what is allowed.

    ``field`` is the parameter's name, ``value`` what was given and ``limit`` what would have been accepted
    (it completes "must be ..."); ``message`` replaces the sentence made of the three.
    """

    def __init__(self, field: str, value: Any, limit: str, message: str | None = None) -> None:
        self.field = field
        self.value = value
        self.limit = limit
        if message is None:
            try:
                shown = repr(value)
            except RecursionError:  # what clients send can be nested deeper than Python can say
                shown = "..."
            if len(shown) > 120:
                shown = shown[:117] + "..."
            message = f"{field} must be {limit}, got {shown}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[ParameterError], tuple[str, Any, str, str]]:
        # Exception's own pickling would call __init__ with the message only.
        return (type(self), (self.field, self.value, self.limit, str(self)))


class CapacityError(OctavoError):
    """A request can never fit, however long it waits; carries the numbers that show it.

    ``needed`` is what the request needs, ``available`` what the engine has in all, ``unit`` what both count.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: int | None = None,
        available: int | None = None,
        unit: str = "blocks",
    ) -> None:
        self.needed = needed
        self.available = available
        self.unit = unit
        super().__init__(message)


class DownloadError(OctavoError):
    """A model could not be fetched; the message says from where and how to provide it by hand."""


class EngineDeadError(OctavoError):
    """The engine stopped on an internal error; every request in flight fails with this one, its cause attached."""


class EngineCrashedError(OctavoError):
    """A request ran when the engine crashed, several times over: it may be the cause and is not tried again."""


class GenerationError(OctavoError):
    """One request failed while it was generated (such as non-finite logits); the others are not affected."""
