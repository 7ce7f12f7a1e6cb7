"""The decoder layers of Hugging Face models, and their compilation."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of the Hugging Face models in `model`, in order."""
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def compile_layers(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward of each decoder layer at its first call; weights and hooks stay.

    torch.compile fuses the norms, the rotary embedding and the activation function, which otherwise
    take as long as the matrix products on a GPU. Layers of one shape share their code. A deep copy
    of the model would run the original's layers. backend: of torch.compile.
    """
    for layer in decoder_layers(model):
        layer.forward = torch.compile(layer.forward, backend=backend)
