"""PEARL with the drafter in a worker process, on the wall clock.

The tokens are the same as with decoding/schedules/pearl.py. The time includes what the lanes cost
each other (memory bandwidth, cores, messages). The worker's `draft_seconds`, `target_seconds` and
the `lanes_seconds` of both give the overlap (t_D + t_T - t_both) / min(t_D, t_T).

Shapes: as in decoding/schedules/pearl.py.
"""

from contextlib import ExitStack
from time import perf_counter

from torch import Tensor

from decoding.drafters.remote import RemoteChain, separate_cores
from decoding.interfaces import Proposal
from decoding.schedules.pearl import LaneSeconds, Pearl


class PearlWall(Pearl):
    """The rows of a batch on PEARL's schedule, with the drafter in a worker process."""

    # tokens of a chunk after which the drafter continues until the target is done; None: the chunk
    # ends at its length
    least: int | None = None

    def open(self) -> None:
        """Prefill, and bind this process to its cores until `close`."""
        assert isinstance(self.drafter, RemoteChain)
        with ExitStack() as bound:  # ends the binding if the prefill fails
            bound.enter_context(separate_cores(self.drafter, self.target))
            super().open()
            self._bound = bound.pop_all()

    def close(self) -> None:
        """End the binding to cores."""
        self._bound.close()

    def _both_lanes(self) -> tuple[Proposal | None, tuple[Tensor, Tensor] | None, LaneSeconds]:
        """Request a chunk, run the target meanwhile, and wait for the chunk."""
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
        return chunk, forward, took


class PearlWallWithoutPre(PearlWall):
    """The ablation without pre-verify: all tokens of a new chunk are assumed."""

    pre_verify = False
    one_row = True


class PearlWallWithoutPost(PearlWall):
    """The ablation without post-verify: nothing is drafted while assumed tokens are tested."""

    post_verify = False
