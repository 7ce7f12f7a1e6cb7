"""The budget of a head's draft counts the matrices that a draft reads, as operations show them."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from decoding.costs.roofline import BudgetedDrafter, forward_budget
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.rounds.settings import Settings
from tests.heads.law_6 import GAMMA, head_of, target
from tests.heads.rows import HEAD_ROWS, HeadRow
from tests.support.matrix_reads import MatrixReads, matrices_in

ROWS = {row.name: row for row in HEAD_ROWS}
EARLIEST, LATEST = 2, 4  # rounds, since the first ones are special in some drafters


model_in_float64 = cache(lambda: target().double())


def native_target() -> NativeTarget:
    model = model_in_float64()
    return NativeTarget.from_state(
        model.config.to_dict(), model.state_dict(), dtype=torch.float64, execution="eager"
    )


class Recorded:
    """The reads of one round of a drafter: while it drafts, and of its head at other times.

    No drafted token was accepted just before, except by drafters that always accept some.
    """

    def __init__(self, drafter: Any, native: NativeTarget) -> None:
        self.steps = rounds = accepted = 0
        self.drafting, self.later, self.found = MatrixReads([]), MatrixReads([]), False
        recording = ExitStack()
        # held in the round before; the states of a round are not
        before: list[torch.Tensor] = []
        propose, observe = drafter.propose, drafter.observe

        def count_accepted(observation: Any) -> None:
            nonlocal accepted
            observe(observation)
            accepted = observation.outcome.accepted_B[0]

        def record(*given: Any) -> Any:
            nonlocal rounds
            rounds += 1
            recording.close()
            wanted = rounds > EARLIEST and (accepted == 0 or rounds > LATEST)
            if not wanted or self.found:
                before[:] = matrices_in([drafter, native])
                return propose(*given)
            self.drafting = MatrixReads(before)
            with self.drafting:
                proposal = propose(*given)
            self.steps, self.found = proposal.steps, True
            self.later = MatrixReads(matrices_in(trained_parts(drafter)))
            recording.enter_context(self.later)
            return proposal

        drafter.propose, drafter.observe = record, count_accepted
        decode(native, drafter, [[3, 5, 8]], Settings(20, num_draft_tokens=GAMMA))
        assert self.found, "no round was recorded"

    def size(self, most: int) -> int:
        """Return the bytes read, each matrix at most `most` times while drafting."""
        return self.drafting.size(most) + self.later.size(1, without=self.drafting)


def trained_parts(drafter: Any) -> list[Any]:
    """Return a drafter's head, and the copies of its parts in a view of the target."""
    view = getattr(drafter, "model", None)
    parts = [getattr(thing, name, None) for thing in (drafter, view) for name in ("head", "heads")]
    layers = view.weights.layers if isinstance(view, NativeTarget) else []
    products = [each for it in layers for each in (it.qkv, it.out, it.gate_up, it.down)]
    return [*parts, *(getattr(product, "change", None) for product in products)]


def measured_and_predicted(row: HeadRow, extra: Any = None) -> tuple[int, int]:
    """Return the bytes of the matrices that a round's draft reads, and those of its budget.

    extra: a function that a draft calls in addition, given its head.
    """
    head = head_of(row, model_in_float64()).double()
    drafter: Any = row.drafter(head)
    if extra is not None:
        head.extra = torch.nn.Linear(4, 4, bias=False).double()
        plain = drafter.propose

        def read_more(*given: Any) -> Any:
            extra(head)
            return plain(*given)

        drafter.propose = read_more
    native = native_target()
    found = Recorded(drafter, native)
    assert isinstance(drafter, BudgetedDrafter)
    budget = drafter.draft_budget(native, found.steps, GAMMA, 10, 1)
    corrected = getattr(head, "correction", None) is not None
    return found.size(GAMMA if corrected else max(found.steps, 1)), budget.weight_bytes


@pytest.mark.parametrize("row", HEAD_ROWS, ids=lambda row: row.name)
def test_a_draft_reads_the_matrices_of_its_budget(row: HeadRow) -> None:
    measured, predicted = measured_and_predicted(row)
    assert measured == predicted


# PyTorch counts no operations of attention, which is a small part here.
@pytest.mark.parametrize(
    ("name", "attends"),
    [("recurrent", False), ("medusa", False), ("eagle3", True), ("domino", True), ("sdsat", True)],
)
def test_the_operations_are_those_of_the_products(name: str, attends: bool) -> None:
    native, counted = native_target(), []
    drafter: Any = ROWS[name].drafter(head_of(ROWS[name], model_in_float64()).double())
    propose = drafter.propose

    def count(sequences_B: list[list[int]], *given: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            proposal = propose(sequences_B, *given)
        flops = counter.get_total_flops()
        counted.append((len(sequences_B[0]) - 1, proposal.steps, flops))
        return proposal

    drafter.propose = count
    decode(native, drafter, [[3, 5, 8]], Settings(16, num_draft_tokens=GAMMA))
    context, steps, flops = counted[EARLIEST]
    predicted = drafter.draft_budget(native, steps, GAMMA, context, 1).operations
    assert flops <= predicted <= 1.2 * flops if attends else flops == predicted


def test_a_read_that_the_budget_leaves_out_is_noticed() -> None:
    def read_more(head: Any) -> None:
        head.extra(torch.zeros(1, 4, dtype=torch.float64))

    measured, predicted = measured_and_predicted(ROWS["eagle3"], read_more)
    assert measured == predicted + 4 * 4 * 8


@pytest.mark.parametrize("name", ["eagle3", "medusa", "early exit", "sdsat", "dflash"])
def test_the_parameters_of_a_head_are_not_its_reads(name: str) -> None:
    """Check that the tensors of the target that a head reads count, too, as does each step."""
    head = head_of(ROWS[name], model_in_float64()).double()
    measured, _ = measured_and_predicted(ROWS[name])
    assert measured != head.num_parameters * 8


def test_layers_that_a_head_shares_with_the_target_count_once_a_step() -> None:
    """Check an early exit after two of four layers: a step reads three layers and the lm_head."""
    row, native = ROWS["early exit"], native_target()
    drafter: Any = row.drafter(head_of(row, model_in_float64()).double())
    exits = replace(native.config, num_layers=3)
    step = forward_budget(exits, torch.float64, 1, 10)
    assert drafter.draft_budget(native, 1, GAMMA, 10, 1) == step
    assert drafter.draft_budget(native, 2.5, GAMMA, 10, 1) == step.times(2.5)
    shared = forward_budget(replace(exits, num_layers=2), torch.float64, 1, 10)
    alone = forward_budget(replace(exits, num_layers=0), torch.float64, 1, 10)
    one_layer = (shared.bytes_read - alone.bytes_read) / 2
    assert step.bytes_read == alone.bytes_read + 3 * one_layer
    assert drafter.num_parameters * 8 < 1.1 * one_layer, "shared layers are no parameters of it"


@pytest.mark.parametrize("row", HEAD_ROWS, ids=lambda row: row.name)
def test_operations_and_caches_grow_with_rows_and_weights_do_not(row: HeadRow) -> None:
    native = native_target()
    drafter: Any = row.drafter(head_of(row, model_in_float64()).double())
    one, two = (drafter.draft_budget(native, 1, GAMMA, 10, rows) for rows in (1, 2))
    assert two.operations == pytest.approx(2 * one.operations, abs=2)
    assert two.cache_bytes == 2 * one.cache_bytes
    # each row adds rows of embeddings and tables alone
    assert one.weight_bytes <= two.weight_bytes <= one.weight_bytes + 16 * 64 * 8
    longer = drafter.draft_budget(native, 1, GAMMA, 20, 1)
    assert longer.cache_bytes == 2 * one.cache_bytes
    if row.name.startswith("recurrent") or row.name.startswith("medusa"):
        assert one.cache_bytes == 0 and one.operations < 2 * one.weight_bytes
