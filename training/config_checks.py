"""Numbers that no training can go by: dotted key, whether its value is fine, and what is expected."""

import math

from jobs.config_checks import Rule

LONGEST_ROW = 2**20  # tokens


LARGEST_STEP = 10**9  # tokens


def loop_rules(key: str, loop: "LoopConfig") -> list[Rule]:
    """Of a training loop under a key."""
    optimizer, betas = loop.optimizer, loop.optimizer.betas
    others = loop.max_steps or loop.max_tokens or loop.max_seconds
    epochs = 1.0 if loop.max_epochs is None else loop.max_epochs
    return [
        (f"{key}.max_steps", loop.max_steps >= 0, "0 (no bound) or more"),
        (f"{key}.max_tokens", loop.max_tokens >= 0, "0 (no bound) or more"),
        (f"{key}.max_seconds", 0 <= loop.max_seconds < math.inf, "0 (no bound) or more seconds"),
        (
            f"{key}.max_epochs",
            0 < epochs < math.inf or (epochs == 0 and bool(others)),
            f"more than 0, or 0 (no bound) beside {key}.max_steps, max_tokens or max_seconds",
        ),
        (
            f"{key}.tokens_per_step",
            1 <= loop.tokens_per_step <= LARGEST_STEP,
            f"1 to {LARGEST_STEP:,}",
        ),
        (f"{key}.micro_batch_tokens", loop.micro_batch_tokens >= 1, "1 or more"),
        (f"{key}.eval_every", loop.eval_every >= 0, "0 (only at the end) or more"),
        (f"{key}.checkpoint_every", loop.checkpoint_every >= 0, "0 (only at the end) or more"),
        (f"{key}.keep", loop.keep >= 0, "0 or more"),
        (f"{key}.log_every", loop.log_every >= 1, "1 or more"),
        (f"{key}.optimizer.lr", 0 < optimizer.lr < math.inf, "more than 0"),
        (
            f"{key}.optimizer.betas",
            len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            "two numbers from 0 to below 1",
        ),
        (f"{key}.optimizer.weight_decay", 0 <= optimizer.weight_decay < math.inf, "0 or more"),
        (f"{key}.optimizer.warmup_steps", optimizer.warmup_steps >= 0, "0 or more"),
        (f"{key}.optimizer.final_lr", 0 <= optimizer.final_lr < math.inf, "0 or more"),
        (f"{key}.optimizer.clip", 0 <= optimizer.clip < math.inf, "0 (off) or more"),
    ]


def data_rules(data: "DataConfig") -> list[Rule]:
    """Of the data, under the key `data`."""
    return [
        ("data.max_bad", 0 <= data.max_bad <= 1, "a share from 0 to 1"),
        ("data.max_length", 2 <= data.max_length <= LONGEST_ROW, f"2 to {LONGEST_ROW:,}"),
        ("data.max_samples", data.max_samples >= 0, "0 (all) or more"),
        ("data.held_out_tokens", data.held_out_tokens >= 0, "0 (all) or more"),
    ]
