"""Checks of a head's training before the models are loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.drafters.fit import check_fits
from decoding.errors import UserError
from decoding.models.folder import CARD, hash_input, read_json
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.tokenizer import has_tokenizer
from decoding.values import RULES
from jobs.ranks import SHARDED_WEIGHTS, is_rank
from jobs.run_folder import RunFolder
from training.adapters import adapter_rules
from training.config import check_values, held_out_rules
from training.data.mixture import check_mixture
from training.features.taps import check_layers
from training.heads.config import HeadJobConfig
from training.heads.draft_vocabulary import CHOICES
from training.heads.kind import HeadKind
from training.heads.loss_config import (
    CONTINUATIONS,
    HEAD_LOSSES,
    head_loss_rules,
    num_continued_tokens,
    trained_depths,
)
from training.held_out.costs import cost_rules
from training.losses.config import CROSS_ENTROPY, parts_of
from training.models.build import check_target
from training.on_policy import schedule_rules

CACHES = ("none", "memory", "disk")
_SHARED = " with parallel.kind={kind}, whose ranks run the target together"


def check(config: HeadJobConfig, kind: HeadKind, shape: Any, target: Any) -> None:
    """Raise UserError for values that would otherwise fail only after the models are loaded.

    target: the target's Hugging Face configuration.
    """
    check_target(config.target, config.parallel)
    check_mixture(config.data, ())
    check_layers(kind.taps(shape), target.num_hidden_layers)
    drafted = shape.num_drafted
    check_values(
        config,
        {
            **choice_rules(config, kind, kind.reads_tokens(shape)),
            **kind.rules(config, shape),
            **adapter_rules(config, "head.path", config.head.path),
            "states.layers": layers_rule(config, target.num_hidden_layers),
            "head.draft_vocabulary": (
                config.head.draft_vocabulary in CHOICES,
                f"one of {', '.join(CHOICES)}",
            ),
            "top_k": (
                1 <= config.top_k <= drafted,
                f"1 to {drafted}, the number of drafted tokens",
            ),
            **cost_rules(config.held_out),
            **held_out_rules(config.held_out),
            "held_out.max_new_tokens": (config.held_out.max_new_tokens > 1, "2 or more"),
            "held_out.temperature": (
                RULES["temperature"].fits(config.held_out.temperature),
                RULES["temperature"].expected,
            ),
            "assumed_tokens": (config.assumed_tokens >= 0, "1 or more, or 0 if unknown"),
            "assumed_supervised": (
                0 < config.assumed_supervised <= 1,
                "a share above 0 and at most 1",
            ),
        },
    )


def allowed_caches(config: HeadJobConfig) -> tuple[Sequence[str], str]:
    """Return the values of states.cache that a job allows, and the reason for fewer, or ""."""
    if config.parallel.kind in SHARDED_WEIGHTS:
        return CACHES[:1], _SHARED.format(kind=config.parallel.kind)
    return (CACHES[:2], " with data.domains") if config.data.domains else (CACHES, "")


def choice_rules(
    config: HeadJobConfig, kind: HeadKind, reads_tokens: bool
) -> dict[str, tuple[bool, str]]:
    """Return the rules for the loss and the store: key -> (validity of its value, expected values).

    reads_tokens: see `HeadKind`.
    All ranks run a sharded target together, so no rank can skip a forward, as a store does, or
    continue its texts row by row.
    """
    losses: Sequence[str] = HEAD_LOSSES
    caches, reason = allowed_caches(config)
    shared = ""
    if config.parallel.kind in SHARDED_WEIGHTS:
        losses = [name for name in HEAD_LOSSES if name != CONTINUATIONS]
        shared = _SHARED.format(kind=config.parallel.kind)
    elif kind.computes_states:
        losses = [name for name in HEAD_LOSSES if name != CONTINUATIONS]
        shared = " with this head, which reads the target's states of the text's own tokens"
    return {
        **on_policy_rules(config, reads_tokens),
        **head_loss_rules(
            config.loss,
            losses,
            shared,
            config.data.max_length,
            reads_tokens,
            kind.reads_context,
            kind.predicts_states,
        ),
        "states.cache": (config.states.cache in caches, f"one of {', '.join(caches)}{reason}"),
        "states.fill": (
            not config.states.fill or config.states.cache == "disk",
            "false without states.cache=disk",
        ),
    }


def layers_rule(config: HeadJobConfig, num_layers: int) -> tuple[bool, str]:
    """Return the rule of the layers that heads share: the validity of the value, and what fits."""
    layers = config.states.layers
    if config.states.cache != "disk":
        return not layers, "[] without states.cache=disk"
    if num_continued_tokens(config.loss):
        return not layers, f"[] with loss.name={CONTINUATIONS}, which keeps tokens beside states"
    fits = all(0 <= layer <= num_layers for layer in layers)
    return fits, f"layers from 0, the target's embedding, to {num_layers}, its final norm"


def on_policy_rules(config: HeadJobConfig, reads_tokens: bool) -> dict[str, tuple[bool, str]]:
    """Return the rules of on-policy rows: key -> (validity of its value, expected values)."""
    options, loss = config.on_policy, config.loss
    temperature = RULES["temperature"]
    refused = ""
    if not reads_tokens:
        refused = "with this head, none of whose predictions reads a token that it drafts"
    elif trained_depths(loss) == 1:
        refused = "with loss.train_depths=1, at which no prediction reads a drafted token"
    elif loss.name == CONTINUATIONS or CROSS_ENTROPY in parts_of(loss):
        refused = (
            f"with loss.name={loss.name}, which learns tokens of a text, and none follows the "
            f"head's own tokens. Use a loss against the target's distribution, such as forward_kl"
        )
    elif config.states.cache != "none":
        refused = (
            f"with states.cache={config.states.cache}, as the head drafts other tokens in every "
            f"step, whose states no store has. Use states.cache=none"
        )
    elif config.parallel.kind in SHARDED_WEIGHTS:
        refused = (
            f"with parallel.kind={config.parallel.kind}, as the ranks of a sharded target cannot "
            f"read different drafts. Use ddp, zero1 or zero2"
        )
    share = f"0 (off) {refused}" if refused else "a share from 0 (off) to 1"
    return {
        "on_policy.share": (0 <= options.share <= 1 and not (options.share and refused), share),
        **schedule_rules(options),
        "on_policy.temperature": (temperature.fits(options.temperature), temperature.expected),
    }


def check_start(target_folder: Path, head_folder: Path) -> None:
    """Check the head to continue: sizes and tokenizer of the target, which may have new weights.

    Prints a note if the head's card names other weights. Raises UserError if the head does not fit.
    """
    check_fits(target_folder, head_folder, any_target=True)
    if has_tokenizer(head_folder):
        check_same_tokenizer(target_folder, head_folder, "Use a head for the target's tokenizer.")
    card = head_folder / CARD
    expected = read_json(card).get("target_hash") if card.is_file() else None
    if not is_rank() and expected not in (None, hash_input(target_folder)):
        print(
            f"note: {head_folder} was trained for a target with the hash {expected[:12]}, other "
            f"weights than those of {target_folder}, on which its training continues"
        )


def check_same_target(run_folder: RunFolder, target_folder: Path) -> None:
    """Raise UserError if this run's checkpoints belong to other weights of the target."""
    before = run_folder.manifest.get("inputs", {}).get(str(target_folder))
    if before is None or not (run_folder.path / "checkpoints").exists():
        return
    now = hash_input(target_folder)
    if now != before:
        raise UserError(
            f"{run_folder.path} was started with another target: {target_folder} had the hash "
            f"{before[:12]} and now has {now[:12]}. A head only works with its target. "
            f"Choose another output_dir=, or delete the folder to start over"
        )
