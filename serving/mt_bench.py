"""MT-bench's 80 questions of two turns, read from the cache of `datasets` or the Hub."""

from typing import Any

from decoding.errors import UserError
from training.data.readers import Prompt

NAME = "mt_bench"
DATASET = "HuggingFaceH4/mt_bench_prompts"


def load_mt_bench() -> list[Prompt]:
    """Return the questions with both turns. Raises UserError if neither cache nor Hub has them."""
    import datasets

    try:
        records: Any = datasets.load_dataset(DATASET, split="train")
    # ConnectionError and FileNotFoundError are OSErrors.
    except (OSError, ValueError) as error:
        raise UserError(
            f"MT-bench ({DATASET}) is neither in the cache of `datasets` nor available from the "
            f"Hub: {' '.join(str(error).split())[:200]}. Use a local file such as FastChat's "
            f"question.jsonl (prompts=FILE.jsonl or --eval_mt_bench=FILE.jsonl), or run python -c "
            f"\"import datasets; datasets.load_dataset('{DATASET}')\" on a machine with network "
            f"access and copy its ~/.cache/huggingface."
        ) from error
    return [
        Prompt(f"{NAME}/{record['prompt_id']}", record["category"], list(record["prompt"]))
        for record in records
    ]
