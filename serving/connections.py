"""Connections of uvicorn that end when no request arrives on them."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class IdleProtocol(H11Protocol):
    """A connection that is closed if the head of its next request is not complete in time.

    uvicorn itself bounds the time between two requests only, and any byte ends its wait, so a
    client could keep any number of connections open for ever.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def data_received(self, data: bytes) -> None:
        waiting, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        super().data_received(data)
        if waiting is None:
            return
        # an answer that is complete: what arrives is the rest of a refused request's body
        unasked = self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE
        if unasked and not self.transport.is_closing():
            self.timeout_keep_alive_task = waiting
        else:
            waiting.cancel()
