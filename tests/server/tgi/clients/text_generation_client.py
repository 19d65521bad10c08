"""What users of the client `text-generation` do, among it all that its own tests do; run with the server's address.

The client is TGI's own and is used as it is published.
"""

from __future__ import annotations

import sys

from checking import raises, run
from text_generation import AsyncClient, Client
from text_generation.errors import NotFoundError, ValidationError
from text_generation.types import FinishReason, InputToken

PROMPT = "The capital of France is"


def check_one_token(url: str) -> None:
    response = Client(url).generate(PROMPT, max_new_tokens=1, decoder_input_details=True)
    details = response.details
    assert response.generated_text == " Paris"
    assert details.finish_reason == FinishReason.Length
    assert details.generated_tokens == 1
    assert details.seed is None
    assert details.prefill[0] == InputToken(id=504, text="The", logprob=None)
    assert [token.text for token in details.prefill] == ["The", " capital", " of", " France", " is"]
    assert all(token.logprob < 0 for token in details.prefill[1:])
    (token,) = details.tokens
    assert token.text == " Paris"
    assert token.logprob < 0
    assert not token.special
    assert details.best_of_sequences is None
    assert details.top_tokens is None


def check_best_of(url: str) -> None:
    response = Client(url).generate(PROMPT, max_new_tokens=4, best_of=2, do_sample=True, decoder_input_details=True)
    details = response.details
    assert details.seed is not None
    (other,) = details.best_of_sequences
    assert other.seed not in (None, details.seed)

    def mean(tokens: list) -> float:
        return sum(token.logprob for token in tokens) / len(tokens)

    assert mean(details.tokens) >= mean(other.tokens)
    for sequence, text in ((details, response.generated_text), (other, other.generated_text)):
        again = Client(url).generate(PROMPT, max_new_tokens=4, do_sample=True, seed=sequence.seed)
        assert again.generated_text == text


def check_not_found(url: str) -> None:
    raises(NotFoundError, lambda: Client(url + "/fake/model").generate("test"))


def check_validation_error(url: str) -> None:
    message = raises(ValidationError, lambda: Client(url).generate("test", max_new_tokens=10_000))
    assert message.startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be <= ")


def check_stream(url: str) -> None:
    responses = list(Client(url).generate_stream(PROMPT, max_new_tokens=1))
    (response,) = responses
    assert response.generated_text == " Paris"
    assert response.details.finish_reason == FinishReason.Length
    assert response.details.generated_tokens == 1
    assert response.details.seed is None


def check_stream_not_found(url: str) -> None:
    raises(NotFoundError, lambda: list(Client(url + "/fake/model").generate_stream("test")))


def check_stream_validation_error(url: str) -> None:
    raises(ValidationError, lambda: list(Client(url).generate_stream("test", max_new_tokens=10_000)))


async def check_async_one_token(url: str) -> None:
    response = await AsyncClient(url).generate(PROMPT, max_new_tokens=1, decoder_input_details=True)
    assert response.generated_text == " Paris"
    assert response.details.finish_reason == FinishReason.Length
    assert response.details.seed is None
    assert len(response.details.prefill) == 5
    assert len(response.details.tokens) == 1


async def check_async_best_of(url: str) -> None:
    response = await AsyncClient(url).generate(
        PROMPT, max_new_tokens=1, best_of=2, do_sample=True, decoder_input_details=True
    )
    assert response.details.seed is not None
    (other,) = response.details.best_of_sequences
    assert other.seed is not None


async def check_async_not_found(url: str) -> None:
    try:
        await AsyncClient(url + "/fake/model").generate("test")
    except NotFoundError:
        return
    raise AssertionError


async def check_async_validation_error(url: str) -> None:
    try:
        await AsyncClient(url).generate("test", max_new_tokens=10_000)
    except ValidationError:
        return
    raise AssertionError


async def check_async_stream(url: str) -> None:
    responses = [response async for response in AsyncClient(url).generate_stream(PROMPT, max_new_tokens=1)]
    (response,) = responses
    assert response.generated_text == " Paris"
    assert response.details.finish_reason == FinishReason.Length
    assert response.details.generated_tokens == 1
    assert response.details.seed is None


async def check_async_stream_not_found(url: str) -> None:
    try:
        async for _ in AsyncClient(url + "/fake/model").generate_stream("test"):
            raise AssertionError
    except NotFoundError:
        return
    raise AssertionError


async def check_async_stream_validation_error(url: str) -> None:
    try:
        async for _ in AsyncClient(url).generate_stream("test", max_new_tokens=10_000):
            raise AssertionError
    except ValidationError:
        return
    raise AssertionError


def check_every_parameter_at_once(url: str) -> None:
    def ask() -> object:
        return Client(url).generate(
            "Pour déguster un ortolan, il faut tout d'abord",
            max_new_tokens=10,
            repetition_penalty=1.2,
            frequency_penalty=0.1,
            return_full_text=True,
            stop_sequences=["test"],
            temperature=0.5,
            top_p=0.9,
            top_k=10,
            truncate=5,
            typical_p=0.9,
            watermark=True,
            decoder_input_details=True,
            top_n_tokens=3,
            seed=0,
        )

    response = ask()
    assert response.generated_text.startswith("Pour déguster un ortolan, il faut tout d'abord")
    assert response.details.seed == 0
    assert len(response.details.prefill) == 5
    assert len(response.details.tokens) == response.details.generated_tokens <= 10
    assert all(len(top) <= 3 for top in response.details.top_tokens)
    assert ask() == response


def check_a_stream_adds_up_to_the_answer(url: str) -> None:
    whole = Client(url).generate(PROMPT, max_new_tokens=12)
    events = list(Client(url).generate_stream(PROMPT, max_new_tokens=12, top_n_tokens=2))
    text = "".join(event.token.text for event in events if not event.token.special)
    assert text == whole.generated_text == events[-1].generated_text
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert all(event.generated_text is None and event.details is None for event in events[:-1])
    assert all(len(event.top_tokens) == 2 for event in events)
    assert events[-1].details.generated_tokens == 12


def check_a_stop_sequence_is_kept(url: str) -> None:
    response = Client(url).generate(PROMPT, max_new_tokens=20, stop_sequences=["Pari"])
    assert response.generated_text == " Pari"
    assert response.details.finish_reason == FinishReason.StopSequence
    *_, last = Client(url).generate_stream(PROMPT, max_new_tokens=20, stop_sequences=["Pari"])
    assert last.generated_text == " Pari"
    assert last.details.finish_reason == FinishReason.StopSequence


def check_chat(url: str) -> None:
    answer = Client(url).chat(
        [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}],
        max_tokens=8,
        temperature=0.0,
    )
    assert answer.object == "chat.completion"
    assert "Rome" in answer.choices[0].message.content


if __name__ == "__main__":
    run(dict(globals()), sys.argv[1])
