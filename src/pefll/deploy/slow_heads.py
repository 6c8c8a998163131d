"""A web server's protocol that does not wait for ever for a request to begin.

uvicorn closes a connection that is idle between two requests. It does not close one whose first request never comes, or
whose next one comes a byte at a time: such connections cost a stranger nothing and would use up all there are.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pefll.core.errors import PefllError

try:
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError:
    raise PefllError("real clients need Flower: pip install 'pefll[flower]'", code="PEFLL-F401") from None

HEAD_SECONDS = 20.0


class HeadTimeoutProtocol(H11Protocol):  # type: ignore[misc]
    """Closes a connection on which a request's head is not there after some seconds."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Go on waiting where the head is not whole yet; begin to where a new one begins."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._waiting is None:
            self._wait()

    def on_response_complete(self) -> None:
        """Leave it to uvicorn, which closes connections that are idle."""
        self._stop()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
