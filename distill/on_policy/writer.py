"""Text of the student: answers decoded with its current weights, on all ranks together.

The noise is keyed by (seed, step, number of the prompt), so an answer depends neither on the batch
nor on the number of ranks. Below float64 that holds up to near ties of two tokens.
"""

from collections.abc import Sequence
from typing import Any

from decoding.errors import UserError
from decoding.loop import decode
from decoding.models.native.model import NativeTarget
from decoding.models.native.weights import FAMILIES
from decoding.rounds.settings import Settings
from decoding.sampling import noise
from distill.config import OnPolicyConfig
from distill.on_policy.prompts import Prompts
from training.adapters import merged_state
from training.data.packing import Sample
from training.held_out.texts import Text, measure_text
from training.parallel.strategy import Parallel

# Prompts that a rank decodes in one batch. On a GPU, a small student's step takes as long for many
# rows as for few.
PROMPTS_TOGETHER = {"cpu": 32, "cuda": 256}
MEASURED_TOKENS = 2048  # tokens of the student's text that are measured at a refresh


class StudentWriter:
    """Writer that decodes with a student in training.

    Where ranks shard its weights, they are gathered first.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        config: OnPolicyConfig,
        parallel: Parallel,
        *,
        max_length: int,
        stop_token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        """Store the models and the settings.

        Raises UserError for a student that our own decoding does not run.
        """
        if student.config.model_type not in FAMILIES:
            raise UserError(
                f"on_policy.share is {config.share:g}, but the student's model_type is "
                f"'{student.config.model_type}', expected one of {', '.join(FAMILIES)}, with which "
                f"it can write. Set on_policy.share=0"
            )
        self.student, self.teacher, self.parallel = student, teacher, parallel
        self.max_length = max_length
        self.settings = Settings(
            config.max_new_tokens,
            config.temperature,
            seed=seed,
            stop_token_ids=stop_token_ids,
        )

    def write(self, step: int, prompts: Prompts, first: int, tokens: int) -> list[list[int]]:
        """Return answers to the prompts `first`, `first` + 1, ... of the weights before `step`.

        They continue until prompts and answers together have at least `tokens` tokens. All ranks
        must call it, and share the work. Raises UserError if the student computes NaN or infinity.
        """
        answers: list[list[int]] = []
        with self.parallel.gathered_weights():
            model = self._decodable(step)
            while tokens > 0:
                chosen: list[list[int]] = []
                expected = 0
                while expected < tokens:
                    chosen.append(prompts[first + len(answers) + len(chosen)])
                    expected += len(chosen[-1]) + self.settings.max_new_tokens
                new = self._decode(model, step, first + len(answers), chosen)
                tokens -= sum(map(len, chosen)) + sum(map(len, new))
                answers += new
        return answers

    def measure(self, samples: Sequence[Sample], rows: list[list[int]]) -> dict[str, float]:
        """Return the figures of `TextFigures` on some of the rows. All ranks must call it."""
        with self.parallel.gathered_weights():
            models = self.teacher, self.student
            return measure_text(
                Text(samples, rows), self.max_length, *models, MEASURED_TOKENS
            ).values()

    def _decodable(self, step: int) -> NativeTarget:
        """Return the student with its current weights for decoding."""
        student = self.student
        return NativeTarget.from_state(
            student.config.to_dict(),
            merged_state(student),
            name=f"student after {step} steps",
            dtype=next(student.parameters()).dtype,
            device=str(self.parallel.device),
            max_length=self.max_length,
            # The weights change at every refresh, and recording its steps each time costs more.
            execution="eager",
        )

    def _decode(
        self, model: NativeTarget, step: int, first: int, prompts: list[list[int]]
    ) -> list[list[int]]:
        """Answer the prompts, whose numbers begin at `first`; every rank decodes a part of them."""
        rank, ranks = self.parallel.rank, self.parallel.world_size
        mine = range(rank, len(prompts), ranks)
        written: list[list[int]] = []
        together = PROMPTS_TOGETHER[self.parallel.device.type]
        for start in range(0, len(mine), together):
            part = mine[start : start + together]
            keys = [noise.key(step, first + index) for index in part]
            batch = [prompts[index] for index in part]
            found = decode(model, None, batch, self.settings, request_ids=keys)
            written += [list(one.tokens) for one in found]
        parts = self.parallel.gather(written)
        return [parts[index % ranks][index // ranks] for index in range(len(prompts))]
