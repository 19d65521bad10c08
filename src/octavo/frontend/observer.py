"""What the front end tells whoever watches it (metrics, traces): one method for each thing that happens to requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.messages import EngineInfo, StepStats
    from octavo.frontend.output_processor import Processed, RequestState

__all__ = ["Observer"]


class Observer:
    """Does nothing; subclasses override what they want to know.

    All calls come from the dispatcher's thread, except `accepted`, which comes from the caller's before the request is
    sent to the engine. What a method raises is logged and does not harm serving.
    """

    def accepted(self, state: RequestState) -> None:
        """A request passed every check of the front end and goes to the engine."""

    def stepped(self, stats: StepStats, processed: Processed) -> None:
        """The engine sent a frame: its state, and what the frame did to the requests."""

    def finished(self, state: RequestState) -> None:
        """An accepted request ended, for whatever reason; exactly once for each."""

    def paused(self, state: RequestState) -> None:
        """A request left the batch because its reader is slow or asked for it."""

    def resumed(self, state: RequestState) -> None:
        """A paused request runs again."""

    def engine_started(self, info: EngineInfo) -> None:
        """An engine is ready, at the start and after each crash."""

    def engine_lost(self, reason: str, replayed: int, failed: int) -> None:
        """The engine's process died or hung: requests given to its successor, and requests given up."""
