"""The WebSocket /v1/stream: several requests on one connection, their tokens as frames, at the pace the client sets."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import uuid
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection

from octavo.errors import ParameterError
from octavo.server.access import report
from octavo.server.app import draining
from octavo.server.call import Call
from octavo.server.failures import ClientGone, Failure, Kind
from octavo.server.openai.chat import prepare as prepare_chat
from octavo.server.openai.completions import prepare as prepare_completion
from octavo.server.openai.errors import OPENAI, error_body, read_body
from octavo.server.openai.generation import start
from octavo.server.openai.streaming import Delta, Pending, Progress
from octavo.server.openai.usage import usage_of
from octavo.server.pacing import Cutter, Pace
from octavo.server.socket_frames import (
    ChatStart,
    CompletionStart,
    Control,
    Deltas,
    Head,
    check_start,
    decode_control,
    decode_head,
    frame,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.types import Message, Receive, Scope, Send

    from octavo.frontend.outputs import CompletionOutput, RequestOutput
    from octavo.sampling.params import SamplingParams
    from octavo.server.app import App
    from octavo.server.openai.logprobs import LogprobWriter
    from octavo.server.openai.prompts import EncodedPrompt

__all__ = ["PATH", "PROTOCOL", "serve_socket"]

T = TypeVar("T")

PATH = "/v1/stream"
PROTOCOL = "octavo.v1"
KEY_PROTOCOL = "octavo.key."  # followed by the API key in base64url, for browsers, which can send no header
MAX_REQUESTS = 64  # that run at once on one socket

_log = logging.getLogger(__name__)


async def serve_socket(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve one WebSocket from its handshake to its end."""
    connection = HTTPConnection(scope)
    call = Call(app.serving, connection)
    try:
        call.tenant = app.keys.check(_headers(connection))
        if scope["path"] != PATH:
            raise Failure(Kind.not_found, f"There is no WebSocket at {scope['path'][:200]}.", code="not_found")
        if app.serving.draining:
            raise draining()
    except Failure as failure:
        await OPENAI.failure_response(call.failed(failure), call)(scope, receive, send)
        report(call, "WS", scope["path"], PATH if scope["path"] == PATH else "none", failure.status, 0)
        # uvicorn takes an application that returns while the connection is open for one that did not answer.
        for _ in range(2):
            while (await receive())["type"] != "websocket.disconnect":
                pass
        return
    await _Session(app, connection, receive, send, call.tenant).run()


def _headers(connection: HTTPConnection) -> Mapping[str, str]:
    """The headers, with the key in the place of HTTP when it came as a subprotocol."""
    if "authorization" in connection.headers:
        return connection.headers
    for protocol in connection.scope.get("subprotocols", ()):
        if protocol.startswith(KEY_PROTOCOL):
            encoded = protocol[len(KEY_PROTOCOL) :]
            try:
                key = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).decode()
            except (binascii.Error, ValueError):
                break
            return {"authorization": f"Bearer {key}"}
    return connection.headers


class _FrameCall(Call):
    """A start frame as the dialect's functions take a request."""

    def __init__(self, app: App, connection: HTTPConnection, tenant: str | None, text: str) -> None:
        super().__init__(app.serving, connection, tenant=tenant)
        self.request_id = uuid.uuid4().hex
        self.record.stream = True
        self.record.body_bytes = len(text)
        self._text = text
        self.pace: Pace | None = None

    async def read(self, type_: type[T]) -> T:
        """The frame as ``type_``."""
        return msgspec.json.decode(self._text, type=type_)

    def wake(self) -> None:
        """Also while the client takes no tokens."""
        if self.pace is not None:
            self.pace.end()


class _Request:
    """One request of a socket."""

    def __init__(self, id_: str, call: _FrameCall) -> None:
        self.id = id_
        self.call = call
        self.pace = call.pace = Pace(self._pause, self._resume)
        self.progress: Progress | None = None
        self.task: asyncio.Task[None] | None = None

    def _pause(self) -> None:
        for engine_id in self.call.engine_ids:
            self.call.serving.llm.pause(engine_id)

    def _resume(self) -> None:
        for engine_id in self.call.engine_ids:
            self.call.serving.llm.resume(engine_id)

    def usage(self) -> Any:
        """The tokens so far."""
        return usage_of(0, 0) if self.progress is None else self.progress.total()


class _Session:
    """One open socket: reads the frames of the client, and runs a task for each request."""

    def __init__(self, app: App, connection: HTTPConnection, receive: Receive, send: Send, tenant: str | None) -> None:
        self._app = app
        self._connection = connection
        self._receive = receive
        self._raw_send = send
        self._tenant = tenant
        self._requests: dict[str, _Request] = {}
        self._draining = False
        self._closed = False
        self._closing: asyncio.Task[None] | None = None

    # -- the socket

    async def run(self) -> None:
        """From the handshake to the close."""
        offered = self._connection.scope.get("subprotocols", ())
        sockets = self._app.sockets
        try:
            await self._receive()  # websocket.connect
            await self._transmit({"type": "websocket.accept", "subprotocol": PROTOCOL if PROTOCOL in offered else None})
            if len(sockets) >= max(1, self._app.serving.options.max_connections // 2):
                await self._close(1013, "too many sockets are open: try again later")
                return
            sockets.add(self)
            await self._read()
        except ClientGone:
            pass
        except Exception:
            _log.exception("a WebSocket failed on an internal error")
            await self._close(1011, "internal error")
        finally:
            self._closed = True
            sockets.discard(self)
            await self._end_requests()

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            if text is None:
                await self._close(1003, "frames are JSON texts")
                return
            try:
                await self._take(text)
            except (Failure, ParameterError) as error:
                await self._refuse(None, Call(self._app.serving, self._connection).failed(error))

    async def _transmit(self, message: Message) -> None:
        try:
            await self._raw_send(message)
        except OSError:  # what ASGI says when the connection is lost
            self._closed = True
            raise ClientGone from None

    async def _send(self, text: str) -> None:
        if self._closed:
            raise ClientGone
        await self._transmit({"type": "websocket.send", "text": text})

    async def _refuse(self, id_: str | None, failure: Failure) -> None:
        more = {} if failure.retry_after is None else {"retry_after": failure.retry_after}
        await self._send(frame("error", id_, error=error_body(failure).error, **more))

    async def _close(self, code: int, reason: str) -> None:
        if not self._closed:
            self._closed = True
            with suppress(ClientGone):
                await self._transmit({"type": "websocket.close", "code": code, "reason": reason})

    def drain(self) -> None:
        """Take no more requests, and close when none runs."""
        self._draining = True
        if not self._requests and self._closing is None:
            self._closing = asyncio.ensure_future(self._close(1012, "the server is shutting down"))

    async def _end_requests(self) -> None:
        tasks = []
        for request in self._requests.values():
            request.call.gone = True
            if request.task is not None:
                request.task.cancel()
                tasks.append(request.task)
        if tasks:
            await asyncio.wait(tasks)

    # -- the frames of the client

    async def _take(self, text: str) -> None:
        head = decode_head(text)
        if head.type == "start":
            await self._start(head, text)
            return
        if head.type not in ("credit", "cancel", "pause", "resume"):
            raise ParameterError("type", head.type, "one of start, credit, cancel, pause, resume")
        control = decode_control(text)
        request = self._requests.get(control.id)
        if request is None:
            message = f"No request {control.id} runs on this socket; it may have ended."
            raise Failure(Kind.not_found, message, param="id", code="request_not_found")
        if control.type == "cancel":
            await self._cancel(request)
        else:
            _apply(control, request.pace)

    async def _start(self, head: Head, text: str) -> None:
        """A failure here ends the request it is about, unless another one has the same id."""
        if head.id in self._requests:
            raise ParameterError("id", head.id, "unlike that of any running request of the socket")
        call = _FrameCall(self._app, self._connection, self._tenant, text)
        try:
            if len(self._requests) >= MAX_REQUESTS:
                message = f"{MAX_REQUESTS} requests run on this socket, and no more may at once."
                raise Failure(Kind.overloaded, message, code="socket_full", retry_after=1)
            body: ChatStart | CompletionStart
            body = await read_body(call, CompletionStart if head.messages is msgspec.UNSET else ChatStart)
            check_start(body)
        except (Failure, ParameterError) as error:
            await self._refuse(head.id, call.failed(error))
            return
        if body.request_id is not None:
            call.request_id = body.request_id
        request = _Request(head.id, call)
        request.pace.credits = body.credits
        self._requests[head.id] = request
        request.task = asyncio.create_task(self._run(request, body))

    async def _cancel(self, request: _Request) -> None:
        assert request.task is not None
        request.task.cancel()
        await asyncio.wait([request.task])
        if self._requests.get(request.id) is request:  # a task that is cancelled before it begins tidies up nothing
            del self._requests[request.id]
        if request.task.cancelled():  # else it had ended, and said so
            await self._send(frame("end", request.id, finish_reason="abort", stop_reason=None, usage=request.usage()))
        if self._draining:
            self.drain()

    # -- one request

    async def _run(self, request: _Request, body: ChatStart | CompletionStart) -> None:
        call = request.call
        try:
            with self._app.answering(call, PATH):
                try:
                    await self._answer(request, body)
                except ClientGone:
                    call.gone = True
                except Exception as error:
                    failure = call.failed(error)
                    self._requests.pop(request.id, None)
                    await self._refuse(request.id, failure)
        except Failure as failure:  # there is no place for it
            self._requests.pop(request.id, None)
            report(call, "WS", PATH, PATH, failure.status, 0)
            await self._refuse(request.id, call.failed(failure))
        except ClientGone:
            pass
        finally:
            self._requests.pop(request.id, None)
            if self._draining:
                self.drain()

    async def _answer(self, request: _Request, body: ChatStart | CompletionStart) -> None:
        call = request.call
        prompt: EncodedPrompt
        params: SamplingParams
        if isinstance(body, ChatStart):
            chat = await prepare_chat(call, body)
            labels, prompt, params, writer = chat.labels, chat.prompt, chat.params, chat.writer
        else:
            plan = await prepare_completion(call, body)
            labels, (prompt,), (params,), writer = plan.labels, plan.prompts, plan.params, plan.writer
        (generation,) = start(call, body, [prompt], [params], labels, "delta")
        request.progress = Progress([len(prompt.token_ids)], params.n)
        fields: dict[str, Any] = {"request_id": labels.id, "created": labels.created, "model": labels.model}
        fields["prompt_tokens"] = len(prompt.token_ids)
        if body.return_token_ids:
            fields["prompt_token_ids"] = prompt.token_ids
        if isinstance(body, ChatStart) and body.return_prompt_text:
            fields["prompt_text"] = chat.rendered
        await self._send(frame("started", request.id, **fields))
        writers = _DeltaWriter(request, body, writer, prompt, params)
        ends = await self._stream(request, generation, writers)
        self._requests.pop(request.id, None)  # so that the client may use the id again
        await self._send(frame("end", request.id, **ends, usage=request.usage()))

    async def _stream(
        self, request: _Request, generation: AsyncGenerator[RequestOutput, None], writer: _DeltaWriter
    ) -> dict[str, Any]:
        """Send the tokens as they come and as the client takes them; gives how the choices ended."""
        pace, progress = request.pace, request.progress
        options = request.call.serving.options
        patience = options.write_timeout
        assert progress is not None
        ends: dict[int, dict[str, Any]] = {}
        async with aclosing(generation):
            while (output := await pace.read(generation, patience)) is not None:
                progress.cached[0] = output.num_cached_tokens
                for completion in output.outputs:
                    progress.advance(completion.index, completion)
                    if completion.finish_reason is not None:
                        ends[completion.index] = {
                            "index": completion.index,
                            "finish_reason": completion.finish_reason,
                            "stop_reason": completion.stop_reason,
                        }
                    rest: CompletionOutput | None = completion
                    while rest is not None:
                        if not pace.open:
                            await pace.wait(patience, tokens=len(rest.token_ids))
                            if not pace.open and pace.ended:
                                break  # what the client had not asked for when the request ended is dropped
                        part, rest = writer.cut(rest, pace.credits)
                        pace.spend(len(part.token_ids), finished=output.finished)
                        text = writer.frame(part)
                        if text is not None:
                            await self._send(text)
        first = ends.get(0, {"finish_reason": None, "stop_reason": None})
        found = {"finish_reason": first["finish_reason"], "stop_reason": first["stop_reason"]}
        if len(ends) > 1:
            found["choices"] = [ends[index] for index in sorted(ends)]
        return found


def _apply(control: Control, pace: Pace) -> None:
    """Do what a frame says of the pace of a request."""
    if control.type == "credit":
        if pace.credits is None:
            message = f"Request {control.id} was started without credits: its tokens are sent as they come."
            raise Failure(Kind.invalid, message, param="tokens", code="no_credits")
        assert control.tokens is not None
        pace.add(control.tokens)
    elif control.type == "pause":
        pace.hold()
    else:
        pace.release()


class _DeltaWriter:
    """Makes the delta frames of one request; one whose choice has nothing to show yet is None."""

    def __init__(
        self,
        request: _Request,
        body: ChatStart | CompletionStart,
        writer: LogprobWriter | None,
        prompt: EncodedPrompt,
        params: SamplingParams,
    ) -> None:
        self._frames = Deltas(request.id)
        self._writer = writer
        self._chat = isinstance(body, ChatStart)
        self._with_ids = bool(body.return_token_ids)
        self._counts = body.credits is not None
        self._plain = writer is None and not self._with_ids and not self._counts
        self._offsets = [0] * params.n
        interval = body.stream_interval or 1
        self._pending = [Pending(interval) for _ in range(params.n)] if interval > 1 else None
        self._cutters: list[Cutter] | None = None
        if self._counts:
            tokenizer = request.call.serving.llm.get_tokenizer()
            self._cutters = [Cutter(tokenizer, prompt.token_ids, params.skip_special_tokens) for _ in range(params.n)]

    def cut(self, output: CompletionOutput, credits_: int | None) -> tuple[CompletionOutput, CompletionOutput | None]:
        """As much of an output as the credits allow, and what is left."""
        return (output, None) if self._cutters is None else self._cutters[output.index].cut(output, credits_)

    def frame(self, output: CompletionOutput) -> str | None:
        """The frame of an output, None when it would say nothing."""
        index = output.index
        delta: CompletionOutput | Delta = output
        if self._pending is not None:
            gathered = self._pending[index].take(output)
            if gathered is None:
                return None
            delta = gathered
        if self._plain:
            return self._frames.text(index, delta.text) if delta.text else None
        if not delta.token_ids and not delta.text:
            return None
        fields: dict[str, Any] = {}
        if self._counts:
            fields["tokens"] = len(delta.token_ids)
        if self._with_ids:
            fields["token_ids"] = delta.token_ids
        if self._writer is not None:
            positions = delta.logprobs or ()
            if self._chat:
                fields["logprobs"] = self._writer.chat(delta.token_ids, positions)
            else:
                found, self._offsets[index] = self._writer.completion(delta.token_ids, positions, self._offsets[index])
                fields["logprobs"] = found
        return self._frames.full(index, delta.text, fields)
