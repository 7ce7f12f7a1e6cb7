"""`python -m distill.skip_search`: find the sub-layers to skip in self-speculative decoding.

The result configures `decoding.drafters.self_speculation` (Draft & Verify, Zhang et al. 2024, arXiv
2309.08168). The paper optimizes measured tokens per second by Bayesian optimization over a thousand
generations. Here one forward pass over the target's answers measures the acceptance of a set of
sub-layers, and measured costs give its predicted speedup. A greedy search adds the sub-layer with
the best predicted speedup up to the limit, and the best set on its path is written. A step
evaluates only the best sub-layers of the previous step, so a search takes a few hundred forward
passes.

Shapes: B answers, T tokens of the longest answer, N answer tokens, V vocabulary, C hidden size.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.costs.prediction import Costs, best_gamma
from decoding.costs.timing import rising, time_parts
from decoding.drafters.self_speculation import FILE, write_skips
from decoding.errors import UserError
from decoding.models.folder import refuse_file
from decoding.models.load import load_target
from decoding.models.native.model import NativeTarget
from decoding.models.native.skips import Skips
from decoding.models.text.tokenizer import load_tokenizer
from decoding.values import check_value
from distill.acceptance import sum_accepted
from distill.config import SkipSearchConfig
from jobs.config import refuse_parallel
from jobs.config_checks import refuse
from jobs.files import write_bytes, write_text
from jobs.job import job_main
from jobs.paths import resolve, resolve_model
from jobs.progress import ProgressBar
from jobs.protocol import Job, Run
from jobs.run_files import journal_bytes, read_journal_lines, read_object
from training.config import data_rules, held_out_rules
from training.data.packing import Sample
from training.held_out.answers import target_answers
from training.held_out.speedup import LONGEST_DRAFT
from training.models.build import refuse_own_code

_CHUNK = 1024
# Number of times that the costs are measured.
_WINDOWS = 5
KINDS = ("attention", "mlp")
SubLayer = tuple[str, int]  # kind and layer


@dataclass(frozen=True)
class SubLayerCosts:
    """Measured costs of the target and its sub-layers."""

    # number of new tokens -> forward pass of the complete target
    t_target_ms: dict[int, float]
    # one attention or MLP over one new token
    attention_ms: float
    mlp_ms: float
    # forward pass over one new token without any sub-layer
    bare_ms: float

    def draft_ms(self, skips: Skips) -> float:
        """Return the milliseconds of one draft step that skips these sub-layers."""
        saved_ms = len(skips.attention) * self.attention_ms + len(skips.mlp) * self.mlp_ms
        return max(self.bare_ms, self.t_target_ms[1] - saved_ms)

    def speedup(self, acceptance: float, skips: Skips) -> tuple[float, int]:
        """Return the best predicted speedup and its draft length.

        The speedup is E(gamma) t(1) / (gamma t_draft + t(gamma + 1)), where E(gamma) is the
        expected number of tokens per round. Overhead is not counted.
        """
        t_1 = self.t_target_ms[1]
        V = {n: self.t_target_ms[n] / t_1 for n in range(1, LONGEST_DRAFT + 2)}
        gamma, speedup = best_gamma([acceptance], Costs(self.draft_ms(skips) / t_1, V))
        return speedup, gamma


@dataclass(frozen=True)
class SearchStep:
    """One step of the search: the sub-layer that it adds, and the figures of the set so far."""

    kind: str
    layer: int
    acceptance: float
    speedup: float
    gamma: int

    @property
    def sub_layer(self) -> SubLayer:
        return self.kind, self.layer


class SkipSearch(Job[SkipSearchConfig]):
    """Run of distill.skip_search, which writes the sub-layers to skip."""

    artefact = FILE

    def __init__(self, config: SkipSearchConfig) -> None:
        super().__init__(config)
        check(config)

    def inputs(self) -> list[Path]:
        return [resolve_model(self.config.target.path), resolve(self.config.held_out.prompts)]

    def dry_run(self, run: Run) -> None:
        target, steps = load(self.config)
        sub_layers, candidates = 2 * target.num_layers, self.config.candidates
        forwards = sum(min(candidates, sub_layers - step) for step in range(1, steps))
        print(f"cost: about {sub_layers + forwards:,} forward passes over the target's answers")
        if not run.artefact.exists():  # a placeholder for dry runs of later stages
            given = {"target": self.config.target.path, "dry_run": True}
            write_skips(run.artefact, Skips(mlp=(target.num_layers - 1,)), given)

    def work(self, run: Run) -> None:
        config, (target, steps) = self.config, load(self.config)
        run.folder.write_manifest(run.inputs, {}, finished=False)
        answers = target_answers(run.inputs[0], load_tokenizer(run.inputs[0]), config)
        scorer = AnswerScorer(target, answers, config.held_out.temperature)
        costs = measure_sub_layers(target, answers[0].ids.tolist(), run.path / "costs.json")
        path = search(target, scorer, costs, steps, config.candidates, run.path / "search.jsonl")
        finish(config, run, path)


def run(config: SkipSearchConfig) -> Path:
    """Search, or resume a search, and return output_dir/skips.json."""
    return SkipSearch(config).run()


def check(config: SkipSearchConfig) -> None:
    """Raise UserError for invalid values before the target is loaded."""
    refuse_parallel(config.target)
    refuse_own_code(config.target)
    refuse(
        config,
        [
            *data_rules(config.data),
            ("max_skips", config.max_skips >= 0, "0 (all but two) or more"),
            ("candidates", config.candidates >= 1, "1 or more"),
            *((key, *rule) for key, rule in held_out_rules(config.held_out).items()),
        ],
    )
    for name in ("max_new_tokens", "temperature"):
        check_value(name, vars(config.held_out)[name], key=f"held_out.{name}")


def load(config: SkipSearchConfig) -> tuple[NativeTarget, int]:
    """Load the target. Returns it with the maximum number of sub-layers to skip."""
    folder = resolve_model(config.target.path)
    refuse_file(folder)  # llama.cpp runs all layers of a GGUF file
    target = load_target(
        folder,
        backend="native",
        dtype=config.target.dtype,
        device=config.target.device,
        max_length=config.data.max_length,
    )
    assert isinstance(target, NativeTarget)
    sub_layers = 2 * target.num_layers
    steps = min(config.max_skips or sub_layers - 2, sub_layers - 2)
    print(
        f"target: {target.num_layers} layers; at most {steps} of {sub_layers} sub-layers are "
        f"skipped"
    )
    return target, steps


def finish(config: SkipSearchConfig, run: Run, path: list[SearchStep]) -> None:
    """Write the set with the best predicted speedup on the path, and complete the manifest."""
    best = max(path, key=lambda step: step.speedup)
    skips = make_skips([step.sub_layer for step in path[: path.index(best) + 1]])
    figures = {"acceptance": best.acceptance, "speedup": best.speedup, "gamma": best.gamma}
    given = {"target": config.target.path, "temperature": config.held_out.temperature}
    write_skips(run.artefact, skips, given | figures)
    metrics = {"acceptance": best.acceptance, "predicted_speedup": best.speedup}
    run.folder.write_manifest(run.inputs, metrics, finished=True)
    print(
        f"skips {len(skips.attention)} attention and {len(skips.mlp)} MLP sub-layers: acceptance "
        f"{best.acceptance:.3f}, {best.speedup:.2f}x predicted at gamma={best.gamma}: "
        f"{run.artefact}"
    )
    if best.speedup <= 1:
        print("no set of sub-layers gives a speedup on this machine: use a separate drafter")


def search(
    target: NativeTarget,
    scorer: "AnswerScorer",
    costs: SubLayerCosts,
    steps: int,
    candidates: int,
    file: Path,
) -> list[SearchStep]:
    """Return the greedy path of `steps` sub-layers.

    candidates: number of sub-layers that a step evaluates. file: journal of the path, from which an
    interrupted search resumes. Raises UserError if the journal is damaged.
    """
    found = read_journal_lines(file, lambda values: SearchStep(**values))
    if found.wrong or found.torn:
        raise UserError(
            f"{file} is damaged: {(*found.wrong, 'its last line is incomplete')[0]}. Delete it to "
            f"start the search again"
        )
    path = found.records
    every = [(kind, layer) for kind in KINDS for layer in range(target.num_layers)]
    skipped = [step.sub_layer for step in path]
    ranked = [one for one in every if one not in skipped]
    with ProgressBar("skips", steps, len(path)) as bar:
        while len(path) < steps:
            evaluated = []
            for sub_layer in ranked[:candidates] if path else ranked:
                skips = make_skips([*skipped, sub_layer])
                acceptance = scorer.acceptance(skips)
                evaluated.append(
                    SearchStep(*sub_layer, acceptance, *costs.speedup(acceptance, skips))
                )
            best, *others = sorted(evaluated, key=lambda step: -step.speedup)
            path.append(best)
            skipped.append(best.sub_layer)
            write_bytes(file, journal_bytes(map(asdict, path)))
            order = [step.sub_layer for step in others]
            ranked = order + [one for one in every if one not in (*skipped, *order)]
            bar.update(len(path), f"acceptance {best.acceptance:.3f}  {best.speedup:.2f}x")
    return path


def make_skips(sub_layers: Sequence[SubLayer]) -> Skips:
    """Convert sub-layers to the set of layers to skip of each kind."""
    layers = {kind: sorted(layer for one, layer in sub_layers if one == kind) for kind in KINDS}
    return Skips(*map(tuple, layers.values()))


def measure_sub_layers(target: NativeTarget, prompt: list[int], file: Path) -> SubLayerCosts:
    """Measure the costs of the target and its sub-layers, or read them from `file`.

    Four models are timed: the complete target, and the target whose layers after the first lack
    attention, MLPs, or both. The speed of a machine changes from second to second, so the four are
    timed in turn several times, and the medians of their ratios to the complete target count. The
    cost of a kind of sub-layer is the mean of two savings, from the complete target and from the
    target without the other kind. The costs therefore add up to the measured total.
    """
    if file.is_file():
        return read_object(file, "Delete it to measure the costs again", _costs_of)
    layers = tuple(range(target.num_layers))[1:]
    views = [Skips(attention=layers), Skips(mlp=layers), Skips(attention=layers, mlp=layers)]
    paces, wider, shares = [], [], []
    for _ in range(_WINDOWS):
        widths = range(1, LONGEST_DRAFT + 2)
        complete = time_parts(target, None, prompt, widths=widths, repeats=6, warmup=1).t_target_ms
        paces.append(complete[1])
        wider.append([ms / complete[1] for ms in complete.values()])
        without = []
        for skips in views:
            target.open(1, len(prompt) + 2)
            cut = time_parts(target.partial(skips), None, prompt, widths=[1], repeats=6, warmup=1)
            without.append(cut.t_target_ms[1] / complete[1])
        shares.append(without)
    pace_ms, count = median(paces), max(1, len(layers))
    ratios = rising([median(column) for column in zip(*wider, strict=True)])
    t_target_ms = [pace_ms * ratio for ratio in ratios]
    step_ms = t_target_ms[0]
    no_attention, no_mlp, neither = (median(column) for column in zip(*shares, strict=True))
    attention_ms = step_ms * max(0.0, (1 - no_attention) + (no_mlp - neither)) / 2 / count
    mlp_ms = step_ms * max(0.0, (1 - no_mlp) + (no_attention - neither)) / 2 / count
    bare_ms = max(0.0, step_ms * neither - attention_ms - mlp_ms)
    costs = SubLayerCosts(dict(enumerate(t_target_ms, 1)), attention_ms, mlp_ms, bare_ms)
    write_text(file, json.dumps(asdict(costs), indent=1))
    return costs


def _costs_of(values: dict[str, Any]) -> SubLayerCosts:
    t_target_ms = {int(n): float(ms) for n, ms in values.pop("t_target_ms").items()}
    return SubLayerCosts(t_target_ms, **values)


class AnswerScorer:
    """Scorer of sets of sub-layers to skip: their acceptance rate on the target's answers.

    samples: prompts with the target's answers. Raises UserError if all answers are empty.
    """

    def __init__(self, target: NativeTarget, samples: list[Sample], temperature: float) -> None:
        self.samples, self.target, self.temperature = samples, target, temperature
        ids = [torch.from_numpy(sample.ids).long() for sample in samples]
        self._ids_BT = pad_sequence(ids, batch_first=True).to(target.device)
        answer_BT = pad_sequence([torch.from_numpy(one.mask) for one in samples], batch_first=True)
        # The token before predicts a token. The first one belongs to the prompt.
        self._predicts_BT = answer_BT.roll(-1, dims=1).to(target.device)
        if not answer_BT.any():
            raise UserError(
                "the target's answers to all held-out prompts are empty, expected tokens. Change "
                "held_out.prompts"
            )
        self._complete_NC = self._hidden(Skips())

    @torch.inference_mode()
    def _hidden(self, skips: Skips) -> Tensor:
        """Return the hidden states [N, C] that predict the answer tokens, without `skips`."""
        self.target.open(*self._ids_BT.shape)
        return self.target.partial(skips).features(self._ids_BT)[self._predicts_BT]

    @torch.inference_mode()
    def acceptance(self, skips: Skips) -> float:
        """Return the mean over tokens of sum_v min(p, q); at temperature 0, of equal argmaxes."""
        states_NC, total = self._hidden(skips), 0.0
        chunks = zip(states_NC.split(_CHUNK), self._complete_NC.split(_CHUNK), strict=True)
        for some_NC, complete_NC in chunks:
            q_NV, p_NV = (self.target.lm_head(one).float() for one in (some_NC, complete_NC))
            total += float(sum_accepted(p_NV, q_NV, self.temperature))
        return total / len(states_NC)


if __name__ == "__main__":
    job_main("distill.skip_search", SkipSearchConfig, run)
