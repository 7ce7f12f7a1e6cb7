"""`python -m distill.pretrain`: train a LLaMA from scratch on text and chats.

It made the embedded target, and it is the control "same shape from scratch" that every pruned drafter is held against.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from decoding.errors import UserError
from distill import corpus
from distill.config import PretrainConfig
from distill.drafter_folder import write_model
from training.config import DataConfig
from training.data import Chat, read_chats, read_texts
from training.job import job_main
from training.loop import fit, total_steps
from training.models import build_llama, dtype_of, load_causal_lm
from training.objectives import LanguageModelling
from training.optimizer import count_parameters
from training.packing import PackedData, Sample, collate
from training.parallel import Parallel
from training.paths import resolve
from training.run_folder import RunFolder
from training.samples import chat_samples, text_samples
from training.tracker import Tracker


def run(config: PretrainConfig) -> Path:
    """Train, and write a complete model folder to output_dir/model. Returns it."""
    run_folder = RunFolder(config)
    model_folder = run_folder.path / "model"
    if run_folder.finished:
        print(f"finished before: {model_folder}")
        return model_folder
    torch.manual_seed(config.seed)
    parallel = Parallel(config.parallel)
    tokenizer_folder = resolve(config.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = build_llama(config.model, dtype_of(config.loop.dtype), **_base(tokenizer, config))
    if config.init_from and not config.dry_run:
        model.load_state_dict(load_causal_lm(resolve(config.init_from), model.dtype).state_dict())
    samples = read_samples(tokenizer, config.data, "train")
    data = PackedData(
        samples, config.data.max_length, config.loop.tokens_per_step // config.data.max_length, config.seed
    )
    steps = total_steps(config.loop, data)
    print(
        f"model: {count_parameters(model.parameters()) / 1e6:.1f} M parameters, {config.model.num_hidden_layers} layers"
    )
    print(
        f"data: {data.tokens:,} tokens in {len(data.rows):,} rows, {data.fill:.1%} full; {steps:,} steps, {steps / data.steps_per_epoch:.2f} epochs"
    )
    if config.dry_run:
        return model_folder
    held_out = read_samples(tokenizer, config.data, "held_out")
    objective = LanguageModelling(model)
    tracker = (
        Tracker(run_folder.path, config.tracker, config.experiment, run_folder.config) if parallel.is_main else None
    )
    progress = fit(
        "pretrain",
        objective,
        model,
        data,
        config.loop,
        parallel,
        run_folder.path,
        tracker,
        lambda: held_out_loss(objective, held_out, config),
    )
    if parallel.is_main:
        write_model(model, tokenizer_folder, model_folder, dtype_of(config.export_dtype))
        best = next(figures for figures in progress.evaluations if figures["step"] == progress.best_step)
        metrics = {
            "held_out_loss": best["loss"],
            "best_step": progress.best_step,
            "training_seconds": round(progress.seconds, 1),
        }
        run_folder.write_manifest([tokenizer_folder], {**metrics, "tokens": progress.tokens}, finished=True)
        print(f"held-out loss {best['loss']:.4f} nats a token after {progress.seconds:.0f} s; model: {model_folder}")
    parallel.close()
    return model_folder


def read_samples(tokenizer: Any, data: DataConfig, split: corpus.Split) -> list[Sample]:
    """Samples of the `train` or `held_out` split, and a printed account of what was used and what was not."""
    chat_paths = data.chats if split == "train" else data.held_out_chats
    text_paths = data.texts if split == "train" else data.held_out_texts
    samples: list[Sample] = []
    documents: list[str] = []
    chats: list[Chat] = []
    if "embedded:stdlib" in text_paths:
        documents += corpus.documents(split)
    if "embedded:stdlib" in chat_paths:
        chats += [
            Chat(str(number), messages, f"embedded:stdlib:{number}")
            for number, messages in enumerate(corpus.chats(split))
        ]
    text_files = [resolve(path) for path in text_paths if path != "embedded:stdlib"]
    chat_files = [resolve(path) for path in chat_paths if path != "embedded:stdlib"]
    documents += read_texts(text_files, max_bad=data.max_bad)[0] if text_files else []
    chats += read_chats(chat_files, max_bad=data.max_bad)[0] if chat_files else []
    limit = data.max_samples or None
    for what, (new, account) in {
        "texts": text_samples(tokenizer, documents[:limit], data.max_length),
        "chats": chat_samples(tokenizer, chats[:limit], data.template, data.max_length, data.train_on, data.max_bad),
    }.items():
        if account.read:
            print(f"{split} {account.line(what)}")
        samples += new
    if not samples:
        raise UserError(
            f"the {split} split is empty: give data.{'' if split == 'train' else 'held_out_'}chats or _texts"
        )
    return samples


@torch.no_grad()
def held_out_loss(objective: LanguageModelling, samples: list[Sample], config: PretrainConfig) -> dict[str, float]:
    """Mean cross-entropy in nats over the supervised held-out tokens; the score is its negative."""
    capacity = config.data.max_length
    packed = PackedData(samples, capacity, 1, 0)
    per_forward = max(1, config.loop.micro_batch_tokens // capacity)
    total = 0.0
    device = next(objective.parameters()).device
    for start in range(0, len(packed.rows), per_forward):
        batch = collate(samples, packed.rows[start : start + per_forward], capacity, device)
        total += float(objective(batch)[0])
    loss = total / packed.supervised
    return {"loss": loss, "score": -loss}


def _base(tokenizer: Any, config: PretrainConfig) -> dict[str, Any]:
    shape = config.model
    missing = [
        name for name in ("hidden_size", "num_attention_heads", "intermediate_size") if getattr(shape, name) == 0
    ]
    if missing:
        raise UserError(
            f"model.{missing[0]} is 0: a model from scratch needs every width given (there is no target to take it from)"
        )
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
