"""`python -m distill.pretrain`: train a LLaMA from scratch on text and chats.

This job trained the embedded target. It also trains controls from scratch, with which pruned
drafters of the same shape are compared.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from decoding.models.text.tokenizer import load_tokenizer
from distill.config import PretrainConfig
from distill.dry_run import print_cost, training_flops
from distill.shapes import WIDEST
from jobs.config_checks import refuse
from jobs.job import job_main
from jobs.paths import resolve_model
from jobs.protocol import Job, Run
from training.config import check_values
from training.data.from_config import data_files, held_out_samples, training_data
from training.data.mixture import check_mixture
from training.data.packing import PackedData, Sample, collate
from training.doctor import begin
from training.drafter_folder import write_model
from training.job import fit_recorded
from training.models.build import build_llama, dtype_of, load_causal_lm
from training.models.shapes import WIDTHS, millions
from training.objectives import LanguageModelling
from training.parallel.strategy import Parallel
from training.plan import describe_plan

# A larger number of layers is a typing error, and would fill the memory.
MOST_LAYERS = 1000
# Widths without a default, because there is no target to copy them from.
REQUIRED = ("hidden_size", "num_attention_heads", "intermediate_size")


class Pretrain(Job[PretrainConfig]):
    """Run of distill.pretrain, which writes a model folder."""

    artefact = "model"

    def __init__(self, config: PretrainConfig) -> None:
        super().__init__(config)
        check(config)

    @property
    def _tokenizer_folder(self) -> Path:
        return resolve_model(self.config.tokenizer, weights=False)

    def inputs(self) -> list[Path]:
        config, start = self.config, self.config.init_from
        tokenizer = self._tokenizer_folder
        if config.dry_run:
            return [tokenizer]
        return [tokenizer, *([resolve_model(start)] if start else []), *data_files(config.data)]

    def dry_run(self, run: Run) -> float:
        self.prepare(run)
        config, dtype = self.config, dtype_of(self.config.loop.dtype)
        with torch.device("meta"):
            model = build_llama(config.model, dtype, **_base_fields(self.tokenizer, config))
        print(f"model: {millions(model.num_parameters())} parameters")
        return print_cost(config, config.loop, model.config, {})

    def prepare(self, run: Run) -> None:
        self.tokenizer = load_tokenizer(self._tokenizer_folder, of_model=False)

    def work(self, run: Run) -> None:
        config, tokenizer = self.config, self.tokenizer
        torch.manual_seed(config.seed)
        parallel = Parallel(config.parallel)
        model = build_llama(
            config.model, dtype_of(config.loop.dtype), **_base_fields(tokenizer, config)
        )
        if config.init_from:
            model.load_state_dict(
                load_causal_lm(resolve_model(config.init_from), model.dtype).state_dict()
            )
        printed: list[str] = []
        data = training_data(
            tokenizer, config.data, config.loop, config.seed, parallel.is_main, printed
        )
        held_out = held_out_samples(tokenizer, config.data, parallel.is_main)
        if parallel.is_main:
            size = model.num_parameters() / 1e6
            print(f"model: {size:.1f} M parameters, {config.model.num_hidden_layers} layers")
            print(f"data: {data.tokens:,} tokens in {len(data.rows):,} rows, {data.fill:.1%} full")
            print(plan := f"plan: {describe_plan(config.loop, data)}")
            flops = training_flops(model.config)
            begin(config, tokenizer, data, model, (), run.path, flops, [*printed, plan])
        objective = LanguageModelling(model)

        def evaluate() -> dict[str, float]:
            return held_out_loss(objective, held_out, config)

        progress = fit_recorded("pretrain", objective, model, data, config, run, parallel, evaluate)
        if parallel.is_main:
            write_model(
                model,
                resolve_model(config.tokenizer, weights=False),
                run.artefact,
                dtype_of(config.export_dtype),
            )
            metrics = {
                "held_out_loss": progress.best["loss"],
                "best_step": progress.best_step,
                "ended_by": progress.ended_by,
                "tokens": progress.tokens,
                "training_seconds": round(progress.seconds, 1),
            }
            run.folder.write_manifest(run.inputs, metrics, finished=True)
            print(
                f"held-out loss {metrics['held_out_loss']:.4f} nats a token after "
                f"{progress.seconds:.0f} s; model: {run.artefact}"
            )
        parallel.close()


def run(config: PretrainConfig) -> Path:
    """Train a model and return its folder, output_dir/model."""
    return Pretrain(config).run()


def check(config: PretrainConfig) -> None:
    """Raise UserError for invalid values before the data is read."""
    shape = config.model
    layers = (1 <= shape.num_hidden_layers <= MOST_LAYERS, f"1 to {MOST_LAYERS:,}")
    widths = {}
    for name in WIDTHS:
        least = 1 if name in REQUIRED else 0
        widths[f"model.{name}"] = (least <= vars(shape)[name] <= WIDEST, f"{least} to {WIDEST:,}")
    drafted = (shape.draft_vocab_size == 0, "0, as only drafters have a draft vocabulary")
    rules = {"model.num_hidden_layers": layers, "model.draft_vocab_size": drafted, **widths}
    check_values(config, rules)
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    groups, width = shape.num_key_value_heads or heads, shape.head_dim or hidden // heads
    whole = (hidden % heads == 0, f"a multiple of model.num_attention_heads ({heads})")
    grouped = (heads % groups == 0, f"a multiple of model.num_key_value_heads ({groups})")
    paired = (width % 2 == 0, f"even heads, found {width} channels in each")
    refuse(
        config,
        [
            ("model.hidden_size", *whole),
            ("model.num_attention_heads", *grouped),
            ("model.head_dim" if shape.head_dim else "model.hidden_size", *paired),
        ],
    )
    check_mixture(config.data, ("loss",))


@torch.no_grad()
def held_out_loss(
    objective: LanguageModelling, domains: dict[str, Sequence[Sample]], config: PretrainConfig
) -> dict[str, float]:
    """Return the held-out losses in nats per token.

    `loss` is the mean cross-entropy over all supervised tokens, loss/NAME the mean over one domain,
    and `score` is -`loss`. domains: name -> held-out samples; the name is empty without domains.
    """
    capacity, device = config.data.max_length, next(objective.parameters()).device
    per_forward = max(1, config.loop.micro_batch_tokens // capacity)
    figures, total, tokens = {}, 0.0, 0
    for name, samples in domains.items():
        packed, nats = PackedData(samples, capacity, 1, 0), 0.0
        for start in range(0, len(packed.rows), per_forward):
            batch = collate(samples, packed.rows[start : start + per_forward], capacity, device)
            nats += float(objective(batch)[0])
        total, tokens = total + nats, tokens + packed.supervised
        if name:
            figures[f"loss/{name}"] = nats / packed.supervised
    return {"loss": total / tokens, "score": -total / tokens, **figures}


def _base_fields(tokenizer: Any, config: PretrainConfig) -> dict[str, Any]:
    """Return the fields of the model's configuration other than its shape."""
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": config.data.max_length,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }


if __name__ == "__main__":
    job_main("distill.pretrain", PretrainConfig, run)
