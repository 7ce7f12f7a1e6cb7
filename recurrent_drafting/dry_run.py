"""Dry runs of the head's training: parameters, operations, memory, hours, and a head folder of
zeros, without weights or data.

Operations are those of products with weights: two a weight and token forward, and for the head as
much again twice backward; the target runs forward alone. What the hidden state gives to the first
linear map is counted once a draft, as it is computed.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.amounts import hours, operations, size
from recurrent_drafting.config import HeadTrainConfig
from recurrent_drafting.head import HeadConfig
from recurrent_drafting.head_folder import write_card, write_untrained
from training.drafter_folder import Origin
from training.features.stores import Layout
from training.heads.loss_config import judged, tokens_said
from training.losses.chunked import CHUNK
from training.models.build import dtype_of, say_missing
from training.models.shapes import forward_flops, millions, parameter_counts, target_widths
from training.parallel.memory_plan import answering_bytes, answering_line, bytes_per_rank
from training.plan import plan_tokens


def head_parameters(config: HeadConfig) -> dict[str, int]:
    """Parameters by part: `output`, `blocks`, `recurrence`, `projection`, and their sum
    as `all`.
    """
    H, E = config.hidden_size, config.exit_dim
    parts = {
        "output": E * config.num_drafted,
        "blocks": config.num_draft_layers * (E * E + E),
        "recurrence": 2 * H * H + H if config.rnn else 0,
        "projection": 2 * H * E + E if config.projects else 0,
    }
    return parts | {"all": sum(parts.values())}


def draft_flops(config: HeadConfig, heads: int) -> float:
    """Operations of the forward pass over one draft of `heads` predictions."""
    H, E = config.hidden_size, config.exit_dim
    context = H * E if config.projects or config.num_draft_layers else 0
    blocks = config.num_draft_layers - (0 if config.projects or not config.num_draft_layers else 1)
    prediction = context + blocks * E * E + E * config.num_drafted
    recurrence = (2 * heads - 1) * H * H if config.rnn else 0
    return 2.0 * (context + heads * prediction + recurrence)


def dry_run(
    config: HeadTrainConfig,
    head: HeadConfig,
    target: Any,
    target_folder: Path,
    folder: Path,
    was_dry: bool,
) -> float:
    """Print what training takes and write the untrained head to `folder`, unless a trained one is
    there. Returns operations.

    was_dry: what is there was written by a dry run, and is replaced.
    """
    say_missing(config.target)
    describe(head, target)
    flops = print_cost(config, head, target)
    print_memory(config, head, target)
    if head.draft_vocab_size:
        print(
            "note: the shortlist is counted in the data, which a dry run does not read: the "
            "untrained head has none"
        )
        head = replace(head, draft_vocab_size=0)
    if was_dry:
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        print(f"kept: {folder} is there already")
        return flops
    write_untrained(head, target_folder, folder)
    origin = Origin.untrained(config.head.name, config.target.path, target_folder)
    write_card(folder, head, head_parameters(head)["all"], origin)
    print(f"untrained head folder, to try loading with: {folder}")
    return flops


def describe(head: HeadConfig, target: Any) -> None:
    """Parameters of target and head, part by part."""
    counts = head_parameters(head)
    print(
        f"target: {millions(parameter_counts(target)['all'])} parameters, "
        f"{target.num_hidden_layers} layers, frozen"
    )
    parts = ", ".join(
        f"{millions(count)} {name}" for name, count in counts.items() if count and name != "all"
    )
    kind = "recurrent" if head.rnn else "without recurrence"
    print(
        f"head: {millions(counts['all'])} parameters ({parts}), {kind}; "
        f"{counts['all'] * 2 / 1e6:,.0f} MB in 16 bits"
    )


def target_flops(config: HeadTrainConfig, target: Any) -> float:
    """Operations of the target for a token of the data: its forward, without the lm_head but where
    a loss asks for it.
    """
    lm_head, whole = 2.0 * target.vocab_size * target.hidden_size, forward_flops(target)
    # heads that predict the same token share the target's distribution
    asked, said = (
        judged(config.loss),
        tokens_said(config.loss),
    )
    # the first token needs no forward of its own
    forwards = max(0, said - 1) * whole + (lm_head if said else 0)
    return whole - lm_head + config.assumed_supervised * (asked * lm_head + forwards)


def print_cost(config: HeadTrainConfig, head: HeadConfig, target: Any) -> float:
    """Operations, which it returns, and hours; 0 where the data alone tells the number
    of tokens.
    """
    teacher = target_flops(config, target)
    draft = 3 * draft_flops(head, config.loss.predict_n_tokens)
    token = teacher + config.assumed_supervised * draft
    share = f"{config.assumed_supervised:.0%}"
    print(
        f"cost: {token / 1e6:,.0f} MFLOP a token: target {teacher / 1e6:,.0f}, head "
        f"{draft / 1e6:,.0f} at each of the {share} that are supervised "
        f"({config.loss.predict_n_tokens} predictions)"
    )
    plan = plan_tokens(config.loop, token, config.assumed_tflops, config.assumed_tokens)
    if not plan.tokens:
        print(
            f"plan: {plan.words}; their tokens are known when the data is read (or give "
            f"assumed_tokens)"
        )
        return 0.0
    flops = token * plan.tokens
    print(
        f"plan: {plan.words}, {operations(flops)}, {hours(flops / config.assumed_tflops / 1e12)} "
        f"at {config.assumed_tflops:g} TFLOP/s (assumed_tflops)"
    )
    if config.states.cache == "disk":
        about = "about" if config.assumed_tokens else "at most"
        unknown = (
            ""
            if config.assumed_tokens
            else "; less where chats come twice: assumed_tokens= of one pass tells"
        )
        print(
            f"states: {about} {size(states_bytes(config, head))} on disk in "
            f"{config.states.folder}{unknown}"
        )
    return flops


def states_bytes(config: HeadTrainConfig, head: HeadConfig) -> float:
    """Of what is kept of the target's states: of one pass over the data, as a later one finds them
    there.
    """
    loop, loss = config.loop, config.loss
    tokens = loop.max_steps * loop.tokens_per_step or loop.max_tokens or config.assumed_tokens
    layout = Layout(
        loss.predict_n_tokens,
        judged(loss),
        head.hidden_size,
        dtype_of(loop.dtype),
        tokens_said(loss),
    )
    return min(tokens, config.assumed_tokens or tokens) * config.assumed_supervised * layout.bytes


def print_memory(config: HeadTrainConfig, head: HeadConfig, target: Any) -> None:
    """Megabytes of a rank, part by part: an estimate, the loss by its largest chunk."""
    loop, width = config.loop, dtype_of(config.loop.dtype).itemsize
    counts, frozen, ranks = (
        head_parameters(head),
        parameter_counts(target),
        max(1, config.parallel.processes),
    )
    plan = bytes_per_rank(
        counts["all"],
        frozen["all"],
        config.parallel.kind,
        ranks,
        loop.dtype,
        counts["all"],
        frozen["head"],
    )
    predictions = loop.micro_batch_tokens * config.assumed_supervised * config.loss.predict_n_tokens
    # of a prediction, by autograd
    kept = (3 * head.num_draft_layers + 2) * head.exit_dim + 3 * head.hidden_size
    vocabulary = head.num_drafted
    logits = min(CHUNK, predictions) * vocabulary * 4 * 6
    plan |= {
        "activations": predictions * kept * width,
        "loss": logits + vocabulary * head.exit_dim * (4 + width),
        "target's layer": loop.micro_batch_tokens
        * (2 * target.intermediate_size + 6 * target.hidden_size)
        * width,
    }
    if config.states.cache == "memory":
        most = config.states.memory_mb * 1e6
        plan["states, at most"] = min(most, states_bytes(config, head) or most)
    # one row at a time: its text, and all but the last token behind each position
    if said := tokens_said(config.loss):
        kept_tokens = config.data.max_length * (1 + (said - 1) * config.assumed_supervised)
        widths = target_widths(target)
        of_token = (
            2
            * target.num_hidden_layers
            * widths["num_key_value_heads"]
            * widths["head_dim"]
            * width
        )
        plan["target's keys and values"] = kept_tokens * of_token
    parts = {
        ("target" if name == "frozen" else name): size
        for name, size in plan.items()
        if size and name != "total"
    }
    of = f"each of {ranks} ranks ({config.parallel.kind})" if ranks > 1 else "one process"
    told = ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in parts.items())
    print(f"memory of {of}: {sum(parts.values()) / 1e6:,.0f} MB ({told})")
    held = {name: plan[kind] for name, kind in (("target", "frozen"), ("head", "weights"))}
    print(answering_line(held | answering_bytes(target, config)))
    print(
        f"disk: {counts['all'] * (width + 12) / 1e6:,.0f} MB a checkpoint, "
        f"{counts['all'] * 4 / 1e6:,.0f} MB the head"
    )
