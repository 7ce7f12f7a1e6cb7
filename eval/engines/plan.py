"""Which engines, methods and drafters a run measures, and which it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decoding.drafters.chain import ChainDrafter
from decoding.errors import UserError, without_stop
from decoding.models.draft_vocabulary import draft_vocab_size
from decoding.models.folder import is_gguf
from eval.config import EvalConfig
from eval.measure.records import AUTOREGRESSIVE, Condition
from eval.measure.setup import Loaded
from jobs.drafters import CONTROL
from serving.engines.conversion import llama_server
from serving.engines.heads import PARD, ServedHead, served_head
from serving.engines.registry import ENGINES, OURS, python_of

DRAFT_LENGTH = 4  # drafted tokens of a round where num_draft_tokens is empty
DRAFT_MODEL = "draft_model"
GREEDY, TOKEN = "greedy", "token"
LLAMA_CPP = "llama_cpp"  # which also needs a program outside of Python


@dataclass(frozen=True)
class EngineArm:
    """One way to decode in one engine, in a process of its own."""

    engine: str
    method: str = AUTOREGRESSIVE
    drafter: str = ""  # its name in the tables
    num_draft_tokens: int = 0

    @property
    def loads_drafter(self) -> bool:
        """Whether the engine reads a drafter's folder."""
        return self.drafter not in ("", CONTROL)


@dataclass(frozen=True)
class Trial:
    """One decoding of every prompt by an arm."""

    arm: EngineArm
    # greedy, or at temperatures above 0 token | point_mass; without drafts `token` only samples
    rule: str
    ignore_eos: bool


@dataclass(frozen=True)
class EnginePlan:
    """The arms of a run, and sentences on the drafters that an engine does not run."""

    arms: list[EngineArm]
    folders: dict[str, Path]  # drafter -> its folder
    not_run: list[str]

    @property
    def engines(self) -> list[str]:
        """Names of the engines besides ours."""
        return [name for name in dict.fromkeys(arm.engine for arm in self.arms) if name != OURS]

    def trials(self, cfg: EvalConfig, condition: Condition) -> list[Trial]:
        """Return the decodings of each batch under a condition, our own autoregressive one first.

        Acceptance is compared on texts that no stop token ends, so drafters run once more with stop
        tokens ignored, in the engine and in ours by the engine's rule.
        """
        greedy, ignored = condition.temperature == 0, not cfg.stop_at_eos

        def trial(arm: EngineArm, rule: str, ignore_eos: bool) -> Trial:
            return Trial(arm, GREEDY if greedy else rule, ignore_eos)

        own = [EngineArm(OURS), *(arm for arm in self.arms if arm.engine == OURS)]
        found = [trial(arm, TOKEN, ignored) for arm in own]
        for arm in self.arms:
            if arm.engine == OURS or not _runs(arm, condition):
                continue
            rule = ENGINES[arm.engine].rule if arm.drafter else TOKEN
            found.append(trial(arm, rule, ignored))
            if arm.loads_drafter:
                ours = dataclasses.replace(arm, engine=OURS)
                found += [trial(arm, rule, True), trial(ours, rule, True)]
        return list(dict.fromkeys(found))


def _runs(arm: EngineArm, condition: Condition) -> bool:
    """Return whether an engine runs an arm under a condition."""
    if arm.method == AUTOREGRESSIVE:
        return True
    engine = ENGINES[arm.engine]
    fits_batch = condition.batch_size == 1 or engine.drafts_batches
    return fits_batch and (condition.temperature == 0 or bool(engine.rule))


def engine_names(cfg: EvalConfig) -> list[str]:
    """Return the names in `engine`, which is one name or a list."""
    return [cfg.engine] if isinstance(cfg.engine, str) else [str(name) for name in cfg.engine]


def check_engines(cfg: EvalConfig) -> None:
    """Raise UserError for an unknown engine, and for settings that other engines do not have."""
    names, known = engine_names(cfg), [OURS, *ENGINES]
    if not names or set(names) - set(known) or len(set(names)) != len(names):
        raise UserError(
            f"engine is {cfg.engine}, expected one of {', '.join(known)}, or a list of different "
            f"ones such as engine=[ours,vllm]."
        )
    for key in ("engine_python", "engine_target"):
        if unknown := vars(cfg)[key].keys() - ENGINES.keys():
            raise UserError(
                f"{key} has {', '.join(sorted(unknown))}, expected the name of an engine: "
                f"{', '.join(ENGINES)}."
            )
    for name, path in given_targets(cfg).items():
        if not path.exists():
            raise UserError(
                f"engine_target.{name} is {path}, which does not exist. Name the target in the "
                f"format of {name}, or leave it empty: the target is then converted."
            )
    if is_gguf(cfg.target.path):
        unfit = [one for one in names if one not in (OURS, LLAMA_CPP, *given_targets(cfg))]
        if unfit:
            raise UserError(
                f"engine has {', '.join(unfit)}, which reads no GGUF file, and target.path is "
                f"{cfg.target.path}. Use engine=[ours,llama_cpp], or convert the file to a folder: "
                f"python scripts/from_gguf.py."
            )
    if names == [OURS]:
        return
    for key, off in (
        ("min_p", 0.0),
        ("repetition_penalty", 1.0),
        ("allowed", ""),
        ("stop_strings", []),
        ("max_seconds", 0.0),
    ):
        if vars(cfg)[key] != off:
            raise UserError(
                f"{key} is {vars(cfg)[key]}, which only our own loop has. Remove it, or set "
                f"engine=ours."
            )
    if cfg.benchmark.stop_strings:
        raise UserError(
            f"benchmark.stop_strings is {cfg.benchmark.stop_strings}, which only our own loop has. "
            f"Set benchmark.stop_strings=[], or engine=ours."
        )


def find_engines(cfg: EvalConfig) -> None:
    """Raise UserError with the commands that install the missing engines of `engine`, if any."""
    missing = []
    for name in engine_names(cfg):
        if name == OURS:
            continue
        try:
            python_of(name, cfg.engine_python)
            if name == LLAMA_CPP:
                llama_server()
        except UserError as error:
            missing.append(str(error))
    if missing:
        raise UserError("\n".join(missing))


def given_targets(cfg: EvalConfig) -> dict[str, Path]:
    """Return the engines of a run that decode another file of the target, and that file."""
    given = {name: cfg.engine_target.get(name) for name in engine_names(cfg)}
    return {name: Path(path) for name, path in given.items() if path}


def plan_engines(cfg: EvalConfig, loaded: Loaded) -> EnginePlan:
    """Return the arms of all engines that a run names.

    Raises UserError if none of them measures any of the drafters that it names.
    """
    others = [name for name in engine_names(cfg) if name != OURS]
    if not others:
        return EnginePlan([], {}, [])
    methods, not_run = _methods(loaded, others)
    named = loaded.bench.drafters.keys() - {CONTROL}
    if named and not methods and OURS not in engine_names(cfg):
        raise UserError(
            f"engine is {cfg.engine}, which measures none of the drafters. Add ours to it, or "
            f"remove them: {'; '.join(map(without_stop, not_run))}"
        )
    any_length, arms = cfg.num_draft_tokens or [DRAFT_LENGTH], list[EngineArm]()
    for engine in engine_names(cfg):
        arms.append(EngineArm(engine))
        for name, head in methods.items():
            if engine == OURS or head.method in (DRAFT_MODEL, *ENGINES[engine].heads):
                lengths = [head.num_draft_tokens] if head.num_draft_tokens else any_length
                arms += [EngineArm(engine, head.method, name, n) for n in lengths]
            else:
                not_run.append(f"{name} in {engine}: it does not run `{head.method}`")
        if CONTROL in loaded.bench.drafters:
            arms += [EngineArm(engine, "ngram", CONTROL, n) for n in any_length]
    batched = max(cfg.batch_sizes) > 1
    not_run += [
        f"drafters in {engine} at batch sizes above 1: it drafts for one prompt at a time"
        for engine in others
        if batched and not ENGINES[engine].drafts_batches
    ]
    not_run += [
        f"drafters in {engine} at temperatures above 0: its rule for sampled drafts is unknown"
        for engine in others
        if max(cfg.temperatures) > 0 and not ENGINES[engine].rule
    ]
    not_run += [
        f"the target itself in {engine}: it decodes {path.name}, another model, whose texts differ"
        for engine, path in given_targets(cfg).items()
    ]
    folders = {name: loaded.folders[name][0] for name in methods}
    return EnginePlan(arms, folders, not_run)


def _methods(loaded: Loaded, engines: Sequence[str]) -> tuple[dict[str, ServedHead], list[str]]:
    """Return how engines run each drafter that one of them runs, and sentences on the others.

    engines: names of the engines besides ours.
    """
    heads = {kind for engine in engines for kind in ENGINES[engine].heads}
    methods: dict[str, ServedHead] = {}
    not_run: list[str] = []
    folders: list[Path] = []
    for name, drafter in loaded.bench.drafters.items():
        if name == CONTROL:
            continue
        folder = loaded.folders.get(name, (None, ""))[0]
        head: ServedHead | None = None
        try:
            if type(drafter) is ChainDrafter:
                head = ServedHead(DRAFT_MODEL)
            elif heads and folder is not None:
                head = served_head(drafter, folder, loaded.bench.target.num_layers)
        except UserError as error:
            not_run.append(f"{name}: {error}")
            continue
        if folder is None or head is None:
            not_run.append(f"{name}: only our own loop runs this kind of drafter")
        elif head.method in (DRAFT_MODEL, PARD) and (size := draft_vocab_size(folder)):
            not_run.append(
                f"{name}: only our own loop reads its draft vocabulary of {size:,} tokens. `python "
                f"scripts/full_vocabulary.py {folder} COPY` makes a drafter for the others"
            )
        elif folder in folders:
            not_run.append(f"{name}: engines measure its model under another entry")
        else:
            methods[name] = head
            folders.append(folder)
    return methods, not_run


def describe_arms(arms: Sequence[EngineArm]) -> str:
    """Return `vllm autoregressive, vllm draft_model mine 4` for the plan of a dry run."""
    drafts = {arm: f" {arm.drafter} {arm.num_draft_tokens}" if arm.drafter else "" for arm in arms}
    return ", ".join(f"{arm.engine} {arm.method}{drafts[arm]}" for arm in arms)
