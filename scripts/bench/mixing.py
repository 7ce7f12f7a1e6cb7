"""Dynamic mixing against a fixed mixture: acceptance in the domain that the drafter drafts worst, after equal distillation.

    python scripts/bench/mixing.py target=$SHALLOW_DRAFT_DATA/models/chat24m texts=$SHALLOW_DRAFT_DATA/data/text

Three sides start from the same student, the same shares and the same seeds, and see as many rows: `fixed` keeps its shares, `acceptance` moves
them by the gap in held-out acceptance, `loss` by the gap to the target's own loss, as Sheared-LLaMA does where no scaling law gives a reference.
The last fifth of every domain is never trained on; half of it moves the shares, the other half, which no side ever sees, is what counts.
"""

import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from scipy.stats import t as student_t

from decoding.compatible import load_tokenizer
from decoding.errors import UserError
from distill.acceptance import HeldOutAcceptance, Totals
from distill.student import build_student
from scripts.bench.common import options, save
from training.config import DataConfig, DomainConfig, LoopConfig, OptimizerConfig, ParallelConfig, StudentConfig
from training.data import read_texts
from training.job_data import drawn_evenly
from training.loop import fit
from training.mixture import MixedData
from training.models import dtype_of, load_causal_lm
from training.objectives import Distillation, freeze
from training.packing import Sample
from training.parallel import Parallel
from training.paths import resolve
from training.samples import text_samples

SIDES = ("fixed", "acceptance", "loss")
_HELD_OUT = 0.2
_FOLDERS = ("cc", "github", "book", "stackexchange", "wiki", "arxiv", "c4-rp")
_FILES = {"maths": "gsm8k_train_qa.jsonl", "stories": "tinystories_1000.jsonl", "articles": "wikipedia_en_30.jsonl"}
_DOMAINS = [f"{name}=redpajama_sample/{name}" for name in _FOLDERS] + [
    f"{name}={file}" for name, file in _FILES.items()
]


@dataclass
class Options:
    target: str = "embedded:target"  # model folder of the teacher
    texts: str = "."  # folder that the domains' paths start from
    domains: list[str] = field(default_factory=lambda: list(_DOMAINS))  # NAME=PATH of a text file or folder
    start: str = "tokens"  # shares that every side starts with: tokens (by the size of the domain) | equal
    layers: int = 1  # layers of the student
    dtype: str = "bfloat16"  # of student and teacher
    max_length: int = 512  # tokens a row
    tokens_per_step: int = 8192  # tokens a step
    steps: int = 400  # optimizer steps a run
    eval_every: int = 20  # steps between evaluations, after which shares may move
    rate: float = 1.0  # eta of both dynamic sides
    smoothing: float = 0.9  # of the gaps in acceptance
    floor_share: float = 0.01  # least share of a domain
    lr: float = 3e-3  # peak learning rate
    max_bad: float = 0.1  # share of bad records that is skipped and counted: one of arxiv's twenty has no text
    held_out_tokens: int = 8192  # of a domain, that move the shares; as many count
    seeds: int = 3  # runs of every side
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    name: str = "mixing"  # of the results file


@dataclass
class Domain:
    """Samples of one domain: to train on, to move the shares by, and to judge by."""

    train: list[Sample]
    steer: list[Sample]
    judge: list[Sample]


def read_domains(chosen: Options, tokenizer: Any) -> dict[str, Domain]:
    """Every domain's samples, in the order of its files, so that its last fifth is of other documents but for the one at the border."""
    found = {}
    for entry in chosen.domains:
        name, _, path = entry.partition("=")
        documents, _ = read_texts([resolve(str(resolve(chosen.texts) / path))], max_bad=chosen.max_bad)
        samples, account = text_samples(tokenizer, documents, chosen.max_length)
        cut = round(len(samples) * (1 - _HELD_OUT))
        held_out = samples[cut:]
        if cut == 0 or len(held_out) < 2:
            raise UserError(f"domain {name} ({path}) has {len(samples)} pieces of text, expected at least 10")
        steer, judge = (drawn_evenly(held_out[part::2], chosen.held_out_tokens) for part in (0, 1))
        found[name] = Domain(samples[:cut], steer, judge)
        print(f"{name} {account.line('texts')}", file=sys.stderr)
    return found


def mixture(chosen: Options, domains: dict[str, Domain], references: dict[str, float], mixing: str, seed: int) -> Any:
    """The rows of one run."""
    sizes = {name: sum(len(sample.ids) for sample in of.train) for name, of in domains.items()}
    shares = {name: float(size) if chosen.start == "tokens" else 1.0 for name, size in sizes.items()}
    config = DataConfig(
        domains={name: DomainConfig(share=shares[name], reference=references[name]) for name in domains},
        mixing=mixing,
        mixing_rate=chosen.rate,
        mixing_smoothing=chosen.smoothing,
        floor_share=chosen.floor_share,
        max_length=chosen.max_length,
    )
    rows_per_step = chosen.tokens_per_step // chosen.max_length
    return MixedData({name: of.train for name, of in domains.items()}, config, rows_per_step, seed)


def measure(
    chosen: Options, student: Any, teacher: Any, held_out: dict[str, list[Sample]]
) -> Callable[[], dict[str, Totals]]:
    """A function that gives every domain's totals with the student's present weights."""
    scored = {
        name: HeldOutAcceptance(student, teacher, samples, chosen.max_length, 1.0) for name, samples in held_out.items()
    }
    return lambda: {name: of.totals() for name, of in scored.items()}


def distilled(
    chosen: Options, teacher: Any, domains: dict[str, Domain], references: dict[str, float], mixing: str, seed: int
) -> dict[str, Any]:
    """One run: what the judge's half says of the student, and what was trained on."""
    torch.manual_seed(seed)
    student: Any = build_student(StudentConfig(num_hidden_layers=chosen.layers), teacher, dtype_of(chosen.dtype))
    student.to(chosen.device)
    steer = measure(chosen, student, teacher, {name: of.steer for name, of in domains.items()})
    judge = measure(chosen, student, teacher, {name: of.judge for name, of in domains.items()})
    data = mixture(chosen, domains, references, mixing, seed)
    looks = 0

    def evaluate() -> dict[str, float]:
        """The later the better: what is judged is the end of every run, not a checkpoint that one side may choose better."""
        nonlocal looks
        looks += 1
        figures = {"score": float(looks)}
        for name, of in steer().items():
            figures |= {f"acceptance/{name}": of.acceptance, f"loss/{name}": of.loss / of.tokens}
        return figures

    loop = LoopConfig(
        max_steps=chosen.steps,
        tokens_per_step=chosen.tokens_per_step,
        micro_batch_tokens=chosen.tokens_per_step,
        eval_every=chosen.eval_every,
        checkpoint_every=0,
        dtype=chosen.dtype,
        optimizer=OptimizerConfig(lr=chosen.lr),
    )
    title = f"{mixing} {seed}"
    with tempfile.TemporaryDirectory() as folder:
        parallel = Parallel(ParallelConfig(), chosen.device)
        fit(title, Distillation(student, teacher), student, data, loop, parallel, Path(folder), None, evaluate)
    alpha = {name: of.acceptance for name, of in judge().items()}
    figures = {"worst": min(alpha.values()), "mean": statistics.mean(alpha.values()), "by_domain": alpha}
    return figures | {"shares": data.shares, "rows": data.used}


def paired(ours: list[float], theirs: list[float]) -> dict[str, float | None]:
    """Mean difference over seeds with Student's 95 % interval of the paired differences; of one seed no interval is given."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, seeds = statistics.mean(differences), len(differences)
    if seeds < 2:
        return {"difference": mean, "low": None, "high": None}
    reach = float(student_t.ppf(0.975, seeds - 1)) * statistics.stdev(differences) / math.sqrt(seeds)
    return {"difference": mean, "low": mean - reach, "high": mean + reach}


def main() -> None:
    chosen = options(Options)
    if chosen.start not in ("tokens", "equal"):
        sys.exit(f"error: start is '{chosen.start}', expected tokens or equal")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = load_tokenizer(resolve(chosen.target))
    domains = read_domains(chosen, tokenizer)
    teacher = freeze(load_causal_lm(resolve(chosen.target), dtype_of(chosen.dtype))).to(chosen.device)
    own = measure(chosen, teacher, teacher, {name: of.steer for name, of in domains.items()})()
    references = {name: of.loss / of.tokens for name, of in own.items()}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(chosen.seeds):
        for side in SIDES:
            runs[side].append(distilled(chosen, teacher, domains, references, side, seed))
            print(
                f"  {side} seed {seed}: worst {runs[side][-1]['worst']:.4f} mean {runs[side][-1]['mean']:.4f}",
                file=sys.stderr,
            )
    over_fixed = {
        side: {
            key: paired([run[key] for run in runs[side]], [run[key] for run in runs["fixed"]])
            for key in ("worst", "mean")
        }
        for side in SIDES[1:]
    }
    figures = {"over_fixed": over_fixed, "target_loss": references, "runs": runs}
    save(chosen.name, chosen, figures, show=False)
    print(f"acceptance in the worst domain and on average, over fixed shares: {over_fixed}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
