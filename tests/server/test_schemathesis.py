"""Requests made from the server's OpenAPI document, valid and not, are answered as it says, and never with a 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.openapi_cases import SMALL_SERVER, try_cases
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    with RunningServer(**SMALL_SERVER) as running:
        yield running


@pytest.mark.filterwarnings("default")  # schemathesis and hypothesis warn of things of their own
def test_answers_are_those_of_the_document(small_server: RunningServer) -> None:
    tried = try_cases(small_server.url, 200)
    assert tried.faults == {}
    assert tried.cases.total() >= 200
