"""Dynamic mixing of domains against fixed shares, compared by the worst domain's acceptance.

    python scripts/bench/mixing.py target=$SHALLOW_DRAFT_DATA/models/chat24m \\
      texts=$SHALLOW_DRAFT_DATA/data/text

Four sides start from the same student and seeds, and train on the same number of rows: `fixed`
keeps shares by the size of the domains, `equal` keeps equal shares, `acceptance` starts as `fixed`
and follows the gap in held-out acceptance, `loss` the gap to the target's loss, as Sheared-LLaMA
does where no scaling law gives a reference. Parts such as `seeds=[0]` may run in separate calls:
with the same settings and `work`, the figures include all earlier parts.

The last fifth of every domain is held out. Every second piece of it moves the shares; the other
pieces, which no side uses, give the results. A document may have pieces in both halves, and of a
domain with one long document the end is held out.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from decoding.errors import UserError
from decoding.models.text.tokenizer import load_tokenizer
from distill.acceptance import AcceptanceSums, HeldOutAcceptance
from distill.student import build_student
from jobs.paths import resolve, resolve_model
from scripts.bench import common
from scripts.bench.common import BenchOptions
from scripts.bench.part_journal import PartJournal, paired_figures
from scripts.usage import run_script
from training.config import DataConfig, DomainConfig, StudentConfig
from training.data.from_config import sample_evenly
from training.data.mixture import MixedData
from training.data.packing import Sample
from training.data.readers import read_texts
from training.data.samples import text_samples
from training.models.build import dtype_of, load_causal_lm
from training.objectives import Distillation, TeacherStates, freeze
from training.optimizer_config import OptimizerConfig

SIDES = ("fixed", "equal", "acceptance", "loss")
_HELD_OUT = 0.2
_DOMAINS = [
    *(f"{n}=redpajama_sample/{n}" for n in "cc github book stackexchange wiki arxiv c4-rp".split()),
    "maths=gsm8k_train_qa.jsonl",
    "stories=tinystories_1000.jsonl",
    "articles=wikipedia_en_30.jsonl",
]


@dataclass
class Options(BenchOptions):
    target: str = "embedded:target"  # model folder of the teacher
    texts: str = "."  # folder that the domains' paths start from
    # NAME=PATH of a text file or folder
    domains: list[str] = field(default_factory=lambda: list(_DOMAINS))
    layers: int = 1  # layers of the student
    dtype: str = "bfloat16"  # dtype of student and teacher
    max_length: int = 512  # tokens per row
    tokens_per_step: int = 8192  # tokens per step
    steps: int = 400  # optimizer steps per run
    eval_every: int = 5  # steps between evaluations, after which shares may move
    rate: float = 1.0  # eta of both dynamic sides
    smoothing: float = 0.9  # smoothing of the gaps in acceptance
    floor_share: float = 0.01  # least share of a domain
    lr: float = 3e-3  # peak learning rate
    # largest share of bad records, which are skipped and counted: one of arxiv's twenty is empty
    max_bad: float = 0.1
    # tokens of a domain that move the shares; as many others give the results
    held_out_tokens: int = 4096
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])  # each runs every side once
    sides: list[str] = field(default_factory=lambda: [*SIDES])  # ways to mix
    cache_mb: int = 2000  # memory for the target's states on the training text
    work: str = "runs/bench"  # folder of finished parts; the same settings continue there
    name: str = "mixing"  # name of the results file


@dataclass
class Domain:
    """Samples of one domain: to train on, to move the shares, and for the results."""

    train: Sequence[Sample]
    steer: Sequence[Sample]
    judge: Sequence[Sample]


def read_domains(chosen: Options, tokenizer: Any) -> dict[str, Domain]:
    """Read every domain and split it in the order of its files.

    Raises UserError for a domain that is too small to split.
    """
    found = {}
    for entry in chosen.domains:
        name, _, path = entry.partition("=")
        file = resolve(str(resolve(chosen.texts) / path))
        documents, _ = read_texts([file], max_bad=chosen.max_bad)
        samples, account = text_samples(tokenizer, documents, chosen.max_length)
        cut = round(len(samples) * (1 - _HELD_OUT))
        held_out = samples[cut:]
        if cut == 0 or len(held_out) < 2:
            raise UserError(
                f"domain {name} ({path}) has {len(samples)} pieces of text, expected at least 8. "
                f"Use a larger file, or lower max_length."
            )
        halves = (sample_evenly(held_out[part::2], chosen.held_out_tokens) for part in (0, 1))
        found[name] = Domain(samples[:cut], *halves)
        print(f"{name} {account.line('texts')}", file=sys.stderr)
    return found


class Comparison:
    """Data, target and references that all runs share."""

    def __init__(self, chosen: Options) -> None:
        self.chosen = chosen
        self.domains = read_domains(chosen, load_tokenizer(resolve_model(chosen.target)))
        model = load_causal_lm(resolve_model(chosen.target), dtype_of(chosen.dtype))
        self.teacher = freeze(model).to(chosen.device)
        self.states = TeacherStates(self.teacher, chosen.cache_mb * 10**6)
        self.steer = {name: self._scorer(of.steer) for name, of in self.domains.items()}
        self.judge = {name: self._scorer(of.judge) for name, of in self.domains.items()}
        totals = score(self.teacher, self.steer)
        self.references = {name: of.loss / of.tokens for name, of in totals.items()}

    def _scorer(self, samples: Sequence[Sample]) -> HeldOutAcceptance:
        return HeldOutAcceptance(self.teacher, self.teacher, samples, self.chosen.max_length, 1.0)

    def mixture(self, side: str, seed: int) -> MixedData:
        """Return the mixed training rows of one side and seed."""
        chosen, references = self.chosen, self.references
        samples = {name: of.train for name, of in self.domains.items()}
        sizes = {name: float(sum(len(one.ids) for one in of)) for name, of in samples.items()}
        shares = dict.fromkeys(sizes, 1.0) if side == "equal" else sizes
        config = DataConfig(
            domains={n: DomainConfig(share=shares[n], reference=references[n]) for n in samples},
            mixing="fixed" if side == "equal" else side,
            mixing_rate=chosen.rate,
            mixing_smoothing=chosen.smoothing,
            floor_share=chosen.floor_share,
            max_length=chosen.max_length,
        )
        return MixedData(samples, config, chosen.tokens_per_step // chosen.max_length, seed)

    def measure(self, side: str, seed: int) -> dict[str, Any]:
        """Distil one student and measure its acceptance in every domain."""
        chosen = self.chosen
        torch.manual_seed(seed)
        shape, dtype = StudentConfig(num_hidden_layers=chosen.layers), dtype_of(chosen.dtype)
        student: Any = build_student(shape, self.teacher, dtype)
        student.to(chosen.device)
        data, evaluations = self.mixture(side, seed), 0

        def evaluate() -> dict[str, float]:
            nonlocal evaluations
            evaluations += 1
            # the last evaluation has the best score, so every run is judged at its end
            figures = {"score": float(evaluations)}
            for name, of in score(student, self.steer).items():
                figures[f"acceptance/{name}"] = of.acceptance
                figures[f"loss/{name}"] = of.loss / of.tokens
            return figures

        tokens, optimizer = chosen.tokens_per_step, OptimizerConfig(lr=chosen.lr)
        loop = common.loop_config(
            chosen.steps, tokens, chosen.dtype, optimizer, eval_every=chosen.eval_every
        )
        objective = Distillation(student, self.teacher, states=self.states)
        given = (objective, student, data, loop, chosen.device)
        common.train_steps(f"{side} {seed}", *given, evaluate=evaluate)
        alpha = {name: of.acceptance for name, of in score(student, self.judge).items()}
        return {
            "worst": min(alpha.values()),
            "mean": statistics.mean(alpha.values()),
            "by_domain": alpha,
            "shares": data.shares,
            "rows": data.used,
        }


def score(student: Any, held_out: dict[str, HeldOutAcceptance]) -> dict[str, AcceptanceSums]:
    """Return each domain's sums over its held-out text, with the student's current weights."""
    for of in held_out.values():
        of.student = student
    return {name: of.totals() for name, of in held_out.items()}


def main() -> None:
    """Measure every side, and write the results after each."""
    chosen = common.read_options(Options, sides=SIDES)
    comparison, journal = Comparison(chosen), PartJournal(chosen.work, chosen, ("seeds", "sides"))
    for seed in chosen.seeds:
        for side in chosen.sides:
            found = journal.figures({"side": side, "seed": seed}, comparison.measure, side, seed)
            means = f"worst {found['worst']:.4f} mean {found['mean']:.4f}"
            print(f"  {side} seed {seed}: {means}", file=sys.stderr)
            common.save(
                chosen.name, chosen, collect_figures(journal, comparison.references), show=False
            )
    compared = collect_figures(journal, comparison.references)
    print(json.dumps({key: compared[key] for key in compared if key.startswith("over_")}, indent=1))


def collect_figures(journal: PartJournal, references: dict[str, float]) -> dict[str, Any]:
    """Return every side's differences from fixed and from equal shares, and all runs."""
    runs: dict[str, dict[str, dict[str, Any]]] = {}  # side -> seed -> figures
    for part, found in journal.all():
        runs.setdefault(part["side"], {})[str(part["seed"])] = found
    over = {
        f"over_{other}": {
            side: paired_figures(mine, runs[other], ("worst", "mean"))
            for side, mine in runs.items()
            if side != other
        }
        for other in ("fixed", "equal")
        if other in runs
    }
    return {**over, "target_loss": references, "revisions": journal.revisions(), "runs": runs}


if __name__ == "__main__":
    run_script(main)
