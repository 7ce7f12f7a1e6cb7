"""What the page does with a visitor's choices, without a browser: checks and races."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from decoding.engine import text_of, with_costs
from decoding.errors import UserError
from decoding.models.text.messages import check_text
from decoding.rounds.settings import Settings
from decoding.schedules.by_name import VIRTUAL, WALL
from decoding.values import RULES, check_choice, check_value, number_where, whole_number
from serving.setup import is_compared, warm_up
from serving.web.config import WebConfig
from serving.web.models import SERIAL, WebModels, settings_of
from serving.web.race import Pane, Race, RaceState
from serving.web.slot import REFRESH_SECONDS, Slot

HOTTEST = 2.0  # of the page's temperatures


@dataclass(frozen=True)
class Ask:
    """A visitor's choices."""

    prompt: str
    drafter: str
    schedule: str = SERIAL
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0


class Demo:
    """The models and the thread that decodes with them."""

    def __init__(
        self, models: WebModels, cfg: WebConfig, refresh_seconds: float = REFRESH_SECONDS
    ) -> None:
        """Decode a few tokens with every drafter, since the first run of a shape is slow."""
        self.models, self.cfg = models, cfg
        self.slot = Slot(refresh_seconds)
        self.slot.call(self._warm_up)

    def _warm_up(self) -> None:
        hello = self.models.encode("Hello")
        for name, choice in self.models.choices.items():
            engine = self.models.engine(name, SERIAL)
            warm_up(engine, hello, settings_of(engine, choice.use, SERIAL, self.cfg))
            if self.models.twin is not None:
                engine = replace(engine, target=self.models.twin, drafter=None)
                warm_up(engine, hello, settings_of(engine, choice.use, SERIAL, self.cfg))

    def check(self, ask: Ask) -> list[int]:
        """Return the prompt's ids. Raises UserError for a choice that the page does not offer."""
        check_choice("drafter", ask.drafter, list(self.models.choices))
        fitting = self.models.choices[ask.drafter].schedules
        check_choice(f"schedule of {ask.drafter}", ask.schedule, fitting)
        check_value("temperature", ask.temperature)
        hot = number_where(lambda value: value <= HOTTEST, f"of at most {HOTTEST:g}")
        check_value("temperature", ask.temperature, hot)
        longest = whole_number(1, self.cfg.max_new_tokens)
        check_value("max_new_tokens", ask.max_new_tokens, longest)
        check_value("seed", ask.seed, RULES["seed"])
        return self._prompt_ids(ask.prompt)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Return a prompt's ids. Raises UserError for an empty prompt and for one that is too long.

        Its characters are counted first, since tokenizing a long text takes time.
        """
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError("the prompt is empty. Type some text.")
        most = self.cfg.max_prompt_characters
        if len(prompt) > most:
            raise UserError(
                f"the prompt has {len(prompt):,} characters, and the limit is {most:,}. Shorten it."
            )
        check_text(prompt, "the prompt")
        ids, context = self.models.encode(prompt), self.models.target.max_length
        if len(ids) >= context:
            raise UserError(
                f"the prompt has {len(ids):,} tokens, and the target's context holds {context:,} "
                f"with the answer. Shorten it."
            )
        return ids

    def answer(self, ask: Ask, stop: threading.Event) -> Iterator[RaceState]:
        """Yield the states of both panes.

        stop: ends the run early; closing the iterator does too. Raises UserError as `check` does,
        before anything is decoded.
        """
        ids = self.check(ask)
        try:
            yield from self.slot.states(lambda: self.prepare(ask, ids), stop)
        except UserError:
            if ask.schedule in WALL:
                self.models.drop_worker(ask.drafter)
            raise

    def prepare(self, ask: Ask, ids: Sequence[int]) -> tuple[Race, Sequence[int]]:
        """Return the race of a visitor's choices and its prompt; measure costs if it needs them."""
        engine = self.models.engine(ask.drafter, ask.schedule)
        settings = settings_of(
            engine,
            self.models.choices[ask.drafter].use,
            ask.schedule,
            self.cfg,
            temperature=ask.temperature,
            max_new_tokens=ask.max_new_tokens,
            seed=ask.seed,
        )
        settings = with_costs(engine, ids, settings)
        twin = self.models.twin or engine.target

        def pane(drafted: bool, settings: Settings) -> Pane:
            target = engine.target if drafted else twin
            return Pane(
                target,
                engine.drafter if drafted else None,
                settings,
                lambda tokens: text_of(engine, tokens),
            )

        race = Race(
            pane(False, replace(settings, schedule=SERIAL, stopping=None)),
            pane(True, settings),
            compared=is_compared(settings),
            in_turn=self.models.twin is None or ask.schedule in WALL,
            virtual=ask.schedule in VIRTUAL,
        )
        return race, ids

    def close(self) -> None:
        """End the thread."""
        self.slot.close()
