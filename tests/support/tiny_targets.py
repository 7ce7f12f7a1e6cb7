"""Small targets for the tests of decoding: random models of every native family, and a table.

Shapes: B rows, N nodes, V vocabulary, T history.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from decoding.interfaces import Chooser, ancestors
from decoding.models.native.model import NativeTarget

VOCABULARY = 48

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "llama_mha": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama_bias": {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
    },
    "mistral": {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "sliding_window": None,
        "head_dim": 12,
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
}


def hf_model(
    shape: str = "llama",
    layers: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **changes: object,
) -> PreTrainedModel:
    """Return a random `transformers` model, with weights large enough that its tokens vary."""
    fields: dict = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
        **changes,
    }
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        # a forgotten bias of 0 or norm of 1 would change nothing
        if name.endswith("bias") or "norm" in name:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_exact_norm, module)  # type: ignore[method-assign]
    return model


def _exact_norm(norm: Any, x: Tensor) -> Tensor:
    """Compute a norm in the dtype of its input.

    `transformers` computes norms in float32, and comparisons in float64 need them exact.
    """
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def native_of(
    model: PreTrainedModel, noise: float = 0.0, seed: int = 0, **options: object
) -> NativeTarget:
    """Return the native target of a `transformers` model.

    noise: standard deviation of normal noise added to the weights, which makes a fair drafter.
    options: arguments of `NativeTarget.from_state`; the dtype is the model's by default.
    """
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: tensor
        + noise
        * torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        for name, tensor in model.state_dict().items()
    }
    options.setdefault("dtype", model.dtype)
    return NativeTarget.from_state(model.config.to_dict(), state, **options)  # type: ignore[arg-type]


def five_words() -> NativeTarget:
    """Return a two-layer target of five symbols, for drafters that run some of its layers."""
    return native_of(
        hf_model(
            "llama",
            layers=2,
            vocab_size=5,
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
        )
    )


def random_prompts(count: int, longest: int = 12, seed: int = 0) -> list[list[int]]:
    """Return random prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]


class TableTarget:
    """`Target` whose next-token logits are a table (V, V, V), indexed by the last two tokens."""

    backend, dtype, name = "table", "float64", "table"
    num_layers = num_parameters = hidden_size = 1
    max_length = 10**6

    def __init__(self, table_VVV: Tensor) -> None:
        self.table_VVV = table_VVV.double()
        self.vocab_size = len(table_VVV)
        self.device = torch.device("cpu")
        self.lengths_B: list[int] = []
        self._last: tuple[Tensor, Tensor] | None = None

    def open(self, batch_size: int, capacity: int | None = None) -> None:
        self.lengths_B = [0] * batch_size
        self._history_BT = torch.zeros(batch_size, capacity or 64, dtype=torch.long)

    def features(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Tensor:
        return self.forward(tokens_BN, parents_BN, taps)[1]

    def forward(
        self, tokens_BN: Tensor, parents_BN: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        assert taps in ((), (1,)), "a table has one layer"
        B, N = tokens_BN.shape
        if parents_BN is None:
            parents_BN = torch.arange(-1, N - 1).expand(B, N)
        lengths_B1 = torch.tensor(self.lengths_B)[:, None]
        tips_B1 = self._history_BT.gather(1, (lengths_B1 - 1).clamp(min=0))
        before_BN = torch.cat((tips_B1, tokens_BN), 1).gather(1, parents_BN + 1)
        self._last = (tokens_BN, ancestors(parents_BN))
        return self.table_VVV[before_BN, tokens_BN], tokens_BN[:, :, None].double()

    def chain_call(self, num_tokens: int) -> None:
        return None

    def verify_call(self, chooser: Chooser) -> None:
        return None

    def commit(self, paths_BL: Sequence[Sequence[int]] | None, counts_B: Sequence[int]) -> None:
        assert self._last is not None
        tokens_BN, _ = self._last
        width = max(counts_B)
        if width:
            if paths_BL is None:
                kept_BL = tokens_BN[:, :width]
            else:
                kept_BL = tokens_BN.gather(
                    1, torch.tensor([(list(p) + [0] * width)[:width] for p in paths_BL])
                )
            slots_BL = torch.tensor(self.lengths_B)[:, None] + torch.arange(width)
            self._history_BT.scatter_(1, slots_BL, kept_BL)
        self.lengths_B = [
            length + count for length, count in zip(self.lengths_B, counts_B, strict=True)
        ]

    def truncate(self, lengths_B: Sequence[int]) -> None:
        self.lengths_B = [min(old, new) for old, new in zip(self.lengths_B, lengths_B, strict=True)]

    def select(self, rows: Sequence[int]) -> None:
        self.lengths_B = [self.lengths_B[row] for row in rows]
        self._history_BT = self._history_BT[list(rows)]

    def embed(self, ids: Tensor) -> Tensor:
        return ids[..., None].double()

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Return logits of states that a head predicts; the table's own do not come from states."""
        return hidden * torch.arange(self.vocab_size, dtype=torch.float64).cos()
