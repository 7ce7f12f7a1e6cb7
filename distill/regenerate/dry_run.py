"""Dry run of `distill.regenerate`: its requests, tokens and hours."""

from pathlib import Path
from typing import Any

from decoding.engine import stop_tokens
from decoding.models.text.tokenizer import load_tokenizer
from distill.config import RegenerateConfig
from distill.regenerate.batches import OpenRequests, next_requests
from distill.regenerate.checks import read_dialogues
from distill.regenerate.dialogues import Account
from distill.regenerate.generate import PACE_TOKENS, AnswerGenerator
from distill.regenerate.server import ServerAnswers
from distill.regenerate.writer import list_broken_records
from jobs.amounts import add_planned_seconds, hours
from jobs.paths import resolve_model
from training.models.build import target_is_here


def dry_run(config: RegenerateConfig) -> None:
    """Print the numbers of requests and tokens, and the maximum time. Writes nothing.

    Without assumed_tokens_per_second, the speed of the target is measured on one batch, loaded or
    at its server.
    """
    dialogues, counts = read_dialogues(config)
    if not target_is_here(config.target, weights=not config.server):
        requests = sum(len(one.requests) for one in dialogues if not one.ended)
        print(
            f"would answer {requests:,} requests of {len(dialogues):,} chats; the number of tokens "
            f"is unknown"
        )
        print(f"note: {config.target.path} does not exist, so its tokenizer is missing")
        return
    folder = resolve_model(config.target.path, weights=not config.server)
    tokenizer = load_tokenizer(folder, config.target.trust_remote_code)
    pending = next_requests(dialogues, tokenizer, config)
    account = Account(
        counts.read * config.samples, skipped=list_broken_records(counts, config.samples)
    )
    for dialogue in dialogues:
        if dialogue.ended:
            account.add(dialogue)
    tokens_in = tokens_out = requests = 0
    for dialogue, request in pending:
        later = [message["content"] for turn in dialogue.requests[1:] for message in turn]
        room = config.data.max_length - len(request.ids)
        requests += len(dialogue.requests)
        tokens_in += len(request.ids) + sum(len(tokenizer(text)["input_ids"]) for text in later)
        tokens_out += min(len(dialogue.requests) * config.max_new_tokens, room)
    print(
        f"would answer {requests:,} requests of {len(pending):,} chats (of {account.input:,}, "
        f"including samples)"
    )
    for line in list(account.lines())[1:]:
        print(line)
    print(f"tokens: {tokens_in:,} in (turns of the chats), at most {tokens_out:,} out")
    if not pending:
        return
    pace, how = config.assumed_tokens_per_second, "as assumed"
    if not pace:
        pace, how = _measure(config, folder, tokenizer, pending), "measured on one batch"
    print(
        f"at {pace:,.0f} tokens/s ({how}): at most {hours(tokens_out / pace)}, written to "
        f"{config.output_dir}"
    )
    add_planned_seconds(tokens_out / pace)


def _measure(
    config: RegenerateConfig, folder: Path, tokenizer: Any, pending: OpenRequests
) -> float:
    """Return the tokens per second of one batch of requests of middle length."""
    size = config.server_requests if config.server else config.batch_size
    batch = [request for _, request in pending[len(pending) // 2 :][:size]]
    if not config.server:
        return AnswerGenerator(config, folder, tokenizer).tokens_per_second(batch)
    server = ServerAnswers(config, tokenizer, stop_tokens(folder, tokenizer))
    server.connect()
    return server.tokens_per_second(batch, min(PACE_TOKENS, config.max_new_tokens))
