"""The table of rows for the laws of decoding: one entry per drafter, with its verification rules.

A new drafter or rule is one more entry in row_kinds, which has a module for each kind of drafter.
`make` builds the row's drafter from a `Kit`. `table` builds one for the 5-symbol target of law 3;
the oracles have none, as they must know the answer.

Law 4 needs perfect and adversarial drafters (test_law_of_gain.py). For most rows `make` builds
both, from a kit whose models and head predict the text or its opposite; the other rows define
`adversarial`. `perfect` builds a drafter with q = p on a target with random weights. Rows without
it have no closed form on such a target: the size of a cost-based tree depends on the model's
confidence; Lookahead, Ouroboros and lookups propose earlier text, likely or not; top-k beams are
point masses, and the likeliest beams need not begin with the likeliest token. Sampled beams and
self-speculation have separate tests of q = p.

scripts/bench/gpu_rows.py reads the table without pytest.
"""

from decoding.drafters.with_lookup import LookupFirst
from tests.decoding.row_kinds import block, eagle, early_exit, medusa, models, recurrent, sdsat
from tests.decoding.row_kinds.kit import COSTS, DrafterRow, Kit, draft_table
from tests.decoding.row_kinds.models import PICKED

__all__ = [
    "ADDED",
    "BY_NAME",
    "COSTS",
    "PICKED",
    "ROWS",
    "DrafterRow",
    "Kit",
    "draft_table",
    "of_rows",
    "with_lookup_before",
]


def with_lookup_before(row: DrafterRow, slow: bool = True) -> DrafterRow:
    """Return a row that tries suffix lookup before the given row's drafter."""
    adversarial, table = row.adversarial, row.table
    return DrafterRow(
        f"{row.name}_with_lookup",
        make=lambda kit: LookupFirst(row.make(kit), min_match=2),
        rules=row.rules,
        adversarial=None
        if adversarial is None
        else lambda kit: LookupFirst(adversarial(kit), min_match=2),
        table=None if table is None else lambda: LookupFirst(table(), min_match=2),
        gamma=row.gamma,
        slow=slow,
    )


ROWS = [
    *models.ROWS,
    *recurrent.ROWS,
    *medusa.ROWS,
    *eagle.ROWS,
    *block.ROWS,
    *early_exit.ROWS,
    *sdsat.ROWS,
    *models.ORACLES,
]

BY_NAME = {row.name: row for row in ROWS}
# Rows that are repeated with lookup before the drafter; for a chain that is `chain_with_lookup`.
KINDS = (
    "multi_candidate",
    "static_tree",
    "ranked_tree",
    "graph",
    "ouroboros",
    "self_speculation",
    "early_exit",
    "sdsat_one_forward",
    "recurrent",
)
KINDS += ("recurrent_chain", "recurrent_drawn", "recurrent_drawn_by_cost", "eagle3")
ADDED = [with_lookup_before(BY_NAME[name], slow=name != "ranked_tree") for name in KINDS]
ROWS += ADDED
BY_NAME |= {row.name: row for row in ADDED}


def of_rows() -> list:
    """Return ROWS as parameters of a test, with the slow ones marked for the long suite."""
    import pytest

    return [pytest.param(row, id=row.name, marks=[pytest.mark.long] * row.slow) for row in ROWS]
