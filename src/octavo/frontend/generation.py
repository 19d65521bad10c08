"""One request of an AsyncLLM on its way: read output by output, failed from outside, closed when nobody reads on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import GenerationError

if TYPE_CHECKING:
    from octavo.frontend.dispatcher import Dispatcher, Stream
    from octavo.frontend.output_processor import OutputKind
    from octavo.frontend.outputs import RequestOutput

__all__ = ["Generation"]


class Generation:
    """The reading end of a request, for one task of the event loop it was started in.

    A token crosses few layers here: under load a server reads some thousand outputs a second, on the cores that also
    compute them.
    """

    __slots__ = ("_dispatcher", "_ended", "_kind", "_stream", "_texts")

    def __init__(self, dispatcher: Dispatcher, stream: Stream, kind: OutputKind) -> None:
        self._dispatcher = dispatcher
        self._stream = stream
        self._kind: OutputKind = kind
        self._texts = dispatcher.outputs.texts
        self._ended = False

    async def next(self) -> RequestOutput | None:
        """Wait for the next output; None after the last one, which has ``finished`` set. Raises what ended it early."""
        if self._ended:
            return None
        stream = self._stream
        state = stream.state
        while True:
            if not stream.changed:
                await stream.wait()
            stream.changed = False  # before the state is read, so that no change is lost
            if stream.failure is not None:
                raise stream.failure
            output = state.output(self._texts, self._kind)
            self._dispatcher.note_read(stream)
            if output is not None:
                break
        if output.error is not None:
            raise GenerationError(f"request {state.request_id} failed: {output.error}")
        self._ended = output.finished
        return output

    def fail(self, error: BaseException) -> None:
        """End the request now; who reads it, or reads on, gets the error. To be called in its event loop."""
        self._stream.fail(error)
        self.close()

    def close(self) -> None:
        """Nobody reads on: the request is aborted unless it has ended."""
        self._dispatcher.abort(self._stream.state.request_id, self._stream)
