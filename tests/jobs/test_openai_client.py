"""Errors of the client of OpenAI-compatible servers; jobs that use it have tests of their own."""

import asyncio
import socket
import threading

import pytest

from decoding.errors import UserError
from jobs.openai_client import OpenAIClient, Patience


def test_a_server_that_hangs_up_is_named_in_whole_sentences() -> None:
    """Check that the full stop of httpx's own sentence is not printed twice."""

    async def ask(url: str) -> None:
        async with OpenAIClient(url, Patience()) as client:
            await client.find_model()

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            connection, _ = listening.accept()
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1024):  # unread bytes would reset the connection
                pass
            connection.close()

        server = threading.Thread(target=hang_up)
        server.start()
        with pytest.raises(UserError) as error:
            asyncio.run(ask(f"http://127.0.0.1:{listening.getsockname()[1]}/v1"))
        server.join()
    words = str(error.value)
    assert "without sending a response. Check that the server runs" in words
    assert ".." not in words
