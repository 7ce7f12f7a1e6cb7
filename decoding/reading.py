"""What a round reads of the device: a rule's decision, and with it what the drafter asked for."""

from typing import Any

from torch import Tensor

from decoding import cuda


class Reading:
    """`cuda.read` for one round: the first call brings some further tensors along, at no further wait."""

    def __init__(self, *along: Tensor) -> None:
        self._along, self._answers = along, list[Any]()

    def __call__(self, *tensors: Tensor) -> list[Any]:
        """The tensors as lists."""
        found = cuda.read(*tensors, *self._along)
        if self._along:
            self._along, self._answers = (), found[len(tensors) :]
        return found[: len(tensors)]

    def answers(self) -> list[Any]:
        """What came along; read now where nothing was read before, which is no wait for a host that does not run ahead."""
        if self._along:
            self()
        return self._answers
