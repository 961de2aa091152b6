"""HTTP connections with a time limit for request heads, and the server's options for uvicorn."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """An HTTP/1.1 connection that closes if the head of a request takes too long.

    uvicorn itself waits without limit for the first byte, the rest of a head, and the rest of a body
    after its answer. A body before its answer has the deadline of its request, see `app.Server`."""

    seconds = 20.0  # from the moment that a request can be sent until its head is complete

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Starts or stops the timer. Single bytes do not extend it."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        is_answered = theirs is h11.SEND_BODY and ours is h11.DONE
        if theirs is not h11.IDLE and not is_answered:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


OPTIONS: dict[str, Any] = dict(
    http=Connection, ws="none", server_header=False, timeout_graceful_shutdown=10
)
