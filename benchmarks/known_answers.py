"""Questions whose answers an undisturbed engine gave beforehand, and how to ask a server the same in each dialect."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from http_client import Address, Connection, ProtocolError, events
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.outputs import CompletionOutput
from octavo.sampling.params import SamplingParams

__all__ = [
    "Asked",
    "Behaviour",
    "Expected",
    "Question",
    "ask",
    "expected_answers",
    "heavy_questions",
    "questions",
    "wrong",
]

Form = Literal["completion", "chat", "tgi", "websocket"]
_FORMS: tuple[Form, ...] = ("completion", "completion", "chat", "chat", "tgi", "tgi", "websocket")

_SUBJECTS = (
    "the sea", "a lighthouse", "old maps", "bread", "the moon", "a slow train", "bees", "rivers", "winter", "a library",
    "clocks", "mountains", "a market", "rain", "letters", "a small boat", "gardens", "night", "music", "bridges",
)  # fmt: skip
_TASKS = (
    "Write one sentence about", "Tell a short story about", "List three facts about", "Explain to a child",
    "Write a poem about", "Describe", "What do people say about", "Give advice about",
)  # fmt: skip
_CREDITS = 8
_STOPS = (".", ",", "\n", " the", "and", "is ")


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a text, how its answer is chosen, and the dialect it is asked in."""

    number: int
    form: Form
    text: str
    streams: bool
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def params(self) -> SamplingParams:
        """The same for an engine in this process. TGI's answers keep the stop string, the others' leave it out."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=1.0 if self.temperature == 0 else 0.9,
            seed=self.seed,
            n=self.n,
            stop=list(self.stop) or None,
            logprobs=self.logprobs,
            include_stop_str_in_output=self.form == "tgi",
        )

    def request(self, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body as the dialect has them."""
        if self.form == "tgi":
            return self._tgi()
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0 if self.temperature == 0 else 0.9,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.n > 1:
            body["n"] = self.n
        if self.stop:
            body["stop"] = list(self.stop)
        if self.form == "websocket":
            return "/v1/stream", body | {"prompt": self.text}
        if self.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.form == "chat":
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
            return "/v1/chat/completions", body | {"messages": self.messages()}
        if self.logprobs is not None:
            body["logprobs"] = self.logprobs
        return "/v1/completions", body | {"prompt": self.text}

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.text}]

    def _tgi(self) -> tuple[str, dict[str, Any]]:
        parameters: dict[str, Any] = {"max_new_tokens": self.max_tokens, "details": True}
        if self.temperature > 0:
            parameters |= {"do_sample": True, "temperature": self.temperature, "top_p": 0.9, "seed": self.seed}
        if self.stop:
            parameters["stop"] = list(self.stop)
        body = {"inputs": self.text, "parameters": parameters}
        return ("/generate_stream" if self.streams else "/generate"), body


def questions(count: int, seed: int) -> list[Question]:
    """Different questions; equal arguments give equal ones."""
    chance = random.Random(seed)
    return [_question(number, chance) for number in range(count)]


def heavy_questions(count: int, seed: int, *, first: int = 0) -> list[Question]:
    """Two long answers each with log-probabilities: enough bytes that a client who reads slowly is felt."""
    chance = random.Random(seed)
    return [
        Question(
            number=first + number,
            form=chance.choice(("completion", "chat")),
            text=f"{chance.choice(_TASKS)} {chance.choice(_SUBJECTS)}.",
            streams=True,
            max_tokens=200,
            temperature=1.0,
            seed=chance.randrange(1, 1 << 31),
            n=2,
            logprobs=5,
        )
        for number in range(count)
    ]


def _question(number: int, chance: random.Random) -> Question:
    form = chance.choice(_FORMS)
    # Some share a long beginning, some have one of their own, most are short.
    shared = " ".join(_SUBJECTS) * chance.choice((0, 0, 0, 1, 4))
    own = " ".join(chance.choices(_SUBJECTS, k=chance.choice((0, 0, 5, 40, 150))))
    text = f"{shared} {own} {chance.choice(_TASKS)} {chance.choice(_SUBJECTS)}.".strip()
    sampled = chance.random() < 0.6
    openai = form in ("completion", "chat")
    return Question(
        number=number,
        form=form,
        text=text,
        streams=form == "websocket" or chance.random() < 0.75,
        max_tokens=chance.choice((1, 16, 48, 96, 160)),
        temperature=chance.choice((0.3, 0.8, 1.2)) if sampled else 0.0,
        seed=chance.randrange(1, 1 << 31) if sampled else None,
        n=2 if sampled and openai and chance.random() < 0.25 else 1,
        stop=tuple(chance.sample(_STOPS, chance.choice((1, 2)))) if chance.random() < 0.2 else (),
        logprobs=chance.choice((0, 1, 5)) if openai and chance.random() < 0.2 else None,
    )


# --- what is expected -------------------------------------------------------------------------------------------------

_FINISH_OF_TGI = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer: texts and finish reasons by index; log-probabilities of the chosen tokens when asked for."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...] | None = None


def expected_answers(model: str, asked: Sequence[Question], **options: Any) -> list[Expected]:
    """Ask an engine in this process, which nobody disturbs and which ends with this."""

    async def run() -> list[Expected]:
        async with AsyncLLM(model, **options) as llm:
            return await _answers(llm, asked)

    return asyncio.run(run())


async def _answers(llm: AsyncLLM, asked: Sequence[Question]) -> list[Expected]:
    places = asyncio.Semaphore(32)

    async def one(question: Question) -> Expected:
        async with places:
            params = question.params()
            if question.form == "chat":
                outputs = llm.chat(question.messages(), params, output_kind="final")
            else:
                outputs = llm.generate(question.text, params, output_kind="final")
            async for output in outputs:
                last = output
        logprobs = None
        if question.logprobs is not None:
            logprobs = tuple(
                tuple(
                    entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
                )
                for answer in last.outputs
            )
        texts = tuple(answer.text for answer in last.outputs)
        return Expected(texts, tuple(_finish_reason(question, answer) for answer in last.outputs), logprobs)

    return list(await asyncio.gather(*map(one, asked)))


def _finish_reason(question: Question, answer: CompletionOutput) -> str:
    """TGI looks at the length first: an answer whose last token completes a stop string ended by its length there."""
    if question.form == "tgi" and len(answer.token_ids) >= question.max_tokens:
        return "length"
    return answer.finish_reason or ""


# --- asking a server --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the client behaves: ``abort_after`` that many events it cuts the connection (0: right after sending);
    ``pause`` is how many seconds it waits between events, with little room for what it does not read."""

    abort_after: int | None = None
    pause: float = 0.0


@dataclass(slots=True)
class Asked:
    """What came back. ``whole`` is false when the client left before the end."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    whole: bool = False
    error: str | None = None

    def add(self, index: int, text: str | None, finish_reason: str | None) -> None:
        self.texts[index] = self.texts.get(index, "") + (text or "")
        if finish_reason is not None:
            self.finish_reasons[index] = finish_reason


async def ask(
    address: Address, question: Question, model: str, behaviour: Behaviour | None = None, *, timeout: float = 180.0
) -> Asked:
    """Send a question and read the answer. Never raises for what the server does: the error is in what is returned."""
    behaviour = behaviour or Behaviour()
    answer = Asked()
    try:
        async with asyncio.timeout(timeout):
            if question.form == "websocket":
                await _ask_websocket(address, question, model, behaviour, answer)
            else:
                await _ask_http(address, question, model, behaviour, answer)
    except (OSError, ProtocolError, WebSocketException, ValueError, LookupError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _ask_http(address: Address, question: Question, model: str, behaviour: Behaviour, answer: Asked) -> None:
    path, body = question.request(model)
    small = behaviour.pause > 0
    connection = await Connection.open(
        address, receive_buffer=4096 if small else None, limit=4096 if small else 1 << 20
    )
    async with connection:
        await connection.send("POST", path, json.dumps(body).encode())
        if behaviour.abort_after == 0:
            await asyncio.sleep(0.02)
            connection.reset()
            return
        answer.status = await connection.head()
        if answer.status != 200:
            answer.error = (await connection.body())[:300].decode(errors="replace")
        elif question.streams:
            await _read_stream(connection, question, behaviour, answer)
        else:
            _read_whole(json.loads(await connection.body()), question, answer)
            answer.whole = True


async def _read_stream(connection: Connection, question: Question, behaviour: Behaviour, answer: Asked) -> None:
    done = False
    count = 0
    async for data in events(connection):
        count += 1
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event)[:300]
            return
        if question.form == "tgi":
            done = _read_tgi_event(event, answer) or done
        else:
            for choice in event["choices"]:
                _read_choice(choice, question, answer)
        if behaviour.abort_after is not None and count >= behaviour.abort_after:
            connection.reset()
            return
        if behaviour.pause > 0:
            await asyncio.sleep(behaviour.pause)
    if not done:
        answer.error = "the stream ended before its end"
    answer.whole = done


def _read_tgi_event(event: Mapping[str, Any], answer: Asked) -> bool:
    """Whether it was the last one, which has the text of all."""
    if event.get("generated_text") is None:
        answer.add(0, event["token"]["text"], None)
        return False
    answer.texts[0] = event["generated_text"]
    answer.finish_reasons[0] = _FINISH_OF_TGI[event["details"]["finish_reason"]]
    return True


def _read_choice(choice: Mapping[str, Any], question: Question, answer: Asked) -> None:
    """A choice of an OpenAI answer, whole or a part of a stream."""
    index = choice["index"]
    part = choice.get("delta") or choice.get("message") or {}
    text = part.get("content") if question.form == "chat" else choice["text"]
    answer.add(index, text, choice.get("finish_reason"))
    logprobs = choice.get("logprobs")
    if logprobs is not None:
        if question.form == "chat":
            values = [item["logprob"] for item in logprobs["content"] or []]
        else:
            values = logprobs["token_logprobs"]
        answer.logprobs.setdefault(index, []).extend(values)


def _read_whole(body: Any, question: Question, answer: Asked) -> None:
    if question.form == "tgi":
        answer.texts[0] = body["generated_text"]
        answer.finish_reasons[0] = _FINISH_OF_TGI[body["details"]["finish_reason"]]
        return
    for choice in body["choices"]:
        _read_choice(choice, question, answer)


async def _ask_websocket(address: Address, question: Question, model: str, behaviour: Behaviour, answer: Asked) -> None:
    """One request on a socket of its own; every other question is paced by credits, or given up by a cancel frame."""
    path, body = question.request(model)
    paced = question.number % 2 == 0
    async with connect(f"ws://{address.host}:{address.port}{path}", max_size=None, compression=None) as socket:
        start = {"type": "start", "id": "q"} | ({"credits": _CREDITS} if paced else {})
        await socket.send(json.dumps(start | body))
        if behaviour.abort_after == 0:
            await asyncio.sleep(0.02)
            socket.transport.abort()
            return
        count = credits_left = 0
        cancelled = False
        async for text in socket:
            frame = json.loads(text)
            if frame["type"] == "error":
                answer.error = str(frame["error"])[:300]
                return
            if frame["type"] == "end":
                answer.status = 200
                answer.whole = not cancelled or frame["finish_reason"] != "abort"
                if answer.whole:
                    answer.add(0, "", frame["finish_reason"])
                return
            if frame["type"] == "started":
                credits_left = _CREDITS
                continue
            answer.add(frame["index"], frame["text"], None)
            count += 1
            if behaviour.abort_after is not None and count >= behaviour.abort_after and not cancelled:
                if not paced:
                    socket.transport.abort()
                    return
                cancelled = True
                await socket.send(json.dumps({"type": "cancel", "id": "q"}))
            elif paced and not cancelled:
                credits_left -= frame["tokens"]
                if credits_left <= 0:
                    await asyncio.sleep(behaviour.pause)
                    credits_left += _CREDITS
                    await socket.send(json.dumps({"type": "credit", "id": "q", "tokens": _CREDITS}))
    answer.error = "the socket closed before the end frame"


# --- judging ----------------------------------------------------------------------------------------------------------


def wrong(question: Question, expected: Expected, answer: Asked) -> str | None:
    """What is wrong with an answer, None when it is right. Of one the client cut short, what came must be right."""
    if answer.error is not None:
        return f"error: {answer.error}"
    if not answer.whole:
        # A text cut in mid-stream may not hold what TGI's last event would have had, so only what is there is compared.
        for index, text in answer.texts.items():
            if not expected.texts[index].startswith(text):
                return f"text {index} went another way: {text!r} is not the beginning of {expected.texts[index]!r}"
        return None
    for index, text in enumerate(expected.texts):
        if answer.texts.get(index) != text:
            return f"text {index}: {answer.texts.get(index)!r} is not {text!r}"
        if answer.finish_reasons.get(index) != expected.finish_reasons[index]:
            return f"finish reason {index}: {answer.finish_reasons.get(index)} is not {expected.finish_reasons[index]}"
    if len(answer.texts) != len(expected.texts):
        return f"{len(answer.texts)} texts in place of {len(expected.texts)}"
    if expected.logprobs is not None:
        for index, values in enumerate(expected.logprobs):
            if tuple(answer.logprobs.get(index, ())) != values:
                return f"log-probabilities {index}: {answer.logprobs.get(index)} are not {list(values)}"
    return None
