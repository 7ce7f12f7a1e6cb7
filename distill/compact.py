"""`python -m distill.compact`: store a zero-padded LLaMA at its true width with equal logits.

The released shallow and wide drafters (arXiv 2402.01528) have a true width of 2560 but are stored
with a width of 4096. Hugging Face did not support heads wider than hidden size / heads at the time,
so the residual stream was padded with zeros. Padded checkpoints load and decode correctly, but
compact ones need 1.6x less memory.

A channel is padding if nothing writes to it: its column of the embedding and its row of every
o_proj and down_proj are zero. It can be dropped from all weights that read it. An RMSNorm divides
by sqrt(S / D + eps), where S is the sum of squares over the D stored channels. With C kept channels
it divides by sqrt(S / C + eps'). With eps' = eps x D / C, its weights must be multiplied by
sqrt(D / C). The width of a head is unchanged and must be stored as head_dim, because it no longer
equals hidden size / heads.

Shapes: V vocabulary, D stored channels, C kept channels.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding.errors import UserError
from decoding.models.folder import load_state, read_config, refuse_file
from decoding.models.model_check import check_model
from distill.config import CompactConfig
from distill.drafter_folder import NUM_DRAFT_TOKENS
from jobs.config_checks import refuse
from jobs.job import job_main
from jobs.paths import resolve_model
from jobs.protocol import Job, Run
from training.drafter_folder import write_model
from training.models.build import dtype_of, known_config
from training.models.shapes import millions

_EMBEDDING = "model.embed_tokens.weight"
# Modules whose weights have residual channels as rows.
_WRITERS = ("o_proj", "down_proj")
# Modules whose weights have residual channels as columns.
_READERS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
# Modules whose tensors are not weights; older versions of transformers stored this table.
_NOT_WEIGHTS = ("rotary_emb",)
# Size of the random text on which both models are compared.
_ROWS, _TOKENS = 4, 64


class Compact(Job[CompactConfig]):
    """Run of distill.compact, which writes a model folder."""

    artefact = "model"

    def __init__(self, config: CompactConfig) -> None:
        super().__init__(config)
        fits = config.tolerance >= 0
        refuse(config, [("tolerance", fits, "a share of the largest logit, 0 or more")])
        if config.dtype:
            dtype_of(config.dtype)
        self.folder = resolve_model(config.model)
        refuse_file(self.folder)
        kind = read_config(self.folder)["model_type"]
        if kind != "llama":
            raise UserError(
                f"{self.folder}: model_type is '{kind}', expected 'llama'. Use a zero-padded LLaMA"
            )
        check_model(self.folder)

    def inputs(self) -> list[Path]:
        return [self.folder]

    def dry_run(self, run: Run) -> None:
        print(
            f"would search {self.folder} for zero channels and, if the logits stay equal, write "
            f"the model without them to {run.artefact}"
        )

    def work(self, run: Run) -> None:
        """Write the model without its zero channels.

        Raises UserError if there are none to drop, and if the logits of the two models differ by
        more than `tolerance`.
        """
        config, folder = self.config, self.folder
        state = load_state(folder)
        if _EMBEDDING not in state:
            raise UserError(
                f"{folder} has no tensor '{_EMBEDDING}', expected the weights of a LLaMA. Copy the "
                f"checkpoint again"
            )
        kept_C = choose_channels(folder, state)
        model = compact_model(known_config(folder), state, kept_C)
        dtype = dtype_of(config.dtype) if config.dtype else state[_EMBEDDING].dtype
        model.to(dtype)  # compare the weights as stored, including their rounding
        difference = largest_difference(folder, model, config.seed)
        if not difference <= config.tolerance:
            rounded = "The norms' new weights were rounded, so store them with dtype=float32"
            padded = "Use the padded checkpoint, which loads and decodes correctly"
            raise UserError(
                f"{folder}: with {len(kept_C)} channels in {dtype}, the logits differ by "
                f"{difference:.1e} of the largest logit, expected at most "
                f"tolerance={config.tolerance:g}. {padded if dtype == torch.float32 else rounded}"
            )
        write_model(model, folder, run.artefact, dtype, draft_tokens=NUM_DRAFT_TOKENS)
        stored_width, count = state[_EMBEDDING].shape[1], model.num_parameters()
        figures = {
            "stored_hidden_size": stored_width,
            "hidden_size": len(kept_C),
            "parameters": count,
            "largest_difference": difference,
        }
        run.folder.write_manifest(run.inputs, figures, finished=True)
        print(
            f"{stored_width} -> {len(kept_C)} channels, {millions(count)} parameters; logits "
            f"differ by {difference:.1e} of the largest logit in float32: {run.artefact}"
        )


def run(config: CompactConfig) -> Path:
    """Write the compact model to output_dir/model and return that folder.

    Raises UserError if the checkpoint is not padded, or the logits differ by more than `tolerance`.
    """
    return Compact(config).run()


def _module(name: str) -> str:
    """Return the module of a weight: `o_proj` for model.layers.0.self_attn.o_proj.weight."""
    return name.rpartition(".")[0].rpartition(".")[2]


def find_zero_channels(state: Mapping[str, Tensor]) -> Tensor:
    """Return a mask [D] that is True for each residual channel that nothing writes to."""
    written_D = (state[_EMBEDDING] != 0).any(dim=0)
    for name, tensor in state.items():
        if _module(name) in _WRITERS:
            written_D |= (tensor.reshape(len(tensor), -1) != 0).any(dim=1)  # a bias is a column
    return ~written_D


def choose_channels(folder: Path, state: Mapping[str, Tensor]) -> Tensor:
    """Return the indices of the channels to keep, [C].

    All channels that something writes to are kept, and enough zero channels to make C a multiple of
    the number of heads, as Hugging Face's LlamaConfig requires. Raises UserError if all channels or
    no channels can be dropped.
    """
    zero_D = find_zero_channels(state)
    if zero_D.all():
        raise UserError(
            f"{folder}: every weight is zero, expected a trained model. Dry runs write such "
            f"folders: train the model first"
        )
    heads = known_config(folder).num_attention_heads
    used, unused = (~zero_D).nonzero().flatten(), zero_D.nonzero().flatten()
    spare = -len(used) % heads
    if len(unused) <= spare:
        few = f", too few to drop because {heads} heads must divide the rest" if len(unused) else ""
        raise UserError(
            f"{folder} is not padded: {len(unused)} of its {len(zero_D)} residual channels are "
            f"zero in the embedding and in every o_proj and down_proj{few}. Use it unchanged"
        )
    return torch.cat((used, unused[:spare])).sort().values


def compact_model(config: Any, state: Mapping[str, Tensor], kept_C: Tensor) -> Any:
    """Build the LlamaForCausalLM with only the kept channels, in float32.

    config, state: configuration and weights of the stored model. Raises UserError if a weight is
    missing or unexpected for a LLaMA of this configuration.
    """
    ratio = config.hidden_size / len(kept_C)
    shape = {
        "hidden_size": len(kept_C),
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps * ratio,
    }
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict({**config.to_dict(), **shape}))
    weights = {
        name: _compact(name, tensor.float(), kept_C, math.sqrt(ratio))
        for name, tensor in state.items()
        if _module(name) not in _NOT_WEIGHTS
    }
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights[_EMBEDDING]
    odd = sorted(weights.keys() ^ model.state_dict().keys())
    if odd:
        raise UserError(
            f"the weights do not match config.json: '{odd[0]}' is missing or unexpected. Copy the "
            f"checkpoint again"
        )
    model.load_state_dict(weights)
    return model


def _compact(name: str, tensor: Tensor, kept_C: Tensor, norm_factor: float) -> Tensor:
    module = _module(name)
    if module in _NORMS:
        return tensor[kept_C] * norm_factor
    if module in _WRITERS:
        return tensor[kept_C]
    if module in _READERS and name.endswith(".weight"):
        return tensor[:, kept_C]
    return tensor  # a bias of a reader, or a weight that `compact_model` rejects


@torch.no_grad()
def largest_difference(folder: Path, compact: Any, seed: int) -> float:
    """Return the largest difference of the logits of both models, relative to the largest logit.

    The stored model in `folder` and the compact one read random tokens in float32.
    """
    stored = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    tokens = min(_TOKENS, stored.config.max_position_embeddings)
    ids_BT = torch.randint(
        stored.config.vocab_size, (_ROWS, tokens), generator=torch.Generator().manual_seed(seed)
    )
    before_BTV = stored(ids_BT).logits
    del stored  # hold only one model in memory
    dtype = compact.dtype
    after_BTV = compact.float()(ids_BT).logits
    compact.to(dtype)
    return float((after_BTV - before_BTV).abs().max() / before_BTV.abs().max())


if __name__ == "__main__":
    job_main("distill.compact", CompactConfig, run)
