"""How many requests are answered at once, in all and for each API key: no queue here, one too many is refused."""

from __future__ import annotations

from octavo.server.failures import Failure, Kind

__all__ = ["Admission"]

# There is no telling when a place gets free; a second is about the length of a short answer.
_RETRY_AFTER = 1.0


class Admission:
    """Counts the calls that generate. ``refused`` counts those turned away."""

    def __init__(self, total: int, per_key: int | None) -> None:
        self._total = total
        self._per_key = per_key
        self._by_key: dict[str, int] = {}
        self.active = 0
        self.refused = 0

    def enter(self, tenant: str | None) -> None:
        """Take a place, which ``leave`` gives back; a Failure when there is none."""
        if self.active >= self._total:
            raise self._refusal(f"{self.active} requests are being answered, and at most {self._total} may be at once")
        if tenant is not None:
            own = self._by_key.get(tenant, 0)
            if self._per_key is not None and own >= self._per_key:
                message = f"{own} requests with this key are being answered, and at most {self._per_key} may be at once"
                raise self._refusal(message)
            self._by_key[tenant] = own + 1
        self.active += 1

    def leave(self, tenant: str | None) -> None:
        """Give a place back."""
        self.active -= 1
        if tenant is not None:
            self._by_key[tenant] -= 1
            if self._by_key[tenant] == 0:
                del self._by_key[tenant]

    def _refusal(self, reason: str) -> Failure:
        self.refused += 1
        message = f"Model is overloaded: {reason}. Try again later."
        return Failure(Kind.overloaded, message, code="overloaded", retry_after=_RETRY_AFTER)
