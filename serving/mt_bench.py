"""MT-bench's 80 questions of two turns, out of the cache of `datasets`; where they are not, the
error says how to get them.
"""

from typing import Any

from decoding.errors import UserError
from training.data.readers import Prompt

NAME = "mt_bench"
DATASET = "HuggingFaceH4/mt_bench_prompts"


def load_mt_bench() -> list[Prompt]:
    """Both turns of every question. Raises UserError where neither the cache nor a network has
    them.
    """
    import datasets

    try:
        records: Any = datasets.load_dataset(DATASET, split="train")
    # ConnectionError is an OSError, as is a file that is not found
    except (OSError, ValueError) as error:
        raise UserError(
            f"MT-bench ({DATASET}) is neither in the cache of `datasets` nor to be had from the "
            f"Hub: {' '.join(str(error).split())[:200]}. "
            'Give a file of it, such as FastChat\'s question.jsonl (lines of {"question_id", '
            '"category", "turns"}): prompts=FILE.jsonl or '
            "--eval_mt_bench=FILE.jsonl; or fetch it once where there is a network and copy "
            "~/.cache/huggingface: "
            f"python -c \"import datasets; datasets.load_dataset('{DATASET}')\""
        ) from error
    return [
        Prompt(f"{NAME}/{record['prompt_id']}", record["category"], list(record["prompt"]))
        for record in records
    ]
