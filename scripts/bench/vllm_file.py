"""Settings of a drafter with draft lengths by batch size, as a file that `vllm serve` reads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from decoding.drafters.chain import ChainDrafter
from decoding.drafters.prompt_lookup import PromptLookup
from decoding.errors import UserError
from decoding.interfaces import Drafter
from decoding.models.draft_vocabulary import draft_vocab_size
from jobs.paths import name_anywhere
from serving.engines.heads import P_EAGLE, served_head

KEY = "num_speculative_tokens_per_batch_size"
SIZES = (1, 3)  # tokens of an n-gram of our prompt lookup


def speculative_config(
    drafter: Drafter, folder: Path | None, table: Sequence[Sequence[int]], num_layers: int
) -> dict[str, Any]:
    """Return vLLM's speculative_config of a drafter.

    folder: the drafter's, None for one without. table: see draft_lengths.py. num_layers: the
    target's. Raises UserError for a drafter that vLLM does not run, and for a table without any
    drafts.
    """
    method, fixed = _method(drafter, folder, num_layers)
    longest = max(tokens for *_, tokens in table)
    if not longest:
        raise UserError(f"no number of rows gains from {drafter.name}, so there is nothing to set.")
    most = fixed or longest
    lengths = [[first, last, min(tokens, most)] for first, last, tokens in table]
    return method | {"num_speculative_tokens": most, KEY: lengths}


def _method(drafter: Drafter, folder: Path | None, num_layers: int) -> tuple[dict[str, Any], int]:
    """Return vLLM's method and model, and the number of tokens of every draft; 0: any number."""
    if type(drafter) is PromptLookup:
        least, most = SIZES
        return {"method": "ngram", "prompt_lookup_min": least, "prompt_lookup_max": most}, 0
    head = None
    if folder is not None and type(drafter) is not ChainDrafter:
        head = served_head(drafter, folder, num_layers)
    if folder is None or (head is None and type(drafter) is not ChainDrafter):
        raise UserError(f"vLLM does not run {drafter.name}.")
    model = {"model": name_anywhere(str(folder))}
    if head is None:
        if size := draft_vocab_size(folder):
            raise UserError(
                f"vLLM does not read the draft vocabulary of {size:,} tokens in {folder}. `python "
                f"scripts/full_vocabulary.py {folder} COPY` makes a drafter for it."
            )
        return {"method": "draft_model"} | model, 0
    if head.method == P_EAGLE:
        return {"method": "eagle3", "parallel_drafting": True} | model, head.num_draft_tokens
    return {"method": head.method} | model, head.num_draft_tokens


def format_file(speculative: dict[str, Any], target: str) -> str:
    """Return the YAML file. target: path or name on the Hub."""
    settings = {"speculative-config": speculative}
    body = yaml.safe_dump(settings, sort_keys=False, default_flow_style=None)
    return f"# vllm serve {name_anywhere(target)} --config THIS_FILE\n{body.rstrip()}"
