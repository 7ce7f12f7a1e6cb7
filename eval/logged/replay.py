"""Replay of one drafter on logged texts, and the drafters that cannot be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from decoding.drafters.lookahead import Lookahead
from decoding.drafters.ouroboros import Ouroboros
from decoding.drafters.prompt_lookup import Lookup
from decoding.drafters.registry import DRAFTERS, TRAINED, imported
from decoding.drafters.remote import RemoteChain
from decoding.drafters.target_view import TargetViewDrafter
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.rounds.stats import Generation
from decoding.stopping.policies import BY_COST
from eval.logged.decoding import decode_logged
from eval.logged.one_pass import drafts_of, follow, follows_in_one_pass
from eval.logged.texts import LoggedText
from jobs.drafter_use import DrafterUse, refuse_eval_options

FIXED = "fixed"
# classes without a head that draft from more than the text -> what they need
NEEDS = {
    Lookahead: "reads guesses from the target's verifying forward",
    Ouroboros: "learns phrases from the target's choices at rejected tokens",
    TargetViewDrafter: "drafts with the target's own layers",
    RemoteChain: "drafts while the target verifies",
}
HEADS = {DRAFTERS[name].kind: name for name in TRAINED}


@dataclass(frozen=True)
class Replay:
    """The rounds of one drafter on all texts, by draft length."""

    generations: dict[int, list[Generation]]
    passes: int  # passes over the texts: 1 for all draft lengths together, or one for each
    seconds: float

    @property
    def positions_per_second(self) -> float:
        """Tokens of the outputs that a second replays in a pass, those of prompts not counted."""
        texts = next(iter(self.generations.values()))
        return self.passes * sum(len(text.tokens) for text in texts) / max(self.seconds, 1e-9)


def refuse_entry(entry: Any) -> None:
    """Raise UserError for an entry of `drafters` that names a kind of head, before its folder."""
    use = entry.get("use") if isinstance(entry, Mapping) else entry
    if use in TRAINED:
        raise _refusal(str(use), "is a head, which reads the target's hidden states")


def refuse_mapping(name: str, mapping: Mapping[str, Any]) -> None:
    """Raise UserError, before it is loaded, for a drafter that needs more than the text."""
    dotted = str(mapping["_target_"])
    if dotted in HEADS:
        raise _refusal(name, f"is a head ({HEADS[dotted]}), which reads the target's hidden states")
    kind = imported(dotted)
    for needy, what in NEEDS.items():
        if isinstance(kind, type) and issubclass(kind, needy):
            raise _refusal(name, what)
    if mapping.get("by_cost"):
        raise _refusal(
            name, "sizes its trees by the costs of a target (by_cost)", "Set by_cost: false."
        )


def refuse_drafter(name: str, drafter: Drafter, use: DrafterUse) -> None:
    """Raise UserError for a drafter, a stopping rule or a schedule that needs a target."""
    refuse_eval_options(name, use)
    if drafter.capabilities.needs_hidden:
        raise _refusal(name, "reads the target's hidden states")
    if drafter.capabilities.needs_costs:
        raise _refusal(name, "needs the costs of a target", "Set by_cost: false.")
    if use.stopping in BY_COST:
        raise _refusal(
            name,
            f"has stopping={use.stopping}, which needs a target's costs",
            "Set stopping=fixed.",
        )
    if use.schedule != "serial":
        raise _refusal(name, f"has schedule={use.schedule}", "Use schedule=serial.")


def _refusal(name: str, what: str, remedy: str = "") -> UserError:
    remedy = remedy or "Measure it with its target: python -m eval.run"
    return UserError(
        f"drafters: {name} {what}, and a log holds the target's tokens alone. {remedy}"
    )


def replay(
    drafter: Drafter,
    use: DrafterUse,
    texts: Sequence[LoggedText],
    lengths: Sequence[int],
    *,
    stop_token_ids: Sequence[int],
    vocab_size: int,
    one_pass: bool = True,
) -> Replay:
    """Return the rounds with which the target would have written the texts, by draft length.

    one_pass: find the rounds of chains and lookups from the text; the loop gives the same.
    """
    began = perf_counter()
    if one_pass and (use.stopping or FIXED) == FIXED and follows_in_one_pass(drafter):
        found = {length: [Generation()] * len(texts) for length in lengths}
        for index, begin in drafts_of(drafter, texts, vocab_size):
            for length in lengths:
                found[length][index] = follow(begin(), texts[index], length)
        passes = len(lengths) if isinstance(drafter, Lookup) else 1
        return Replay(found, passes, perf_counter() - began)
    settings = {**use.settings, "stopping": use.stopping or FIXED}
    generations = {
        length: decode_logged(
            drafter,
            texts,
            num_draft_tokens=length,
            stop_token_ids=stop_token_ids,
            vocab_size=vocab_size,
            **settings,
        )
        for length in lengths
    }
    return Replay(generations, len(lengths), perf_counter() - began)
