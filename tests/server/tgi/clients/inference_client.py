"""What users of huggingface_hub's InferenceClient do with a TGI server; run with the server's address."""

from __future__ import annotations

import sys

from checking import raises, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import OverloadedError, ValidationError

PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]


def check_text(url: str) -> None:
    client = InferenceClient(url)
    # TGI puts the prompt before the text on POST / unless it is told not to.
    assert client.text_generation(PROMPT, max_new_tokens=1) == PROMPT + " Paris"
    assert client.text_generation(PROMPT, max_new_tokens=1, return_full_text=False) == " Paris"


def check_generate_route(url: str) -> None:
    assert InferenceClient(url + "/generate").text_generation(PROMPT, max_new_tokens=1) == " Paris"


def check_details(url: str) -> None:
    output = InferenceClient(url).text_generation(
        PROMPT, max_new_tokens=5, details=True, decoder_input_details=True, top_n_tokens=2, return_full_text=False
    )
    assert output.details.finish_reason == "length"
    assert output.details.generated_tokens == 5
    assert output.details.seed is None
    assert "".join(token.text for token in output.details.tokens) == output.generated_text
    assert [token.text for token in output.details.prefill][-1] == " is"
    assert [len(top) for top in output.details.top_tokens] == [2] * 5


def check_best_of(url: str) -> None:
    output = InferenceClient(url).text_generation(PROMPT, max_new_tokens=5, details=True, best_of=2, do_sample=True)
    assert len(output.details.best_of_sequences) == 1


def check_stream(url: str) -> None:
    client = InferenceClient(url)
    whole = client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True))
    assert len(pieces) == 8
    assert "".join(pieces) == whole


def check_stream_details(url: str) -> None:
    client = InferenceClient(url)  # closes its streams when it is collected
    outputs = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True, seed=1, top_k=5))
    assert [output.index for output in outputs] == list(range(1, len(outputs) + 1))
    assert [output.details for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    details = outputs[-1].details
    assert details.seed == 1
    assert details.input_length == 5
    assert details.generated_tokens == len(outputs)
    assert outputs[-1].generated_text is not None


def check_stop(url: str) -> None:
    output = InferenceClient(url).text_generation(
        PROMPT, max_new_tokens=20, stop=["Pari"], details=True, return_full_text=False
    )
    assert output.generated_text == " Pari"
    assert output.details.finish_reason == "stop_sequence"


def check_validation_error(url: str) -> None:
    client = InferenceClient(url)
    message = raises(ValidationError, lambda: client.text_generation(PROMPT, top_p=1.0))
    assert message == "Input validation error: `top_p` must be > 0.0 and < 1.0"
    raises(ValidationError, lambda: list(client.text_generation(PROMPT, max_new_tokens=100_000, stream=True)))
    raises(ValidationError, lambda: client.text_generation(PROMPT, grammar={"type": "regex", "value": "a"}))
    assert not issubclass(OverloadedError, ValidationError)


def check_chat(url: str) -> None:
    answer = InferenceClient(url).chat_completion(QUESTION, max_tokens=8, temperature=0.0)
    assert "Rome" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def check_chat_stream(url: str) -> None:
    client = InferenceClient(url)
    chunks = client.chat_completion(QUESTION, max_tokens=8, temperature=0.0, stream=True)
    assert "Rome" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def check_endpoint(url: str) -> None:
    client = InferenceClient(url, provider="hf-inference")
    assert client.health_check()
    assert client.get_endpoint_info()["max_best_of"] == 2


async def check_async(url: str) -> None:
    client = AsyncInferenceClient(url)
    assert await client.text_generation(PROMPT, max_new_tokens=1, return_full_text=False) == " Paris"
    pieces = [piece async for piece in await client.text_generation(PROMPT, max_new_tokens=3, stream=True)]
    assert len(pieces) == 3


if __name__ == "__main__":
    run(dict(globals()), sys.argv[1])
