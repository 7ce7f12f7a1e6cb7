"""Checks of a configuration of `distill.regenerate`, and the reading of its chats."""

from dataclasses import replace
from pathlib import Path

from decoding.errors import UserError
from decoding.models.load import BACKENDS
from decoding.values import check_settings
from distill.config import RegenerateConfig
from distill.regenerate.dialogues import ON_LENGTH, Dialogue, build_dialogues
from distill.regenerate.exchange import PATHS
from distill.regenerate.generate import SAMPLING, describe_drafter
from jobs.config_checks import Rule, refuse
from training.config import data_rules
from training.data.counts import Counts
from training.data.from_config import data_files, split_chats
from training.models.build import check_context, dtype_of, target_config

# Supported kinds of parallelism: each rank loads the target and answers a part of the chats.
KINDS = ("single", "ddp")


def check(config: RegenerateConfig) -> None:
    """Raise UserError for invalid values before the target is loaded."""
    target = target_config(config.target, weights=not config.server, decodes=True)
    dtype_of(config.target.dtype)
    check_settings(config, SAMPLING)
    data = config.data
    if data.domains:
        raise UserError(
            f"data.domains is {list(data.domains)}, expected none. Run this job once for each "
            f"domain"
        )
    rules = [
        *data_rules(data),
        ("target.backend", config.target.backend in BACKENDS, " or ".join(BACKENDS)),
        ("data.chats", bool(data.chats), "ShareGPT files: data.chats=[FILE]"),
        ("data.texts", not data.texts, "[], because plain text has no requests"),
        ("num_draft_tokens", config.num_draft_tokens >= 1, "1 or more"),
        ("batch_size", config.batch_size >= 1, "1 or more"),
        ("samples", config.samples >= 1, "1 or more"),
        (
            "samples",
            config.samples == 1 or config.temperature > 0,
            "1 at temperature 0, because greedy answers are equal",
        ),
        (
            "assumed_tokens_per_second",
            config.assumed_tokens_per_second >= 0,
            "more than 0, or 0 to measure the speed",
        ),
        ("on_length", config.on_length in ON_LENGTH, f"one of {', '.join(ON_LENGTH)}"),
        ("parallel.kind", config.parallel.kind in KINDS, " or ".join(KINDS)),
        (
            "max_new_tokens",
            config.max_new_tokens < data.max_length,
            f"less than data.max_length ({data.max_length}), the limit of requests and answers",
        ),
        *_server_rules(config),
    ]
    refuse(config, rules)
    describe_drafter(config)
    chat_files(config)
    check_context(config.target, data, target)


def _server_rules(config: RegenerateConfig) -> list[Rule]:
    """Return the rules for a server's settings, and for settings that exclude a server."""
    local = not config.server
    extended = local or config.server_extensions
    only = "0 with server_extensions=false, which leaves the field out"
    return [
        (
            "server",
            local or config.server.startswith(("http://", "https://")),
            "an address such as http://127.0.0.1:8000/v1",
        ),
        ("server_prompts", config.server_prompts in PATHS, " or ".join(PATHS)),
        ("server_requests", config.server_requests >= 1, "1 or more"),
        ("server_timeout_s", config.server_timeout_s > 0, "more than 0"),
        ("server_retries", config.server_retries >= 0, "0 or more"),
        ("server_retry_s", config.server_retry_s >= 0, "0 or more"),
        ("top_k", extended or not config.top_k, only),
        ("min_p", extended or not config.min_p, only),
        (
            "drafters",
            local or not config.drafters,
            "[] with a server, which drafts as it was started",
        ),
        (
            "parallel.kind",
            local or config.parallel.kind == "single",
            "single with a server, which is asked by one process",
        ),
    ]


def read_dialogues(config: RegenerateConfig) -> tuple[list[Dialogue], Counts]:
    """Return the dialogues of the chats to answer, and the counts of the input records."""
    chats, counts = split_chats(config.data, "train")
    limit = config.data.max_samples
    return build_dialogues(chats, config.samples, limit, config.drop_duplicates), counts


def chat_files(config: RegenerateConfig) -> list[Path]:
    """Return the files of the chats to answer. Raises UserError for a missing one."""
    return data_files(replace(config.data, held_out_chats=[], held_out_texts=[]))
