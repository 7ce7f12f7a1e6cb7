"""Dry runs of a head's training: parameters, FLOPs, memory, hours, and a head folder of zeros.

No weights or data are read. FLOPs count products with weights: two per weight and token forward,
four more backward for the head; the target only runs forward.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jobs.amounts import size
from training.drafter_folder import Provenance, keeps_folder
from training.features.states import layers_read
from training.features.stores import StoreLayout
from training.heads.checks import allowed_caches
from training.heads.config import HeadJobConfig
from training.heads.folder import write_card, write_untrained
from training.heads.kind import HeadKind
from training.heads.loss_config import num_continued_tokens, reads_final, trained_depths
from training.heads.measure import HeadStatistics, measure
from training.heads.store_price import StorePrices, describe_choices
from training.losses.config import uses_teacher
from training.models.build import dtype_of, print_missing
from training.models.shapes import cache_bytes_per_token, forward_flops, millions, parameter_counts
from training.parallel.memory_plan import (
    answering_bytes,
    answering_line,
    bytes_per_rank,
    loss_bytes,
)
from training.plan import print_plan


def dry_run(
    config: HeadJobConfig,
    kind: HeadKind,
    shape: Any,
    target: Any,
    target_folder: Path,
    folder: Path,
    was_dry: bool,
) -> float:
    """Print the cost of training, write the untrained head to `folder` and return the FLOPs.

    The FLOPs are 0 if the number of tokens is unknown. A trained head in `folder` is kept. was_dry:
    a dry run wrote the folder, which is replaced.
    """
    print_missing(config.target)
    depths = trained_depths(config.loss)
    counted = measure(kind, shape, depths, dtype_of(config.loop.dtype), target)
    describe(kind, shape, target, counted)
    layout = states_layout(config, kind, shape, target)
    flops = print_cost(config, target, counted, layout, allowed_caches(config)[0])
    print_memory(config, target, counted, layout, shape.num_drafted)
    if config.on_policy.share:
        print(
            f"note: in {config.on_policy.share:.0%} of the rows (on_policy.share) the head drafts, "
            f"and the target scores the drafts, which this cost leaves out"
        )
    if shape.draft_vocab_size:
        print(
            "note: the draft vocabulary is chosen from the data, which a dry run does not read: "
            "the untrained head has none"
        )
        shape = replace(shape, draft_vocab_size=0)
        counted = measure(kind, shape, depths, torch.float32, target)
    if keeps_folder(folder, was_dry):
        return flops
    write_untrained(kind, shape, target_folder, folder)
    origin = Provenance.untrained(config.head.name, config.target.path, target_folder)
    write_card(kind, folder, shape, counted.parameters, origin)
    print(f"untrained head folder, to try loading with: {folder}")
    return flops


def describe(kind: HeadKind, shape: Any, target: Any, counted: HeadStatistics) -> None:
    """Print the target's number of parameters, and the head's by part."""
    print(
        f"target: {millions(parameter_counts(target)['all'])} parameters, "
        f"{target.num_hidden_layers} layers, frozen"
    )
    parts = ", ".join(f"{millions(count)} {name}" for name, count in counted.parts.items())
    print(
        f"head: {millions(counted.parameters)} parameters ({parts}), {kind.describe(shape)}; "
        f"{counted.parameters * 2 / 1e6:,.0f} MB in 16 bits"
    )


def states_layout(config: HeadJobConfig, kind: HeadKind, shape: Any, target: Any) -> StoreLayout:
    """Return the layout of the store of states that a job needs."""
    loss, taps = config.loss, kind.taps(shape)
    layers = layers_read(taps, target.num_hidden_layers, reads_final(loss))
    dtype = dtype_of(config.loop.dtype)
    if config.states.layers:
        kept = tuple(sorted({*layers, *config.states.layers}))
        return StoreLayout(0, False, len(kept) * shape.hidden_size, dtype, taps=kept, context=True)
    return StoreLayout(
        trained_depths(loss),
        reads_final(loss),
        len(layers) * shape.hidden_size,
        dtype,
        num_continued_tokens(loss),
        taps,
        kind.reads_context,
    )


def drafts_per_token(config: HeadJobConfig) -> float:
    """Return the drafts that train in a step, per token of the data."""
    limit = config.loss.drafts_per_row
    if not limit:
        return config.assumed_supervised
    return min(config.assumed_supervised, limit / config.data.max_length)


def target_flops(config: HeadJobConfig, target: Any) -> float:
    """Return the target's FLOPs per token of the data, with the lm_head if the loss needs it."""
    # heads that predict the same token share the target's distribution
    most_judged = drafts_per_token(config) * trained_depths(config.loss)
    judged = uses_teacher(config.loss) * min(config.assumed_supervised, most_judged)
    return reading_flops(config, target) + judged * _lm_head_flops(target)


def reading_flops(config: HeadJobConfig, target: Any) -> float:
    """Return the target's FLOPs per token of the data for what a store keeps."""
    lm_head, forward = _lm_head_flops(target), forward_flops(target)
    continued = num_continued_tokens(config.loss)
    # the first token needs no forward of its own
    forwards = max(0, continued - 1) * forward + (lm_head if continued else 0)
    return forward - lm_head + config.assumed_supervised * forwards


def _lm_head_flops(target: Any) -> float:
    return 2.0 * float(target.vocab_size * target.hidden_size)


def draft_flops(counted: HeadStatistics) -> float:
    """Return the FLOPs of forward and backward of the head for one draft."""
    return 3.0 * counted.flops


def token_flops(config: HeadJobConfig, target: Any, counted: HeadStatistics) -> float:
    """Return the FLOPs of a training step per token of the data."""
    return target_flops(config, target) + drafts_per_token(config) * draft_flops(counted)


def print_cost(
    config: HeadJobConfig,
    target: Any,
    counted: HeadStatistics,
    layout: StoreLayout,
    caches: Sequence[str],
) -> float:
    """Print FLOPs, hours and the price of each store of states, and return the FLOPs.

    The FLOPs are 0 if the number of tokens is unknown. caches: the stores that the job allows.
    """
    teacher, draft = target_flops(config, target), draft_flops(counted)
    drafts, token = drafts_per_token(config), token_flops(config, target, counted)
    places = f"the {drafts:.0%} that are supervised"
    if drafts < config.assumed_supervised:
        limit, length = config.loss.drafts_per_row, config.data.max_length
        places = f"{limit} of the {length:,} in a row (loss.drafts_per_row)"
    print(
        f"cost: {token / 1e6:,.0f} MFLOP per token: target {teacher / 1e6:,.0f}, head "
        f"{draft / 1e6:,.0f} at each of {places} ({counted.predictions} predictions)"
    )
    flops = print_plan(
        config.loop, token, config.assumed_tflops, "assumed_tokens", config.assumed_tokens
    )
    print_stores(config, target, layout, caches, flops / token)
    return flops


def print_stores(
    config: HeadJobConfig, target: Any, layout: StoreLayout, caches: Sequence[str], tokens: float
) -> None:
    """Print the bytes and seconds of each store.

    tokens: those that train, of which unknown data holds as many; 0: unknown.
    """
    if len(caches) == 1 or config.on_policy.share:
        return
    tflops = config.assumed_tflops
    if not tokens:
        print(
            f"states: {size(1e6 * position_share(config, layout) * layout.bytes)} for each million "
            f"tokens of the data, in memory or on disk (states.cache); set assumed_tokens to "
            f"compare the stores"
        )
        return
    once = config.assumed_tokens or tokens
    prices = StorePrices(
        once * position_share(config, layout) * layout.bytes,
        once * reading_flops(config, target) / tflops / 1e12,
        tokens / once,
        max(1, config.parallel.processes),
    )
    for line in describe_choices(config.states, caches, prices, tflops):
        print(line)
    if not config.assumed_tokens:
        print(
            "    at most: less is stored where chats come twice; set assumed_tokens to the tokens "
            "of one pass"
        )


def states_bytes(config: HeadJobConfig, layout: StoreLayout) -> float:
    """Return the bytes of the stored states of one pass over the data; 0 if its size is unknown."""
    loop = config.loop
    tokens = loop.max_steps * loop.tokens_per_step or loop.max_tokens or config.assumed_tokens
    share = position_share(config, layout)
    return min(tokens, config.assumed_tokens or tokens) * share * layout.bytes


def position_share(config: HeadJobConfig, layout: StoreLayout) -> float:
    """Return the share of the data's tokens at which states are stored."""
    return 1.0 if layout.context else config.assumed_supervised


def print_memory(
    config: HeadJobConfig,
    target: Any,
    counted: HeadStatistics,
    layout: StoreLayout,
    vocabulary: int,
) -> None:
    """Print estimates of a rank's memory by part, of the memory while answering, and of the disk.

    The loss is counted with its largest chunk. vocabulary: the number of drafted tokens.
    """
    loop, width = config.loop, dtype_of(config.loop.dtype).itemsize
    frozen, ranks = parameter_counts(target), max(1, config.parallel.processes)
    plan = bytes_per_rank(
        counted.parameters,
        frozen["all"],
        config.parallel.kind,
        ranks,
        loop.dtype,
        counted.parameters,
        frozen["head"],
    )
    drafts = loop.micro_batch_tokens * drafts_per_token(config)
    plan |= {
        "activations": drafts * counted.kept,
        "loss": loss_bytes(drafts * counted.predictions, vocabulary, counted.outputs, width),
        "target's layer": loop.micro_batch_tokens
        * (2 * target.intermediate_size + 6 * target.hidden_size)
        * width,
    }
    if config.states.cache == "memory":
        most = config.states.memory_mb * 1e6
        plan["states, at most"] = min(most, states_bytes(config, layout) or most)
    # one row at a time: its text, and all but the last token of each continuation
    if continued := num_continued_tokens(config.loss):
        kept_tokens = config.data.max_length * (1 + (continued - 1) * config.assumed_supervised)
        plan["target's keys and values"] = kept_tokens * cache_bytes_per_token(target, width)
    parts = {
        ("target" if name == "frozen" else name): size
        for name, size in plan.items()
        if size and name != "total"
    }
    of = f"each of {ranks} ranks ({config.parallel.kind})" if ranks > 1 else "one process"
    listed = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items())
    print(f"memory of {of}: {sum(parts.values()) / 1e6:,.0f} MB ({listed})")
    held = {name: plan[kind] for name, kind in (("target", "frozen"), ("head", "weights"))}
    print(answering_line(held | answering_bytes(target, config)))
    print(
        f"disk: {counted.parameters * (width + 12) / 1e6:,.0f} MB per checkpoint, "
        f"{counted.parameters * 4 / 1e6:,.0f} MB for the head"
    )
