"""`python -m distill.compact`: a zero-padded LLaMA checkpoint in its true width, with equal logits.

The released shallow and wide drafters (arXiv 2402.01528) are stored 4096 wide and are 2560 wide in
truth: when they were made, Hugging Face had no heads wider than hidden size / heads, so the
residual stream was padded with zeros. They load and decode as they are; compacted they hold and
read 1.6x less.

A channel is padding when nothing is ever written to it: its column of the embedding and its row of
every o_proj and down_proj are zero. It can be dropped wherever it is read. An RMSNorm divides by
sqrt(S / D + eps), S being the sum of squares over the D stored channels; with C of them kept it
divides by sqrt(S / C + eps'), so with eps' = eps x D / C its weights are multiplied by sqrt(D / C).
Heads keep their width, which is then written down (head_dim), as it is no longer hidden size /
heads.

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
from decoding.models.folder import load_state, read_config
from decoding.models.model_check import check_model
from distill.config import CompactConfig
from jobs.job import job_main
from jobs.paths import resolve
from jobs.protocol import Job, Run
from training.drafter_folder import write_model
from training.models.build import dtype_of, known_config
from training.optimizer import count_parameters

_EMBEDDING = "model.embed_tokens.weight"
_WRITERS = ("o_proj", "down_proj")  # their rows are residual channels
# their columns are
_READERS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
_NOT_WEIGHTS = ("rotary_emb",)  # a table that older versions of transformers stored
_ROWS, _TOKENS = 4, 64  # of the text that both forms read when they are compared


class Compact(Job[CompactConfig]):
    """One run of distill.compact, which leaves a model folder."""

    artefact = "model"

    def __init__(self, config: CompactConfig) -> None:
        super().__init__(config)
        self.folder = resolve(config.model)
        kind = read_config(self.folder)["model_type"]
        if kind != "llama":
            raise UserError(
                f"{self.folder}: model_type is '{kind}', expected llama: the padded checkpoints "
                f"that were released are"
            )
        check_model(self.folder)

    def inputs(self) -> list[Path]:
        return [self.folder]

    def dry_run(self, run: Run) -> None:
        print(
            f"would look for zero channels in {self.folder}, and write it without them to "
            f"{run.artefact} where logits stay equal"
        )

    def work(self, run: Run) -> None:
        compact(self.config, run, self.folder)


def run(config: CompactConfig) -> Path:
    """Write the compact model to output_dir/model. Returns that folder. Raises UserError for one
    that is not padded, or not equal.
    """
    return Compact(config).run()


def compact(config: CompactConfig, run: Run, folder: Path) -> None:
    """Cut the zero channels out of the model in `folder`, and write it where logits stay equal."""
    state = load_state(folder)
    if _EMBEDDING not in state:
        raise UserError(
            f"{folder}: the weights have no tensor '{_EMBEDDING}', which a llama model needs"
        )
    kept_C = choose_channels(folder, state)
    model = compact_model(known_config(folder), state, kept_C)
    dtype = dtype_of(config.dtype) if config.dtype else state[_EMBEDDING].dtype
    model.to(dtype)  # what is compared is what will be stored, rounding and all
    difference = largest_difference(folder, model, config.seed)
    if not difference <= config.tolerance:
        raise UserError(
            f"{folder}: compacted to {len(kept_C)} channels in {dtype} its logits differ by "
            f"{difference:.1e} of the largest one, more than "
            f"tolerance={config.tolerance:g}; nothing was written. {_remedy(dtype)}"
        )
    write_model(model, folder, run.artefact, dtype, draft_tokens=4)
    figures = {
        "stored_hidden_size": state[_EMBEDDING].shape[1],
        "hidden_size": len(kept_C),
        "parameters": count_parameters(model.parameters()),
        "largest_difference": difference,
    }
    run.folder.write_manifest(run.inputs, figures, finished=True)
    print(
        f"{figures['stored_hidden_size']} -> {len(kept_C)} channels, "
        f"{figures['parameters'] / 1e6:.1f} M parameters; logits differ by "
        f"{difference:.1e} of the largest one in float32: {run.artefact}"
    )


def _module(name: str) -> str:
    """The module that a weight belongs to: `o_proj` of model.layers.0.self_attn.o_proj.weight."""
    return name.rpartition(".")[0].rpartition(".")[2]


def find_zero_channels(state: Mapping[str, Tensor]) -> Tensor:
    """bool [D]: residual channels to which nothing is ever written."""
    written_D = (state[_EMBEDDING] != 0).any(dim=0)
    for name, tensor in state.items():
        if _module(name) in _WRITERS:
            written_D |= (tensor.reshape(len(tensor), -1) != 0).any(dim=1)  # a bias is a column
    return ~written_D


def choose_channels(folder: Path, state: Mapping[str, Tensor]) -> Tensor:
    """Indices [C] of the channels to keep: those that are written to, and as many zero ones as make
    C a multiple of the heads, which Hugging Face's LlamaConfig wants. Raises UserError when there
    is nothing to drop, or nothing to keep.
    """
    zero_D = find_zero_channels(state)
    if zero_D.all():
        raise UserError(
            f"{folder}: every weight is zero (a dry run's folder?), so that nothing would be left"
        )
    heads = known_config(folder).num_attention_heads
    used, unused = (~zero_D).nonzero().flatten(), zero_D.nonzero().flatten()
    spare = -len(used) % heads
    if len(unused) <= spare:
        few = f", too few to stay a multiple of its {heads} heads" if len(unused) else ""
        raise UserError(
            f"{folder} is not padded: {len(unused)} of its {len(zero_D)} residual channels are "
            f"zero in the embedding and in every o_proj and down_proj{few}. It is compact as it is"
        )
    return torch.cat((used, unused[:spare])).sort().values


def compact_model(config: Any, state: Mapping[str, Tensor], kept_C: Tensor) -> Any:
    """The LlamaForCausalLM over the kept channels in float32; `config` and `state` are the stored
    ones.

    Raises UserError for a weight that a llama model of this configuration does not have, or lacks.
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
            f"the weights are not those of a llama model of this config.json: '{odd[0]}' is in one "
            f"of them only"
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
    return tensor  # a bias of what reads the stream, or what `compact_model` refuses by name


@torch.no_grad()
def largest_difference(folder: Path, compact: Any, seed: int) -> float:
    """Largest difference of logits between the stored form and the compact one on drawn tokens,
    both in float32, over the largest logit.
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
    del stored  # one of them in memory at a time
    dtype = compact.dtype
    after_BTV = compact.float()(ids_BT).logits
    compact.to(dtype)
    return float((after_BTV - before_BTV).abs().max() / before_BTV.abs().max())


def _remedy(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "The norms' new weights were rounded: store them with dtype=float32"
    return "Use it as it is stored, which loads and decodes too"


if __name__ == "__main__":
    job_main("distill.compact", CompactConfig, run)
