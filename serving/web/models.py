"""The models of the page: a target, the drafters to choose from, and how each may draft."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from decoding.engine import Engine, encode, stop_tokens, text_of
from decoding.errors import UserError
from decoding.interfaces import Drafter, Target, precision
from decoding.models.native.model import NativeTarget
from decoding.models.text.tokenizer import load_tokenizer
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import VIRTUAL, WALL
from jobs.config import TargetConfig
from jobs.drafter_use import DrafterUse, refuse_eval_options
from jobs.drafters import IN_WORKER, build, describe, uses, with_execution
from jobs.paths import resolve_model
from jobs.targets import load_job_target
from serving.setup import DEFAULT_DRAFTER
from serving.web.config import WebConfig
from training.data.chat import render_prompt, template_source

SERIAL = "serial"
# schedule -> the words of the page; the ablations of PEARL are left out
SCHEDULES = {
    SERIAL: "serial: draft, then verify",
    "pearl_virtual": "PEARL, virtual clock",
    "pearl_plus_virtual": "PEARL+, virtual clock",
    "pearl_wall": "PEARL, two workers",
    "pearl_plus_wall": "PEARL+, two workers",
}


@dataclass(frozen=True)
class Choice:
    """A drafter that visitors can choose, with its loop options and the schedules that fit it."""

    drafter: Drafter
    use: DrafterUse
    mapping: dict[str, object]  # that builds it again, in a worker
    schedules: tuple[str, ...]


@dataclass
class WebModels:
    """Loaded models; `engine` returns those of a choice."""

    plain: Engine  # without a drafter
    # its target's weights with another cache, for the plain pane; None: both panes share one
    twin: Target | None
    folder: Path
    template: str  # name of a chat template; empty: prompts are continued
    choices: dict[str, Choice]
    about: str
    engines: dict[tuple[str, bool], Engine] = field(default_factory=dict)

    @property
    def target(self) -> Target:
        """The target of the drafted pane."""
        return self.plain.target

    def engine(self, name: str, schedule: str) -> Engine:
        """Return target and drafter for a schedule, and start the drafter's worker if it needs one.

        Raises UserError if the worker cannot start.
        """
        choice, key = self.choices[name], (name, schedule in WALL)
        if key not in self.engines:
            drafter = choice.drafter
            if schedule in WALL:
                use = DrafterUse(schedule=schedule)
                drafter = build({name: dict(choice.mapping)}, {name: use}, self.folder)[name]
            self.engines[key] = replace(self.plain, drafter=drafter, costs={})
        return self.engines[key]

    def drop_worker(self, name: str) -> None:
        """Forget a drafter's worker, which may have ended; the next use starts another."""
        self.engines.pop((name, True), None)

    def encode(self, prompt: str) -> list[int]:
        """Return the ids of a prompt, as a chat's first message if there is a chat template."""
        if not self.template:
            return encode(self.plain, prompt)
        messages = [{"role": "user", "content": prompt}]
        return render_prompt(self.plain.tokenizer, messages, template=self.template)


def load(cfg: WebConfig) -> WebModels:
    """Load target, tokenizer and drafters. Raises UserError if they do not fit together."""
    folder = resolve_model(cfg.target.path)
    settings = with_execution(cfg.target, folder)
    tokenizer = load_tokenizer(folder, cfg.target.trust_remote_code)
    template = cfg.template if cfg.template != "auto" or tokenizer.chat_template else ""
    if template:
        template_source(tokenizer, template)  # refuses an unknown one now
    mappings, options = read_drafters(cfg, settings)
    drafters = build(mappings, options, folder)  # misfits are refused before the target is loaded
    target = load_job_target(settings, folder, cfg.threads)
    choices = {}
    for name, drafter in drafters.items():
        drafter.prepare(target, None)
        fitting = fitting_schedules(drafter, options[name])
        choices[name] = Choice(drafter, options[name], mappings[name], fitting)
    return WebModels(
        plain=Engine(target, None, tokenizer, stop_tokens(folder, tokenizer)),
        twin=target.twin() if isinstance(target, NativeTarget) else None,
        folder=folder,
        template=template,
        choices=choices,
        about=f"{target.name}, {_size(target)} parameters, {precision(target)}, {settings.device}",
    )


def read_drafters(
    cfg: WebConfig, target: TargetConfig
) -> tuple[dict[str, dict[str, Any]], dict[str, DrafterUse]]:
    """Return the mappings and the loop options of the page's drafters, by name.

    Raises UserError for entries that name no drafter, and for options that the page or its visitors
    set.
    """
    mappings = describe(cfg.drafters or [DEFAULT_DRAFTER], target, control=False)
    options = uses(mappings, DrafterUse())
    for name, use in options.items():
        refuse_eval_options(name, use)
        if use.schedule != SERIAL:
            raise UserError(
                f"drafters: {name} has schedule={use.schedule}, but visitors choose the schedule. "
                f"Remove it."
            )
    return mappings, options


def check_folders(cfg: WebConfig) -> tuple[Path, list[str]]:
    """Return the target's folder and the drafters' names, without loading anything.

    Raises UserError for a missing target and for entries that name no drafter.
    """
    folder = resolve_model(cfg.target.path)
    mappings, _ = read_drafters(cfg, with_execution(cfg.target, folder))
    return folder, list(mappings)


def fitting_schedules(drafter: Drafter, use: DrafterUse) -> tuple[str, ...]:
    """Return the schedules under which a drafter can run here."""
    found = [SERIAL]
    if drafter.capabilities.can_overlap and use.lookup is None:
        found += [name for name in SCHEDULES if name in VIRTUAL]
        if type(drafter) in IN_WORKER and len(os.sched_getaffinity(0)) > 1:
            found += [name for name in SCHEDULES if name in WALL]
    return tuple(found)


def settings_of(
    engine: Engine, use: DrafterUse, schedule: str, cfg: WebConfig, **chosen: object
) -> Settings:
    """Return the settings of a run, without measured costs. Raises UserError for a bad value.

    chosen: temperature, max_new_tokens, seed.
    """
    stopping = use.settings if schedule == SERIAL else {}
    return Settings(
        **stopping | chosen | {"schedule": schedule},  # type: ignore[arg-type]
        num_draft_tokens=cfg.num_draft_tokens,
        verify=cfg.verify,
        stop_token_ids=engine.stop_token_ids,
        text_of=lambda ids: text_of(engine, ids),
    )


def _size(target: Target) -> str:
    """Return a number of parameters such as 24 M."""
    millions = target.num_parameters / 1e6
    return f"{millions / 1000:.1f} B" if millions >= 1000 else f"{millions:.0f} M"
