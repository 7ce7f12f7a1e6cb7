"""Protocols of decoding (Target, Drafter, Stopping) and the data that they exchange in a round.

A round drafts, runs one target forward, verifies and commits:

    proposal = drafter.propose(sequences, budgets, stopping, chooser)
    logits, hidden = target.forward(tip + proposal.tokens)
    outcome = rule(logits, proposal, chooser, readback)
    target.commit(outcome.paths)
    drafter.observe(observation)
    drafter.rollback(target.lengths)

A row's *sequence* is its prompt and the tokens emitted so far. Its last token, the *tip*, is not in
the caches: the round's target forward runs over the tip and the drafted tokens.
"""

from decoding.interfaces.chooser import Chooser, Draws, Warper
from decoding.interfaces.costs import FrontierPlanner, RoundCosts
from decoding.interfaces.drafter import Capabilities, Drafter, Pool, PoolKeeper
from decoding.interfaces.proposal import (
    NO_NODE,
    Observation,
    Outcome,
    Proposal,
    Readback,
    Reader,
    Riders,
    TopRows,
    ancestors,
)
from decoding.interfaces.stopping import Policies, Stopping, TokenConfidence
from decoding.interfaces.target import (
    EXACT,
    ChainCall,
    ChainChoice,
    Shorten,
    Target,
    Tokens,
    VerifyCall,
    precision,
    rounds_coarsely,
)

__all__ = [
    "EXACT",
    "NO_NODE",
    "Capabilities",
    "ChainCall",
    "ChainChoice",
    "Chooser",
    "Drafter",
    "Draws",
    "FrontierPlanner",
    "Observation",
    "Outcome",
    "Policies",
    "Pool",
    "PoolKeeper",
    "Proposal",
    "Readback",
    "Reader",
    "Riders",
    "RoundCosts",
    "Shorten",
    "Stopping",
    "Target",
    "TokenConfidence",
    "Tokens",
    "TopRows",
    "VerifyCall",
    "Warper",
    "ancestors",
    "precision",
    "rounds_coarsely",
]
