"""Who may use the server: API keys from options, the environment and a file that is read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.server.failures import Failure, Kind

if TYPE_CHECKING:
    from octavo.server.options import ServerOptions

__all__ = ["ENVIRONMENT_KEY", "KeyRing"]

_log = logging.getLogger(__name__)

ENVIRONMENT_KEY = "OCTAVO_API_KEY"

_LINE = re.compile(r"(?:([A-Za-z0-9_.-]{1,64}):)?([\x21-\x7e]+)")

# Digest of a key to the name of who holds it. Digests have one length, so comparing them tells nothing of a key.
_Keys = dict[bytes, str]


class KeyRing:
    """The keys that open the server; without any configured, everything is open.

    A key is printable ASCII without spaces, with a name before a colon or without one; it is then called by the
    beginning of its digest. A file that cannot be read any more, or holds a wrong line, leaves the keys as they were.
    """

    def __init__(self, keys: Iterable[str] = (), file: str | None = None) -> None:
        self._given = _parse(keys, "api_key")
        self._file = None if file is None else Path(file)
        self._state: tuple[int, int, int] | None = None
        self._from_file: _Keys = {}
        self.required = bool(self._given) or self._file is not None
        if self._file is not None:
            try:
                self._state, self._from_file = self._read_file(self._file)
            except OSError as error:
                raise ConfigError(f"api_key_file {self._file} cannot be read: {error.strerror}") from error
            if not self._given and not self._from_file:
                raise ConfigError(f"api_key_file {self._file} holds no key: put a KEY or NAME:KEY on each line")

    @classmethod
    def from_options(cls, options: ServerOptions, environment: Mapping[str, str] = os.environ) -> KeyRing:
        """The keys of the options, with the one of the environment variable."""
        extra = environment.get(ENVIRONMENT_KEY)
        return cls([*options.api_key, *([extra] if extra else [])], options.api_key_file)

    def check(self, headers: Mapping[str, str]) -> str | None:
        """The name of the key a request brings, None when none is needed; a Failure when it brings no right one."""
        if not self.required:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Failure(Kind.unauthorized, "An API key is needed, as in `Authorization: Bearer KEY`.", code="no_key")
        name = self.name_of(key.strip())
        if name is None:
            raise Failure(Kind.unauthorized, "The API key is not valid.", code="invalid_api_key")
        return name

    def name_of(self, key: str) -> str | None:
        """The name of a key, None when it is not one of these. Takes the same time whichever key it is."""
        self._reload()
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        found: str | None = None
        for keys in (self._given, self._from_file):
            for known, name in keys.items():
                if hmac.compare_digest(known, digest):
                    found = name
        return found

    def _reload(self) -> None:
        if self._file is None:
            return
        try:
            state = _identity(os.stat(self._file))
            if state != self._state:
                self._state, self._from_file = self._read_file(self._file)
                _log.info("read %d API keys from %s", len(self._from_file), self._file)
        except (OSError, ConfigError) as error:
            if self._state is not None:
                _log.warning("the API keys stay as they were: %s", error)
            self._state = None  # a state no file has: it is tried again, and told once

    @staticmethod
    def _read_file(file: Path) -> tuple[tuple[int, int, int], _Keys]:
        with open(file, encoding="utf-8", errors="replace") as opened:
            state = _identity(os.fstat(opened.fileno()))
            lines = [line.strip() for line in opened]
        return state, _parse((line for line in lines if line and not line.startswith("#")), str(file))


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _parse(lines: Iterable[str], source: str) -> _Keys:
    keys: _Keys = {}
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None or line.endswith(":"):
            # The line itself may be a secret with a slip in it, so it is not shown.
            raise ConfigError(f"{source}: key {number} is not KEY or NAME:KEY in printable ASCII without spaces")
        digest = hashlib.sha256(match.group(2).encode()).digest()
        keys[digest] = match.group(1) or f"key-{digest.hex()[:8]}"
    return keys
