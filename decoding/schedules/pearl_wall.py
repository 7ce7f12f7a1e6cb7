"""PEARL on two workers: the drafter's process drafts while this one verifies, and the clock is the
wall's.

The same schedule as decoding/schedules/pearl.py, token for token. What the lanes take from each
other (memory bandwidth, cores, the way between them) is in the time, and how much they really
overlap is in the
counts: `draft_seconds` of the worker, `target_seconds` here and `lanes_seconds` of both together
give the overlap (t_D + t_T - t_both) / min(t_D, t_T).

Shapes: as in decoding/schedules/pearl.py.
"""

from contextlib import ExitStack
from time import perf_counter

from torch import Tensor

from decoding.drafters.remote import RemoteChain, lanes
from decoding.interfaces import Proposal
from decoding.schedules.pearl import LaneSeconds, Pearl


class PearlWall(Pearl):
    """The rows of a batch under PEARL's schedule, with a drafter in a worker."""

    # Tokens after which the drafter goes on until the target is done; None: the chunk is as asked.
    least: int | None = None

    def open(self) -> None:
        """As on the virtual clock, bound to this process's own cores until `close`."""
        assert isinstance(self.drafter, RemoteChain)
        with ExitStack() as bound:  # unbound again where the prefill fails
            bound.enter_context(lanes(self.drafter, self.target))
            super().open()
            self._bound = bound.pop_all()

    def close(self) -> None:
        """Give the cores back."""
        self._bound.close()

    def _both_lanes(self) -> tuple[Proposal | None, tuple[Tensor, Tensor] | None, LaneSeconds]:
        """Ask for the chunk, verify, then wait for the chunk."""
        assert isinstance(self.drafter, RemoteChain)
        began = perf_counter()
        request = self._request()
        if request is not None:
            self.drafter.begin(*request, least=self.least)
        forward = self._verify_lane(fresh=request is not None)
        if request is not None and self.least is not None:
            self.drafter.enough()
        target = perf_counter() - began if forward is not None else 0.0
        chunk = self.drafter.finish() if request is not None else None
        draft = self.drafter.worker_seconds if request is not None else 0.0
        took = LaneSeconds(draft, target, perf_counter() - began)
        return chunk if chunk is not None and max(chunk.counts_B) else None, forward, took


class PearlWallWithoutPre(PearlWall):
    """The first ablation: a fresh chunk is assumed whole."""

    pre_verify = False
    one_row = True


class PearlWallWithoutPost(PearlWall):
    """The second ablation: nothing is drafted while assumed tokens are tested."""

    post_verify = False
