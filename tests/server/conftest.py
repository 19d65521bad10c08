"""Fixtures of the tests of the server: every test module gets one running server when it asks for it."""

from __future__ import annotations

from tests.server.running import server

__all__ = ["server"]
