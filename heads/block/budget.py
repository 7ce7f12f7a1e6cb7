"""The budget of a block drafter's draft (training/heads/budget.py)."""

from torch import Tensor

from decoding.costs.roofline import ForwardBudget
from decoding.interfaces import Target
from heads.block.corrections import Correction, Markov, Selector
from heads.block.model import BlockHead
from training.heads import budget


def pass_budget(
    head: BlockHead, target: Target, depths: int, context: int, rows: float
) -> ForwardBudget:
    """Return the budget of one pass over the blocks of `rows` rows, and of its output layer."""
    config, dtype = head.config, head.norm.weight.dtype
    tokens = config.block_size * rows
    found = budget.embedding(target, rows + 1)  # of the tips and of the mask token
    found += budget.products(_layer_weights(head, of_context=False), tokens)
    sizes = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    attended = budget.attention(*sizes, context, config.block_size, rows, dtype)
    found += attended.times(config.num_layers)
    if config.draft_vocab_size:
        sizes = (config.hidden_size, config.draft_vocab_size)
        return found + budget.product(*sizes, depths * rows, dtype)
    return found + budget.lm_head(target, depths * rows)


def correction_budget(
    head: BlockHead, target: Target, depths: int, rows: float, confident: bool
) -> ForwardBudget:
    """Return the budget of the steps from left to right after the last pass.

    confident: whether the confidence is computed, too.
    """
    step = ForwardBudget(0, 0, 0)
    if head.correction is not None:
        step += _correction_step(head.correction, target, rows)
    if confident and head.confidence is not None:
        step += budget.products(head.confidence.parameters(), rows)
    return step.times(depths)


def context_budget(head: BlockHead, rows: float) -> ForwardBudget:
    """Return the budget of joining the taps of a new token; keys and values share its layers.

    Heads with fusion per layer have other projections for them.
    """
    joined = [part for part in (head.fc, head.fusion) if part is not None]
    weights = [weight for part in joined for weight in part.parameters()]
    return budget.products([*weights, *_layer_weights(head, of_context=True)], rows)


def _layer_weights(head: BlockHead, of_context: bool) -> list[Tensor]:
    """Return the layers' weights of the context alone, or all others."""
    named = head.layers.named_parameters()
    return [weight for name, weight in named if ("_proj_target" in name) == of_context]


def _correction_step(correction: Correction, target: Target, rows: float) -> ForwardBudget:
    if isinstance(correction, Selector):
        return (
            _rows(correction.predecessor_codebook, rows)
            + _rows(correction.successor_codebook, correction.candidates * rows)
            + budget.products(correction.hidden_projection.parameters(), rows)
        )
    if isinstance(correction, Markov):
        table_VE = correction.markov_w1.weight
        return _rows(table_VE, rows) + budget.products([correction.weight], rows)
    return budget.embedding(target, rows) + budget.products(correction.parameters(), rows)


def _rows(table_VE: Tensor, count: float) -> ForwardBudget:
    return budget.table_rows(table_VE.shape[1], count, table_VE.dtype)
