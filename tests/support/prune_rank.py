"""Score and cut a small target in one rank: `python -m tests.support.prune_rank SPEC`.

SPEC is a JSON list of the arguments of `run`. Each rank writes FOLDER/rank<N>.json with the removal
order, the bytes of its shard and the student's acceptance, and FOLDER/rank<N>.safetensors with the
scores and the student.
"""

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from distill.config import ImportanceConfig, PruneConfig
from distill.prune import importance
from distill.prune.context import SourceModel
from distill.prune.cut import cut_model
from distill.prune.job import build_context
from distill.prune.modes import get_removal_order, get_scores
from distill.shapes import student_config
from jobs.config import ParallelConfig, TargetConfig
from tests.support import forks
from tests.support.training_rank import local_bytes
from training.config import DataConfig, StudentConfig

SHAPE = StudentConfig(
    num_hidden_layers=2, hidden_size=16, num_attention_heads=2, num_key_value_heads=1
)


def run(target: str, folder: str, kind: str, sequences: int = 17) -> dict[str, Any]:
    """Score and cut the target, write this rank's files, and return its report.

    kind: `parallel.kind`. Two ranks share the default of 17 sequences unequally.
    """
    place = Path(folder)
    config = PruneConfig(
        job="distill.prune",
        target=TargetConfig(path=target, device="cpu"),
        data=DataConfig(
            chats=["embedded:chats"],
            held_out_chats=["embedded:held_out_chats"],
            max_length=128,
            max_samples=60,
        ),
        importance=ImportanceConfig(
            sequences=sequences,
            greedy_sequences=3,
            probe_sequences=2,
            cache_dir=str(place / "cache"),
        ),
        parallel=ParallelConfig(kind=kind),
    )
    context = build_context(config, Path(target))
    source = SourceModel(context.teacher, Path(target))
    # The order comes first, as with cached scores, so the search runs the first forward pass.
    order = get_removal_order(context, source)
    scores = get_scores(context, source)
    shape = student_config(SHAPE, source.model.config)
    student = cut_model(
        source.model,
        importance.cut_by_scores(scores, order[-2:], shape, source.model.config),
        shape,
    )
    found = vars(scores) | {
        f"student.{name}": tensor for name, tensor in student.state_dict().items()
    }
    report = {
        "order": order,
        "bytes": sum(local_bytes(parameter) for parameter in source.model.parameters()),
        "acceptance": context.acceptance(student)["acceptance"],
    }
    place.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()},
        place / f"rank{context.parallel.rank}.safetensors",
    )
    (place / f"rank{context.parallel.rank}.json").write_text(json.dumps(report))
    context.parallel.close()
    return report


def run_ranks(target: Path, folder: Path, kind: str, ranks: int = 2) -> list[dict[str, Any]]:
    """Run the module in `ranks` processes, check that all succeed, and return their reports."""
    words = json.dumps([str(target), str(folder), kind])
    forks.run_ranks("tests.support.prune_rank", words, ranks=ranks, timeout=180)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    run(*json.loads(sys.argv[1]))
