"""Dynamic mixing against a fixed mixture: acceptance in the domain that the drafter drafts worst,
after equal distillation.

    python scripts/bench/mixing.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      texts=$SHALLOW_DRAFT_DATA/data/text

Four sides start from the same student and the same seeds, and see as many rows: `fixed` keeps
shares by the size of the domains, `equal` keeps equal ones, `acceptance` starts as `fixed` and
moves by the gap in held-out acceptance, `loss` so by the gap to the target's own loss, as
Sheared-LLaMA does where no scaling law gives a reference. Pieces such as `seeds=[0]` may be run one
by one: with the same settings and `work`, the figures are of all that was run so far. The last
fifth of every domain is never trained on; every second piece of it moves the shares, the others,
which no side ever sees, are what counts. Pieces of one document stand in both, and a domain of one
long document (a book) is held out by its end.
"""

import json
import logging
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.acceptance import AcceptanceSums, HeldOutAcceptance
from distill.student import build_student
from jobs.config import ParallelConfig
from jobs.paths import resolve
from scripts.bench.common import options, save
from scripts.bench.kept import Kept, paired
from training.config import DataConfig, DomainConfig, LoopConfig, StudentConfig
from training.data.from_config import drawn_evenly
from training.data.mixture import MixedData
from training.data.packing import Sample
from training.data.readers import read_texts
from training.data.samples import text_samples
from training.loop import fit
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, TeacherStates, freeze
from training.optimizer_config import OptimizerConfig
from training.parallel.strategy import Parallel

SIDES = ("fixed", "equal", "acceptance", "loss")
_HELD_OUT = 0.2
_FOLDERS = ("cc", "github", "book", "stackexchange", "wiki", "arxiv", "c4-rp")
_FILES = {
    "maths": "gsm8k_train_qa.jsonl",
    "stories": "tinystories_1000.jsonl",
    "articles": "wikipedia_en_30.jsonl",
}
_DOMAINS = [f"{name}=redpajama_sample/{name}" for name in _FOLDERS] + [
    f"{name}={file}" for name, file in _FILES.items()
]


@dataclass
class Options:
    target: str = "embedded:target"  # model folder of the teacher
    texts: str = "."  # folder that the domains' paths start from
    # NAME=PATH of a text file or folder
    domains: list[str] = field(default_factory=lambda: list(_DOMAINS))
    layers: int = 1  # layers of the student
    dtype: str = "bfloat16"  # of student and teacher
    max_length: int = 512  # tokens a row
    tokens_per_step: int = 8192  # tokens a step
    steps: int = 400  # optimizer steps a run
    eval_every: int = 5  # steps between evaluations, after which shares may move
    rate: float = 1.0  # eta of both dynamic sides
    smoothing: float = 0.9  # of the gaps in acceptance
    floor_share: float = 0.01  # least share of a domain
    lr: float = 3e-3  # peak learning rate
    # share of bad records that is skipped and counted: one of arxiv's twenty has no text
    max_bad: float = 0.1
    held_out_tokens: int = 4096  # of a domain, that move the shares; as many count
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # a run of every side each
    sides: list[str] = field(default_factory=lambda: [*SIDES])  # what is compared
    threads: int = 2  # CPU threads
    device: str = "cpu"  # cpu | cuda
    cache_mb: int = 2000  # memory for the target's states on the training text
    work: str = "runs/bench"  # folder of finished parts: the same settings go on from it
    name: str = "mixing"  # of the results file


@dataclass
class Domain:
    """Samples of one domain: to train on, to move the shares by, and to judge by."""

    train: list[Sample]
    steer: list[Sample]
    judge: list[Sample]


def read_domains(chosen: Options, tokenizer: Any) -> dict[str, Domain]:
    """Every domain's samples, in the order of its files, so that its last fifth is of other
    documents but for the one at the border.
    """
    found = {}
    for entry in chosen.domains:
        name, _, path = entry.partition("=")
        documents, _ = read_texts(
            [resolve(str(resolve(chosen.texts) / path))], max_bad=chosen.max_bad
        )
        samples, account = text_samples(tokenizer, documents, chosen.max_length)
        cut = round(len(samples) * (1 - _HELD_OUT))
        held_out = samples[cut:]
        if cut == 0 or len(held_out) < 2:
            raise UserError(
                f"domain {name} ({path}) has {len(samples)} pieces of text, expected at least 10"
            )
        steer, judge = (drawn_evenly(held_out[part::2], chosen.held_out_tokens) for part in (0, 1))
        found[name] = Domain(samples[:cut], steer, judge)
        print(f"{name} {account.line('texts')}", file=sys.stderr)
    return found


def mixture(
    chosen: Options, domains: dict[str, Domain], references: dict[str, float], side: str, seed: int
) -> Any:
    """The rows of one run."""
    sizes = {name: sum(len(sample.ids) for sample in of.train) for name, of in domains.items()}
    shares = {name: 1.0 if side == "equal" else float(size) for name, size in sizes.items()}
    config = DataConfig(
        domains={
            name: DomainConfig(share=shares[name], reference=references[name]) for name in domains
        },
        mixing="fixed" if side == "equal" else side,
        mixing_rate=chosen.rate,
        mixing_smoothing=chosen.smoothing,
        floor_share=chosen.floor_share,
        max_length=chosen.max_length,
    )
    rows_per_step = chosen.tokens_per_step // chosen.max_length
    return MixedData({name: of.train for name, of in domains.items()}, config, rows_per_step, seed)


@dataclass
class Teacher:
    """The frozen target, and what it says of text, which is read once for all runs."""

    model: Any
    states: TeacherStates  # on the training text
    steer: dict[str, HeldOutAcceptance]  # by domain, of the half that moves the shares
    judge: dict[str, HeldOutAcceptance]  # of the half that counts


def read_teacher(chosen: Options, domains: dict[str, Domain]) -> Teacher:
    """The target of the options."""
    model = freeze(load_causal_lm(resolve(chosen.target), dtype_of(chosen.dtype))).to(chosen.device)

    def scored(samples: list[Sample]) -> HeldOutAcceptance:
        return HeldOutAcceptance(model, model, samples, chosen.max_length, 1.0)

    return Teacher(
        model,
        TeacherStates(model, chosen.cache_mb * 10**6),
        {name: scored(of.steer) for name, of in domains.items()},
        {name: scored(of.judge) for name, of in domains.items()},
    )


def measure(student: Any, held_out: dict[str, HeldOutAcceptance]) -> dict[str, AcceptanceSums]:
    """Every domain's totals with the student's present weights."""
    for of in held_out.values():
        of.student = student
    return {name: of.totals() for name, of in held_out.items()}


def distilled(
    chosen: Options,
    teacher: Teacher,
    domains: dict[str, Domain],
    references: dict[str, float],
    side: str,
    seed: int,
) -> dict[str, Any]:
    """One run: what the judge's half says of the student, and what was trained on."""
    torch.manual_seed(seed)
    student: Any = build_student(
        StudentConfig(num_hidden_layers=chosen.layers), teacher.model, dtype_of(chosen.dtype)
    )
    student.to(chosen.device)
    data = mixture(chosen, domains, references, side, seed)
    looks = 0

    def evaluate() -> dict[str, float]:
        """The later the better: what is judged is the end of every run, not a checkpoint that one
        side may choose better.
        """
        nonlocal looks
        looks += 1
        figures = {"score": float(looks)}
        for name, of in measure(student, teacher.steer).items():
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
    title = f"{side} {seed}"
    with tempfile.TemporaryDirectory() as folder:
        parallel = Parallel(ParallelConfig(), chosen.device)
        objective = Distillation(student, teacher.model, states=teacher.states)
        fit(title, objective, student, data, loop, parallel, Path(folder), None, evaluate)
    alpha = {name: of.acceptance for name, of in measure(student, teacher.judge).items()}
    figures = {
        "worst": min(alpha.values()),
        "mean": statistics.mean(alpha.values()),
        "by_domain": alpha,
    }
    return figures | {"shares": data.shares, "rows": data.used}


def main() -> None:
    chosen = options(Options)
    unknown = sorted({*chosen.sides} - {*SIDES})
    if unknown:
        sys.exit(f"error: sides has '{unknown[0]}', expected some of {', '.join(SIDES)}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    domains = read_domains(chosen, load_tokenizer(resolve(chosen.target)))
    kept, teacher = Kept(chosen.work, chosen, ("seeds", "sides")), read_teacher(chosen, domains)
    references = {
        name: of.loss / of.tokens for name, of in measure(teacher.model, teacher.steer).items()
    }
    for seed in chosen.seeds:
        for side in chosen.sides:
            told = (chosen, teacher, domains, references, side, seed)
            found = kept.figures({"side": side, "seed": seed}, distilled, *told)
            print(
                f"  {side} seed {seed}: worst {found['worst']:.4f} mean {found['mean']:.4f}",
                file=sys.stderr,
            )
            save(chosen.name, chosen, figures(kept, references), show=False)
    found = figures(kept, references)
    print(json.dumps({key: found[key] for key in found if key.startswith("over_")}, indent=1))


def figures(kept: Kept, references: dict[str, float]) -> dict[str, Any]:
    """Every side over fixed shares and over equal ones, paired over seeds, and the runs."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}  # side -> seed -> what was found
    for part, found in kept.all():
        runs.setdefault(part["side"], {})[str(part["seed"])] = found
    compared = {f"over_{other}": over(runs, other) for other in ("fixed", "equal") if other in runs}
    return {**compared, "target_loss": references, "revisions": kept.revisions(), "runs": runs}


def over(runs: dict[str, dict[str, dict[str, Any]]], other: str) -> dict[str, Any]:
    """Every side's acceptance less that of the other one, paired over seeds."""
    return {
        side: {
            key: paired(
                *({seed: one[key] for seed, one in of.items()} for of in (by_seed, runs[other]))
            )
            for key in ("worst", "mean")
        }
        for side, by_seed in runs.items()
        if side != other
    }


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
