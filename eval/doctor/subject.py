"""The subject of an examination: target, drafter, its card and training, prompts and chats."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from decoding.devices import device_of
from decoding.drafters.build import choose_drafter, with_target_settings
from decoding.drafters.registry import head_of
from decoding.engine import stop_tokens
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target
from decoding.models.folder import CARD, hash_input, read_json, refuse_file
from decoding.models.load import load_target
from decoding.models.text.compatible import check_same_tokenizer
from decoding.models.text.tokenizer import has_tokenizer, load_tokenizer
from decoding.rounds.settings import Settings
from decoding.values import quote
from eval.doctor.config import DoctorConfig, drafter_name
from eval.doctor.engine_run import read_engine_run
from eval.doctor.forward import Predictions
from eval.doctor.serving import Served, serve
from eval.engines.records import EngineRecord
from eval.measure.benchmarks import Benchmark, load_benchmark, rejected
from heads.registry import kind_in
from jobs.config import TargetConfig
from jobs.paths import is_here, resolve, resolve_model
from jobs.saved_config import read_config, upgrade_config
from training.config import DataConfig
from training.data.chat import render_prompt, render_text
from training.data.from_config import split_chats
from training.data.readers import Chat
from training.heads.kind import HeadKind
from training.models.build import load_causal_lm
from training.objectives import freeze

LEAST_PROMPTS = 4
TRAININGS = ("distill.train", "heads.train", "recurrent_drafting.train")
EXACT = ("float32", "float64")
# fields of a card that probes read, with their types
CARD_FIELDS = {
    "target": str,
    "target_hash": str,
    "drafter_hash": str,
    "acceptance": dict,
    "data": dict,
}


class Conditions(NamedTuple):
    """Conditions of serving; None: those of the configuration."""

    usual: bool = False  # the system prompt and the template of the training
    temperature: float | None = None
    dtype: str | None = None
    target: Path | None = None
    chain: bool = False  # a head's chain, instead of its tree


AS_SERVED = Conditions()


@dataclasses.dataclass(frozen=True)
class Rendering:
    """How prompts become tokens."""

    system: str
    tokenizer: Any
    template: str  # auto, or the name of a template of ours


class Subject:
    """Lazily loaded parts of an examination, each of which is computed once."""

    def __init__(self, config: DoctorConfig) -> None:
        """Read everything but the weights. Raises UserError for parts that are missing or unfit."""
        self.config = config
        self.target_folder = resolve_model(config.target.path)
        self.choice = choose_drafter(dict(config.drafter))
        if "folder" not in self.choice.options:
            raise UserError(
                f"drafter={drafter_name(config)} has no folder, expected the folder of a model or "
                f"of a head. Drafters without weights have nothing to examine; eval.run measures "
                f"them."
            )
        self.folder = Path(self.choice.options["folder"])
        for folder in (self.target_folder, self.folder):
            refuse_file(folder)  # both also run as training runs them
        self.tokenizer = load_tokenizer(self.target_folder)
        self.card = _read_card(self.folder / CARD)
        self.kind: HeadKind | None = None
        if head_of(self.folder):
            layers = read_json(self.target_folder / "config.json").get("num_hidden_layers")
            layout = self.choice.options.get("layout")
            self.kind = kind_in(self.folder).assume(layout, layers or 0)
        if self.kind is None:
            check_same_tokenizer(self.target_folder, self.folder)
        self.training = self._read_training()
        if not config.drift:
            self._check_prompts()
        self.engine_records: list[EngineRecord] = []
        if config.engine_run:
            self.engine_records = read_engine_run(
                Path(config.engine_run), self.folder, self.target_hash
            )
        self.predictions: dict[str, Predictions] = {}
        self._served: dict[Conditions, Served] = {}
        self._targets: dict[tuple[Path, str], Target] = {}
        self._drafters: dict[tuple[str, bool], Drafter] = {}

    # ----------------------------------------------------------------------------------- the files

    @cached_property
    def benchmark(self) -> Benchmark:
        """Return the prompts to decode."""
        config = self.config
        return load_benchmark(
            dataclasses.replace(config.benchmark, path=str(resolve(config.benchmark.path))),
            self.tokenizer,
            max_length=self.target_context,
            max_new_tokens=config.max_new_tokens,
            limit=config.max_prompts,
        )

    def _check_prompts(self) -> None:
        """Raise UserError if there are too few prompts."""
        if len(self.benchmark.prompts) < LEAST_PROMPTS:
            raise UserError(
                f"{self.config.benchmark.path} has {len(self.benchmark.prompts)} prompts to "
                f"decode, expected {LEAST_PROMPTS} or more: errors come from the spread over "
                f"prompts."
            )

    def _read_training(self) -> dict[str, Any]:
        """Return the configuration of the drafter's training; empty if its run is not here."""
        given, file = self.config.training, self.folder.parent / "config.yaml"
        if given:
            file = Path(given) / "config.yaml"
            if not file.is_file():
                raise UserError(
                    f"training={given} holds no config.yaml, expected the run folder of a training."
                )
        if not file.is_file():
            return {}
        found = upgrade_config(read_config(file, "Set training= to another run folder."))
        if found["job"] not in TRAININGS:
            if given:
                raise UserError(
                    f"training={given} is a run of {found['job']}, expected one of "
                    f"{', '.join(TRAININGS)}."
                )
            return {}
        path = found["target"]["path"]
        if given and path != self.card.get("target", path):
            raise UserError(
                f"{file} trained a drafter for the target {path}, but {self.folder / CARD} names "
                f"{self.card['target']}. Set training= to the run that made this drafter."
            )
        return found

    @cached_property
    def target_hash(self) -> str:
        return hash_input(self.target_folder)

    @cached_property
    def target_context(self) -> int:
        """Return the number of tokens that the served target holds."""
        values = read_json(self.target_folder / "config.json")
        own = int(values.get("max_position_embeddings") or 2**31 - 1)
        return min(own, self.config.target.max_length or own)

    @cached_property
    def original_target(self) -> Path | None:
        """Return the folder of the target on the card, if it is here and unchanged."""
        name = str(self.card.get("target", ""))
        if not name or not is_here(name):
            return None
        folder = resolve(name)
        return folder if hash_input(folder) == self.card.get("target_hash") else None

    @cached_property
    def chats(self) -> list[Chat]:
        """Return training chats from all over the files; empty if there are none here."""
        paths = self.config.chats or self._chats_of_training()
        if not self.config.chats and not all(map(is_here, paths)):
            return []
        chats, _ = split_chats(DataConfig(chats=paths), "train")
        step = -(-len(chats) // self.config.max_chats)
        return chats[:: max(step, 1)]

    def _chats_of_training(self) -> list[str]:
        """Return the paths of the training's chats, those of its domains included."""
        data = self.training.get("data", {})
        paths = list(data.get("chats", []))
        for domain in data.get("domains", {}).values():
            paths += [str(Path(data.get("root", ""), path)) for path in domain.get("chats", [])]
        return paths

    # ------------------------------------------------------------------------------------ rendering

    @property
    def as_text(self) -> bool:
        return self.benchmark.render == "text"

    @cached_property
    def serving(self) -> Rendering:
        """Return how prompts are rendered in serving."""
        return Rendering(self.config.system, self.tokenizer, self.benchmark.chat_template)

    @cached_property
    def trained_template(self) -> tuple[Any, str] | None:
        """Return the tokenizer and the name of the template of the training; None: unknown."""
        data = self.training.get("data") or self.card.get("data") or {}
        name = str(data.get("template", "auto"))
        if name != "auto":
            return self.tokenizer, name
        if not self.card or not has_tokenizer(self.folder):
            return None
        tokenizer = load_tokenizer(self.folder)
        return (tokenizer, name) if tokenizer.chat_template else None

    @cached_property
    def trained_system(self) -> str | None:
        """Return the commonest system prompt of the training chats; None without chats."""
        if not self.chats:
            return None
        systems = [
            one.messages[0]["content"] if one.messages[0]["role"] == "system" else ""
            for one in self.chats
        ]
        return max(dict.fromkeys(systems), key=systems.count)

    @cached_property
    def usual(self) -> Rendering:
        """Return how chats were rendered in training, as far as it is known."""
        template = self.trained_template or (self.serving.tokenizer, self.serving.template)
        system = self.trained_system
        return Rendering(self.config.system if system is None else system, *template)

    def render(self, rendering: Rendering) -> list[list[int]]:
        """Return the ids of all prompts. Raises UserError for prompts that a template rejects."""
        if self.as_text:
            return [render_text(self.tokenizer, one.turns[0]) for one in self.benchmark.prompts]
        system = [{"role": "system", "content": rendering.system}] if rendering.system else []
        tokenizer, template = rendering.tokenizer, rendering.template
        found = []
        for one in self.benchmark.prompts:
            messages = [*system, {"role": "user", "content": one.turns[0]}]
            try:
                found.append(render_prompt(tokenizer, messages, template=template))
            except UserError as error:
                raise rejected(one, tokenizer, template, error) from error
        return found

    # --------------------------------------------------------------------------------------- models

    @property
    def device(self) -> str:
        return device_of(self.config.target.device)

    @cached_property
    def exact_dtype(self) -> str:
        """Return the dtype of serving if it is exact, else float32."""
        return self.config.target.dtype if self.config.target.dtype in EXACT else "float32"

    @cached_property
    def model(self) -> Any:
        """Return the target as a frozen Hugging Face model in float32."""
        return freeze(load_causal_lm(self.target_folder, torch.float32)).to(self.device)

    @cached_property
    def draft_model(self) -> Any:
        """Return the drafter as training runs it: a Hugging Face model, or a head."""
        if self.kind is None:
            return freeze(load_causal_lm(self.folder, torch.float32)).to(self.device)
        return freeze(self.kind.load(self.folder)).to(self.device)

    @cached_property
    def shape(self) -> Any:
        """Return the shape of the head."""
        assert self.kind is not None
        return self.kind.read_shape(self.folder)

    def target(self, folder: Path, dtype: str) -> Target:
        """Load a target for decoding."""
        if (folder, dtype) not in self._targets:
            config: TargetConfig = self.config.target
            self._targets[folder, dtype] = load_target(
                folder,
                backend=config.backend,
                execution=config.execution or "auto",
                dtype=dtype,
                device=self.device,
                max_length=config.max_length or None,
            )
        return self._targets[folder, dtype]

    def drafter(self, dtype: str, chain: bool) -> Drafter:
        """Make the drafter as it serves, or as the greedy chain of a head.

        The hash of the target is not compared, since another target is one of the causes.
        """
        if (dtype, chain) not in self._drafters:
            self._drafters[dtype, chain] = self._make_drafter(dtype, chain)
        return self._drafters[dtype, chain]

    def _make_drafter(self, dtype: str, chain: bool) -> Drafter:
        if chain and self.kind is not None:
            return self.kind.chain_drafter(self.draft_model)
        kind, config = self.choice.kind, self.config.target
        options = with_target_settings(
            kind,
            {**self.choice.options, "dtype": dtype},
            backend=config.backend,
            dtype=dtype,
            device=self.device,
            execution="auto",
        )
        drafter: Drafter = kind(**options)
        return drafter

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_tokens(self.target_folder, self.tokenizer)

    # -------------------------------------------------------------------------------------- serving

    def serve(self, conditions: Conditions = AS_SERVED) -> Served:
        """Decode all prompts under these conditions, once."""
        config = self.config
        temperature, dtype = conditions.temperature, conditions.dtype
        full = Conditions(
            conditions.usual and self.usual != self.serving,
            config.temperature if temperature is None else temperature,
            dtype or config.target.dtype,
            conditions.target or self.target_folder,
            conditions.chain and self.kind is not None,
        )
        if full not in self._served:
            self._served[full] = self._decode(full)
        return self._served[full]

    def _decode(self, full: Conditions) -> Served:
        assert full.target is not None and full.dtype is not None and full.temperature is not None
        settings = Settings(
            self.config.max_new_tokens,
            full.temperature,
            num_draft_tokens=self.config.num_draft_tokens,
            seed=self.config.seed,
            stopping="fixed",
            stop_token_ids=self.stop_token_ids,
        )
        prompts = self.render(self.usual if full.usual else self.serving)
        drafter = self.drafter(full.dtype, full.chain)
        return serve(
            self.target(full.target, full.dtype), drafter, self.tokenizer, prompts, settings
        )

    @property
    def greedy(self) -> Served:
        """Return the greedy answers under the training's conditions, exactly computed."""
        return self.serve(
            Conditions(usual=True, temperature=0.0, dtype=self.exact_dtype, chain=True)
        )


def _read_card(file: Path) -> dict[str, Any]:
    """Return the card of a drafter; empty if it has none. Raises UserError for another form."""
    card = read_json(file) if file.is_file() else {}
    for key, kind in CARD_FIELDS.items():
        if not isinstance(found := card.get(key, kind()), kind):
            expected = "an object" if kind is dict else "text"
            raise UserError(
                f"{file}: {key} is {quote(found)}, expected {expected}. Copy the folder again from "
                f"its training, or remove the card to examine the drafter without it."
            )
    return card
