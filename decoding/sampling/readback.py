"""What a round reads of the device: a rule's decision, and with it what the drafter asked for and
whether the numbers are numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from decoding import devices
from decoding.errors import UserError


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """The largest of some numbers: NaN where one of them is, infinite where one is plus infinity or
    all are minus infinity.

    Minus infinity among others rules a token out, and is fine.
    """

    largest: Tensor
    whose: str
    what: str

    def check(self, largest: float) -> None:
        """Raise UserError for NaN and infinities."""
        if not math.isfinite(largest):
            raise UserError(
                f"{self.whose} computes non-finite {self.what} (found {largest}), expected finite "
                f"ones: its weights hold NaN or infinity, or overflow in half precision. Copy the "
                f"model's weights again, or take dtype=float32."
            )


def finite_check(values: Tensor, whose: str, what: str) -> FiniteCheck:
    """The watch over some numbers, in one operation."""
    return FiniteCheck(values.amax(), whose, what)


class DeviceReadback:
    """`cuda.read` for one round: the first call brings some further tensors along, at no further
    wait.
    """

    def __init__(self, *along: Tensor, watched: Sequence[FiniteCheck] = ()) -> None:
        """watched: refused with a UserError where they are NaN or infinite: here on a host that
        does not run ahead, else when they are read.
        """
        self._along, self._drafter_values, self._watched = along, list[Any](), list[FiniteCheck]()
        for one in watched:
            if devices.runs_ahead(one.largest.device):
                self._watched.append(one)
            else:
                one.check(one.largest.item())

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """The tensors as lists."""
        watched, self._watched = self._watched, []
        found = devices.read(*tensors, *self._along, *(one.largest for one in watched))
        for one, largest in zip(watched, found[len(found) - len(watched) :], strict=True):
            one.check(largest)
        if self._along:
            self._drafter_values, self._along = (
                found[len(tensors) : len(tensors) + len(self._along)],
                (),
            )
        return found[: len(tensors)]

    def drafter_values(self) -> list[Any]:
        """What came along; read now where nothing was read before, which is no wait for a host that
        does not run ahead.
        """
        if self._along or self._watched:
            self()
        return self._drafter_values
