"""The server keeps nothing of a request that has ended; planted leaks show that this is seen."""

import asyncio
import gc
from typing import Any

import pytest

from decoding.sessions.open_batch import OpenBatch
from serving.api.scheduler import Scheduler
from tests.support.api_requests import ask_all, check_nothing_is_left, questions
from tests.support.api_server import Served, serve
from tests.support.heap import Heap, check_flat, read_heap


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "method", "kind"), [(Scheduler, "submit", "Job"), (OpenBatch, "join", "Row")]
)
def test_a_planted_leak_of_jobs_or_rows_is_found(
    owner: Any, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: keep what a method takes or returns after its request has ended."""
    kept, real = [], getattr(owner, method)

    def keeping(*given: Any) -> Any:
        found = real(*given)
        kept.append((given, found))
        return found

    monkeypatch.setattr(owner, method, keeping)
    with serve() as served:
        body = {"model": served.model, "prompt": [4, 5], "max_tokens": 3}
        assert served.post(body).status_code == 200
        served.wait_until_empty()
    with pytest.raises(AssertionError, match=f"left in memory: .*'{kind}': 1"):
        check_nothing_is_left()
    kept.clear()
    check_nothing_is_left()


def check_memory(served: Served, requests: int) -> None:
    """Check that these requests, in 20 parts, keep less than a kilobyte each."""
    each, heaps = requests // 20, list[Heap]()
    gc.collect()
    gc.freeze()  # collections then search what the requests leave, not all modules
    try:
        for _ in range(20):
            asyncio.run(ask_all(served, questions(each)))
            served.wait_until_empty()
            gc.collect()
            heaps.append(read_heap())
    finally:
        gc.unfreeze()
    check_flat(heaps, each)


@pytest.mark.long
def test_memory_is_flat_over_2000_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a control, leak a kilobyte a request afterwards, in one piece or in small ones."""
    with serve("recurrent", max_rows=6) as served:
        check_memory(served, 2000)
        assert served.metric("requests_total") == 2000
        check_leaks_are_found(served, monkeypatch)
    check_nothing_is_left()


def check_leaks_are_found(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that planted leaks fail the check of memory."""
    kept, submit = list[object](), Scheduler.submit
    for pieces, size in ((1, 1024), (16, 64)):

        def leak(*given: Any, pieces: int = pieces, size: int = size) -> None:
            kept.append([bytes(size) for _ in range(pieces)])
            submit(*given)

        with monkeypatch.context() as planted:
            planted.setattr(Scheduler, "submit", leak)
            with pytest.raises(AssertionError, match="a request keeps"):
                check_memory(served, 200)
