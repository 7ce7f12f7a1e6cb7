"""Device-to-host reads of a round: one wait for the decision, the drafter's tensors and checks."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from decoding import devices
from decoding.errors import UserError


class FiniteCheck:
    """A check for NaN and infinities by the largest of several numbers.

    The largest is NaN if any number is, and infinite if one is plus infinity or all are minus
    infinity. Minus infinity among finite numbers only rules a token out, and is allowed.
    """

    def __init__(self, values: Tensor, whose: str, what: str) -> None:
        """Prepare the check of these values.

        whose, what: the model and the kind of values, such as "logits", for the message.
        """
        self.values, self.whose, self.what = values, whose, what

    def largest(self) -> Tensor:
        """Return the largest value on its device."""
        return self.values.amax()

    def check(self, largest: float) -> None:
        """Raise UserError if the largest value is NaN or infinite."""
        if not math.isfinite(largest):
            raise UserError(
                f"{self.whose} computes non-finite {self.what} (found {largest}), expected finite "
                f"ones: its weights hold NaN or infinity, or overflow in half precision. Copy the "
                f"model's weights again, or use dtype=float32."
            )


class DeviceReadback:
    """Reader of one round's tensors, whose first call also reads the drafter's and the checks'."""

    def __init__(self, *along: Tensor, watched: Sequence[FiniteCheck] = ()) -> None:
        """Add tensors and checks to the first read; a failed check raises UserError.

        On a synchronous device the checks run at once.
        """
        self._along, self._drafter_values, self._watched = along, list[Any](), list[FiniteCheck]()
        for one in watched:
            if devices.runs_ahead(one.values.device):
                self._watched.append(one)
            else:
                one.check(one.largest().item())

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """Return the tensors as lists; raise UserError if a check fails at the first call."""
        watched, self._watched = self._watched, []
        found = devices.read(*tensors, *self._along, *(one.largest() for one in watched))
        for one, largest in zip(watched, found[len(found) - len(watched) :], strict=True):
            one.check(largest)
        if self._along:
            self._drafter_values = found[len(tensors) : len(tensors) + len(self._along)]
            self._along = ()
        return found[: len(tensors)]

    def drafter_values(self) -> list[Any]:
        """Return the drafter's tensors as lists, reading them now if nothing was read yet."""
        if self._along or self._watched:
            self()
        return self._drafter_values
