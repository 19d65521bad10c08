"""/v1/embeddings: OpenAI's shapes with its own client, refusals, and what else a server of an encoder answers."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from octavo import Encoder
from tests.models.test_encoders import make_tiny_encoder
from tests.server.running import RunningServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoding(folder: Path) -> Iterator[RunningServer]:
    os.environ.pop("OPENAI_API_KEY", None)
    with RunningServer(
        model=str(folder), served_model_name=("tiny",), max_model_len=None, num_gpu_blocks_override=None
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(encoding: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{encoding.url}/v1", api_key="none")


def post(server: RunningServer, **body: Any) -> tuple[int, dict[str, Any]]:
    with server.client() as http:
        answer = http.post("/v1/embeddings", json=body)
        return answer.status_code, answer.json()


def test_openais_client_gets_the_vectors(client: openai.OpenAI, folder: Path) -> None:
    texts = ["hello world", "a sheet folded three times"]
    answer = client.embeddings.create(model="tiny", input=texts)
    with Encoder(str(folder)) as encoder:
        expected = encoder.embed(texts)
    assert [item.index for item in answer.data] == [0, 1]
    for item, embedding in zip(answer.data, expected, strict=True):
        np.testing.assert_array_equal(np.array(item.embedding, np.float32), embedding.vector)
    tokens = sum(embedding.num_tokens for embedding in expected)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert answer.model == "tiny"


@pytest.mark.parametrize("given", ["one text", [5, 6, 7], ["a", "b"], [[5, 6], [7]]])
def test_all_forms_of_input_are_taken(encoding: RunningServer, given: Any) -> None:
    status, plain = post(encoding, input=given)
    assert status == 200
    status, encoded = post(encoding, input=given, encoding_format="base64", user="me")
    assert status == 200
    assert len(plain["data"]) == (2 if isinstance(given, list) and not isinstance(given[0], int) else 1)
    for one, other in zip(plain["data"], encoded["data"], strict=True):
        raw = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        np.testing.assert_array_equal(np.array(one["embedding"], np.float32), raw)


def test_texts_are_cut_when_asked(encoding: RunningServer) -> None:
    long = [7] * 100
    status, refused = post(encoding, input=long)
    assert (status, refused["error"]["param"]) == (400, "input")
    assert "at most 80" in refused["error"]["message"]
    _, whole = post(encoding, input=long[:80])
    assert post(encoding, input=long, truncate_prompt_tokens=-1)[1]["data"] == whole["data"]
    assert post(encoding, input=long, truncate_prompt_tokens=3)[1]["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "body.input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "body.encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 81}, "truncate_prompt_tokens"),
        ({"input": "a", "speed": 1}, "speed"),
        ({"input": 5}, "body.input"),
    ],
)
def test_what_is_wrong_is_named(encoding: RunningServer, body: dict[str, Any], param: str) -> None:
    status, answer = post(encoding, **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert post(encoding, input="still there")[0] == 200


def test_the_width_of_the_model_may_be_named(encoding: RunningServer) -> None:
    assert post(encoding, input="a", dimensions=64)[0] == 200


def test_an_encoder_refuses_to_generate_and_a_generator_to_encode(
    encoding: RunningServer, server: RunningServer
) -> None:
    with encoding.client() as http:
        for path, body in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/generate", {"inputs": "a"}),
        ):
            answer = http.post(path, json=body)
            assert 400 <= answer.status_code < 500
            assert "is an encoder" in answer.text
        for path in ("/health", "/ready", "/v1/models", "/load", "/metrics", "/openapi.json", "/version"):
            assert http.get(path).status_code == 200, path
        assert http.post("/v1/tokenize", json={"prompt": "hello"}).json()["max_model_len"] == 80
    status, answer = post(server, input="a")
    assert status == 400
    assert "makes no embeddings" in answer["error"]["message"]
