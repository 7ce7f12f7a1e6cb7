"""The measure of law 3: counts of the first three tokens against their exact joint distribution.

Targets have 5 symbols, so at most 31 forwards give the exact distribution. Most drafters are tested
on a table of logits indexed by the last two tokens; those that run or read its layers on a model
with layers.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from decoding.drafters.target_view import TargetViewDrafter
from decoding.drafters.with_lookup import LookupFirst
from decoding.interfaces import Drafter, Target
from decoding.rounds.settings import Settings
from eval.statistics.joint_law import P_LIMIT as P_LIMIT  # the tests of the law import it
from eval.statistics.joint_law import Triple, joint, p_value
from heads.block.drafter import BlockDrafter
from jobs.malloc import without_collector
from tests.support.batched_requests import MANY, decode_in_batches
from tests.support.many_requests import first_tokens
from tests.support.tiny_targets import TableTarget, five_words

from .rows import COSTS, PICKED, ROWS

# scripts/test.sh sets the variable: 5,000 in the short suite, 20,000 with --all, a million with
# --exhaustive. Controls use the same number, so each tier shows that its own test can fail.
DRAWS = int(os.environ.get("SHALLOW_DRAFT_DRAWS", "5000"))
# Of cases that repeat a drafter and rule in other circumstances; only --exhaustive draws more.
FEW_DRAWS = min(DRAWS, max(5_000, DRAWS // 10))
PROMPT = [3, 1, 4, 2, 4]
WARPERS = {
    "plain": {"temperature": 1.0},
    "cold_top_k": {"temperature": 0.7, "top_k": 3},
    "hot_top_p": {"temperature": 1.5, "top_p": 0.85},
    "min_p": {"temperature": 1.2, "min_p": 0.15},
}
ROWS_AT_ONCE = 5_000  # more rows overflow the processor's caches, fewer cost more overhead


def target_table() -> TableTarget:
    """Return the 5-symbol target with random logits after each pair of tokens."""
    return TableTarget(torch.randn(5, 5, 5, generator=torch.Generator().manual_seed(1)) * 1.5)


def target_of(drafter: Drafter | None) -> Target:
    """Return the 5-symbol target for a drafter: one with layers if it runs them, else a table."""
    inner = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    return five_words() if isinstance(inner, TargetViewDrafter | BlockDrafter) else target_table()


def drafter_of(name: str) -> Drafter | None:
    """Return the drafter of the row `name` for the 5-symbol target.

    It is None for "autoregressive", which decodes without one, and for a row without a table.
    """
    if name == "autoregressive":
        return None
    make = next(row.table for row in [*ROWS, *PICKED] if row.name == name)
    return make() if make is not None else None


def exact_row(
    logits: Sequence[float],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Return the next token's probabilities for one row of logits, from the warpers' definitions.

    Warpers apply in the order of the parameters; ties between logits go to the lower token id.
    top_k=0, top_p=1 and min_p=0 keep every token.
    """
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = order[:top_k] if top_k else order
    weights = {
        i: torch.tensor(logits[i] / temperature, dtype=torch.float64).exp().item() for i in kept
    }
    total = sum(weights.values())
    probs = {i: w / total for i, w in weights.items()}
    nucleus, reached = {}, 0.0
    for i in kept:
        if reached >= top_p:
            break
        nucleus[i] = probs[i]
        reached += probs[i]
    best = max(nucleus.values())
    final = {i: p for i, p in nucleus.items() if p >= min_p * best}
    return [final.get(i, 0.0) / sum(final.values()) for i in range(len(logits))]


def exact_joint(target: Target, warper: Mapping[str, float]) -> dict[Triple, float]:
    """Return the exact joint distribution of the first three tokens after PROMPT.

    The target runs once over each prefix. warper: keyword arguments of `exact_row`.
    """

    def next_row(text: list[int]) -> list[float]:
        target.open(1, 16)
        return exact_row(target.forward(torch.tensor([text]))[0][0, -1].tolist(), **warper)  # type: ignore[arg-type]

    return joint(next_row, PROMPT)


@without_collector()
def count_triples(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: Settings,
    draws: int = DRAWS,
) -> Counter[Triple]:
    """Decode one prompt as requests 0 to `draws` - 1, and count their first three tokens."""
    counts: Counter[Triple] = Counter()
    for start in range(0, draws, ROWS_AT_ONCE):
        ids = range(start, min(start + ROWS_AT_ONCE, draws))
        if settings.schedule in MANY:
            done = decode_in_batches(target, drafter, prompt, settings, ids, 3)
        else:
            done = first_tokens(target, drafter, prompt, settings, ids, 3)
        counts.update(map(tuple, done))
    return counts


def law_holds(
    drafter: Drafter | None,
    rule: str,
    warper: str,
    seed: int = 0,
    draws: int = DRAWS,
    **more: object,
) -> float:
    """Return the p-value of law 3 over `draws` requests with a drafter and a verification rule.

    warper: key of WARPERS. more: further fields of `Settings`; they override those chosen here.
    """
    target = target_of(drafter)
    fields = {
        "max_new_tokens": 5,
        "num_draft_tokens": 4,
        "verify": rule,
        "seed": seed,
        "costs": COSTS,
        **WARPERS[warper],
        **more,
    }
    settings = Settings(**fields)  # type: ignore[arg-type]
    counts = count_triples(target, drafter, PROMPT, settings, draws)
    return p_value(counts, exact_joint(target, WARPERS[warper]))
