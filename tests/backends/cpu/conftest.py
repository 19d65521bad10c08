"""Fixtures of the CPU back end's tests."""

from tests.models.tiny import tiny_models

__all__ = ["tiny_models"]
