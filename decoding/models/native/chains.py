"""Chains outside Python, for models that run fused: their draft, and their test by a target.

Between two forwards every small operation finds its instructions out of the processor's caches, so
a round takes fewer of them here. The eager versions are the loop of `ChainDrafter.propose` and the
rules `greedy`, `token` and `coupled` of decoding/verification, whose probabilities may differ in
the last bits.

Shapes: B rows, N drafted tokens, K unseen tokens, V vocabulary.
"""

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.interfaces import ChainChoice, Chooser, Draws, Outcome, Proposal, Tokens
from decoding.models.native import library
from decoding.models.native.fused import CODES, SUM_DTYPES, FusedForward, address


def draft_chain(
    step: FusedForward,
    unseen_B: Tokens,
    tips_B: Sequence[int],
    counts_B: list[int],
    lengths_B: Sequence[int],
    choice: ChainChoice,
) -> tuple[Tensor, Tensor | None, list[int]]:
    """Return what `Target.chain_call` returns after `lengths_B` tokens, without committing.

    All steps are one call, or one call each if the lengths are decided on the way.
    """
    B, K, N = len(unseen_B), max(map(len, unseen_B)), max(counts_B)
    padded = [token for unseen in unseen_B for token in (*unseen, *[0] * (K - len(unseen)))]
    tokens, numbers = (ctypes.c_int64 * (B * K))(*padded), ctypes.c_int32 * B
    lengths, counts = (ctypes.c_int64 * B)(*lengths_B), numbers(*counts_B)
    confidences_B = None if choice.shorten is None else (ctypes.c_double * B)()
    tokens_BN, q_BNV = torch.empty(B, 1 + N, dtype=torch.int64), None
    if choice.draws.keys_B:
        q_BNV = torch.empty(B, N, choice.vocab_size, dtype=step.sum_dtype)
    forward = library.Forward(
        B,
        K,
        0,
        torch.get_num_threads(),
        False,
        ctypes.addressof(tokens),
        None,
        lengths,
        step.columns(()),
    )
    chain = library.Chain(
        0, N, N, step.choices(choice.vocab_size), numbers(*map(len, unseen_B)), counts, lengths,
        address(step.weights.ids_N), (ctypes.c_int64 * B)(*tips_B), address(tokens_BN),
        confidences_B, _draws(choice.draws), address(q_BNV), choice.vocab_size,
    )  # fmt: skip
    while chain.first < max(counts_B):
        if confidences_B is not None:
            chain.last = chain.first + 1
        step.check(step.library.draft_chain(step.model, forward, chain), K)
        chain.first = chain.last
        if confidences_B is not None and choice.shorten is not None:
            counts_B = choice.shorten(chain.last, list(confidences_B), counts_B)
            for row, count in enumerate(counts_B):
                counts[row] = count
    if chain.last < N:
        tokens_BN = tokens_BN[:, : 1 + chain.last]
        q_BNV = None if q_BNV is None else q_BNV[:, : chain.last]
    return tokens_BN, q_BNV, counts_B


def verifies(chooser: Chooser) -> bool:
    """Return whether `verify_chains` knows the chooser's rule."""
    warper = chooser.warper
    return chooser.rule == "greedy" or (
        chooser.rule in ("token", "lossy_lenience", "coupled")
        and not warper.truncates
        and warper.is_shared
    )


def verify_chains(
    logits_BNV: Tensor, proposal: Proposal | None, chooser: Chooser
) -> tuple[Outcome, tuple[float, float]]:
    """Return the outcome of a round, and the largest tested logit and q (`Target.verify_call`)."""
    B, nodes, V = logits_BNV.shape
    logits_BNV, drafted_BN, q_BNV, counts_B = _dense(logits_BNV), None, None, [0] * B
    if proposal is not None:
        drafted_BN, counts_B = _dense(proposal.tokens_BN), proposal.counts_B
        if proposal.q_BNV is not None:
            q_BNV = _dense(proposal.q_BNV.to(SUM_DTYPES[logits_BNV.dtype]))
    accepted, emitted = (ctypes.c_int32 * B)(), (ctypes.c_int64 * (B * nodes))()
    test = library.Verification(
        CODES[logits_BNV.dtype], B, nodes - 1, torch.get_num_threads(), V,
        address(logits_BNV), address(drafted_BN), (ctypes.c_int32 * B)(*counts_B), address(q_BNV),
        chooser.lenience, _draws(chooser.draws), accepted, emitted, (-math.inf, 0.0),
    )  # fmt: skip
    if library.load_library().verify_chains(test):
        raise IndexError(f"drafted tokens are out of range: expected tokens from 0 to {V - 1}.")
    accepted_B = list(accepted)
    tokens_B = [emitted[b * nodes : b * nodes + n + 1] for b, n in enumerate(accepted_B)]
    tested_B = [n + (n < count) for n, count in zip(accepted_B, counts_B, strict=True)]
    return Outcome(tokens_B, None, accepted_B, tested_B), tuple(test.largest)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _draws(draws: Draws) -> library.Draws:
    if not draws.temperature:
        return library.Draws()
    if draws.shared_BW:
        W = len(draws.shared_BW[0])
        shared = [key for row in draws.shared_BW for key in row]
        shared_BW = (ctypes.c_int64 * len(shared))(*shared)
        return library.Draws(draws.temperature, None, None, shared_BW, W)
    B = len(draws.keys_B)
    keys, positions = (ctypes.c_uint64 * B)(*draws.keys_B), (ctypes.c_int64 * B)(*draws.positions_B)
    return library.Draws(draws.temperature, keys, positions)
