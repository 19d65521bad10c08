"""Fixtures of the model tests."""

from tests.models.tiny import tiny_models

__all__ = ["tiny_models"]
