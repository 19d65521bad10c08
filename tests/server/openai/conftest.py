"""Fixtures of the tests of the OpenAI dialect: a scripted server, and clients of it and of the real one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.server.openai.scripted import scripted_server
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    """A server whose model says what it is told."""
    with scripted_server() as running:
        yield running


@pytest.fixture(scope="module")
def http(scripted: RunningServer) -> Iterator[httpx.Client]:
    """Plain HTTP to the scripted server."""
    with scripted.client() as made:
        yield made


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> Iterator[OpenAI]:
    """OpenAI's own client of the scripted server."""
    with OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def real(server: RunningServer) -> Iterator[httpx.Client]:
    """Plain HTTP to the server with the real model."""
    with server.client() as made:
        yield made


@pytest.fixture(scope="module")
def client_real(server: RunningServer) -> Iterator[OpenAI]:
    """OpenAI's own client of the server with the real model."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
