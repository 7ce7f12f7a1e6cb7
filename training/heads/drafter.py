"""Base of drafters that read the target's last hidden state, as the recurrent and Medusa heads do.

The state belongs to the token before the tip. The prefill computes the first state, and every
round's forward computes the next. A prompt of one token has no token before its tip, so its first
round drafts from zeros.

Shapes: B rows, N tokens, C = H hidden size.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from decoding import devices
from decoding.errors import UserError
from decoding.interfaces import Observation, RoundCosts, Target
from decoding.models.hub import name_of
from decoding.models.load import DTYPES
from decoding.models.native.fused import fuse_linears
from decoding.verification.nodes import at_nodes

Head = TypeVar("Head", bound=nn.Module)


def load_to_draft(
    folder: str | Path | None,
    head: Head | None,
    load: Callable[[Path, torch.dtype, str], Head],
    dtype: str = "float32",
    device: str = "cpu",
    execution: str = "eager",
) -> Head:
    """Return `head`, or load the head in `folder` if `head` is None.

    dtype, device: of a loaded head. execution: `fused` runs the products of a loaded head like
    those of a fused target. Raises UserError for an unknown dtype or device and for a folder
    without a valid head, and ValueError if `head` and `folder` are None.
    """
    if head is not None:
        return head
    if folder is None:
        raise ValueError("a drafter of a trained head needs its folder or the head")
    if dtype not in DTYPES:
        raise UserError(
            f"dtype '{dtype}' is unknown, expected one of {', '.join(DTYPES)}, or auto in a "
            f"configuration."
        )
    loaded = load(Path(folder), DTYPES[dtype], devices.device_of(device))
    if execution == "fused":
        fuse_linears(loaded)
    return loaded


def linear_of(weight_OI: Tensor, execution: str) -> nn.Linear:
    """Return a linear layer without a bias, whose products run as a head's in this execution."""
    outputs, inputs = weight_OI.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    if execution == "fused":
        fuse_linears(layer)
    return layer


def choose_name(name: str | None, folder: str | Path | None, kind: str) -> str:
    """Return a drafter's name: the given one, else that of its folder, else `kind`."""
    return name or (kind if folder is None else name_of(folder))


def check_draft(name: str, shape: str, max_nodes: int) -> None:
    """Raise UserError for a shape of drafts that is unknown, and for trees without nodes.

    name: the drafter's name.
    """
    if shape not in ("tree", "chain"):
        raise UserError(f"drafter '{name}': shape is '{shape}', expected tree or chain.")
    if max_nodes < 1:
        raise UserError(f"drafter '{name}': max_nodes is {max_nodes}, expected 1 or more.")


def check_target(name: str, shape: Any, device: torch.device, target: Target) -> None:
    """Raise UserError for a target of other sizes than a head's, or on another device.

    name: the drafter's name. shape: the head's `HeadShape`. device: the head's device.
    """
    for what, ours, theirs in (
        ("hidden size", shape.hidden_size, target.hidden_size),
        ("vocabulary", shape.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise UserError(
                f"drafter '{name}': its head was trained for a {what} of {ours}, but "
                f"'{target.name}' has {theirs}. Use a head that was trained for this target."
            )
    places = {(each.type, each.index or 0) for each in (device, target.device)}
    if len(places) > 1:
        raise UserError(
            f"drafter '{name}': its head is on {device}, but '{target.name}' is on "
            f"{target.device}. Use one device for both."
        )


def accepted_states(observation: Observation) -> tuple[Tensor, list[int]]:
    """Return the target's states (B, N, C) at each row's tip and accepted nodes, in their order.

    Also returns the number of these tokens in each row, which padding follows.
    """
    outcome, states_BNC = observation.outcome, observation.hidden_BNC
    counts_B = [accepted + 1 for accepted in outcome.accepted_B]
    width = max(counts_B)
    if outcome.paths_B is None:
        return states_BNC[:, :width], counts_B
    paths = [[0, *(node + 1 for node in path)] for path in outcome.paths_B]
    padded = [[*path, *[0] * (width - len(path))] for path in paths]
    nodes_BN1 = devices.tensor(padded, states_BNC.device)[:, :, None]
    return states_BNC.gather(1, nodes_BN1.expand(-1, -1, states_BNC.shape[2])), counts_B


class HeadDrafter:
    """Drafter whose only memory is the target's hidden state before the tip."""

    def __init__(self, name: str, shape: Any, weight: Tensor) -> None:
        """Store the head's sizes, and its dtype and device.

        name: the drafter's name in errors. shape: the head's `HeadShape`. weight: one of the head's
        weights, which gives the dtype and the device.
        """
        self.name, self._shape = name, shape
        self.device, self.dtype = weight.device, weight.dtype
        self._hidden_BH = torch.empty(0)

    def prepare(self, target: Target, costs: RoundCosts | None) -> None:
        """Raise UserError for a target of other sizes than the head's, or on another device."""
        check_target(self.name, self._shape, self.device, target)

    def open(
        self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None, capacity: int
    ) -> None:
        """Store the hidden state of each prompt's last token but one.

        It is zero without a prefill, and for a prompt of one token.
        """
        size = self._shape.hidden_size
        self._hidden_BH = torch.zeros(len(prompts_B), size, dtype=self.dtype, device=self.device)
        if prefill_hidden_BNC is not None:
            has_state_B1 = devices.tensor([[len(prompt) > 1] for prompt in prompts_B], self.device)
            last = prefill_hidden_BNC.shape[1] - 1  # 0: only each prompt's last state is given
            places_B = [min(max(len(prompt) - 2, 0), last) for prompt in prompts_B]
            states_BH = self.convert(at_nodes(prefill_hidden_BNC, places_B))
            self._hidden_BH = torch.where(has_state_B1, states_BH, self._hidden_BH)

    def join(self, prompts_B: Sequence[Sequence[int]], prefill_hidden_BNC: Tensor | None) -> None:
        """Store the hidden state of each new prompt's last token but one."""
        running_BH = self._hidden_BH
        HeadDrafter.open(self, prompts_B, prefill_hidden_BNC, 0)
        self._hidden_BH = torch.cat((running_BH, self._hidden_BH))

    def resume(self, prompt: Sequence[int], kept: int, hidden_NC: Tensor | None) -> None:
        """Store the last of the hidden states that the target has just computed, if any."""
        if hidden_NC is not None:
            self._hidden_BH = self.convert(hidden_NC[-1:])

    def convert(self, states: Tensor) -> Tensor:
        """Return the target's states in the head's dtype and on the head's device."""
        return states.to(self.device, self.dtype)

    def observe(self, observation: Observation) -> None:
        """Store the hidden state of each row's last accepted token; if there is none, the tip's."""
        outcome = observation.outcome
        last_B = outcome.accepted_B  # of a chain
        if outcome.paths_B is not None:
            last_B = [path[-1] + 1 if path else 0 for path in outcome.paths_B]
        self._hidden_BH = self.convert(at_nodes(observation.hidden_BNC, last_B))

    def rollback(self, lengths_B: Sequence[int]) -> None:
        """Do nothing: a head caches nothing."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        # a list as an index would wait for the device
        self._hidden_BH = self._hidden_BH[devices.tensor(list(rows), self.device)]
