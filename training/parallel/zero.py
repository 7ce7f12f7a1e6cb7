"""ZeRO by DeepSpeed and accelerate: shards of optimizer states (1), gradients (2), weights (3).

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". The
optimizer is torch's AdamW, so DeepSpeed compiles nothing. Learning rate, divisor,
clipping and checkpoints belong to the loop. DeepSpeed is imported only here.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoding import devices
from decoding.errors import UserError
from training.optimizer import make_adamw, trained_parameters
from training.optimizer_config import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")
# gradients exchanged together; DeepSpeed keeps one buffer of this size, or two if it overlaps
BUCKET = 50_000_000


def plugin(stage: int, use_cpu: bool) -> Any:
    """Return accelerate's plugin for a ZeRO stage; `ZeroAdamW` completes its configuration.

    Raises UserError if DeepSpeed is not installed, and for `use_cpu` if it would use a GPU.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            f"parallel.kind is zero{stage}, but DeepSpeed is not installed. Run pip install "
            f"-e '.[train]'"
        )
    if use_cpu and devices.device_of("auto") == "cuda":
        raise UserError(
            f"parallel.kind is zero{stage} with target.device=cpu, but DeepSpeed would use the "
            f"GPU of this machine. Hide it with CUDA_VISIBLE_DEVICES="
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if use_cpu else "cuda")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if use_cpu:
        import deepspeed

        # DeepSpeed would compile its own exchange through shared memory when a rank starts. It
        # needs a C++ compiler, and a rank killed meanwhile leaves a lock for which every later run
        # waits without end. Gloo carries the same messages.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed uses deprecated names of torch, which warn in every step.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    from accelerate import DeepSpeedPlugin

    zero = {
        "stage": stage,
        "overlap_comm": not use_cpu,  # overlapping is done with CUDA streams
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    config = {
        # unused, as the loop forms the batches and clips, but required
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)


def unregister_from_transformers() -> None:
    """Undo accelerate's registration with transformers, which would empty models built later."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


class ZeroAdamW:
    """AdamW whose states DeepSpeed shards, with the interface of training.optimizer.MasterAdamW.

    Masters are always float32. DeepSpeed accumulates bfloat16 gradients in float32 in stages 2 and
    3, and in bfloat16 in stage 1.
    """

    has_copies = False  # DeepSpeed keeps gradients in its own accumulators

    def __init__(
        self, accelerator: Any, module: nn.Module, trained: nn.Module, config: OptimizerConfig
    ) -> None:
        """Prepare DeepSpeed's engine for the objective `module`, which contains `trained`.

        The module, an Objective of training/loop.py, must be on its device. Raises UserError for
        weights of several dtypes, or of one other than float32 and bfloat16.
        """
        named = trained_parameters(trained)
        dtypes = {parameter.dtype for parameter in module.parameters()}
        if len(dtypes) > 1:
            raise UserError(
                f"parallel=zero1, zero2 and zero3 need all weights in one dtype, but these have "
                f"{', '.join(map(str, sorted(dtypes, key=str)))}. Use parallel=ddp"
            )
        self.names, self.parameters = list(named), list(named.values())
        self.device = self.parameters[0].device
        self._clip = config.clip
        settings = accelerator.state.deepspeed_plugin.deepspeed_config
        if module.keeps_weights:
            settings["zero_optimization"]["stage"] = min(2, settings["zero_optimization"]["stage"])
        self.stage = settings["zero_optimization"]["stage"]
        _complete(settings, self.stage, dtypes.pop(), self.parameters)
        self.engine, _ = accelerator.prepare(module, make_adamw(named.items(), config, {}))
        self._make_states()

    def _make_states(self) -> None:
        """Create the optimizer states before the first step.

        DeepSpeed links shards to states as soon as the first group has them, when others have none.
        """
        optimizer = self.engine.optimizer
        flats = (
            optimizer.fp32_partitioned_groups_flat
            if self.stage == 3
            else optimizer.single_partition_of_fp32_groups
        )
        for flat in flats:
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device)}
            optimizer.state[flat] |= {key: torch.zeros_like(flat) for key in _MOMENTS}
        if self.stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()

    def collect(self) -> None:
        """Do nothing: DeepSpeed collects the gradients in its backward pass."""

    @property
    def _gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [
            share
            for shares in self.engine.optimizer.averaged_gradients.values()
            for share in shares or ()
        ]

    def norm(self) -> Tensor:
        """Return the norm of all gradients, over all ranks."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for share in self._gradients:
            square += share.double().square().sum()
        torch.distributed.all_reduce(square)
        return square.sqrt()

    def clip(self, norm: Tensor | None = None) -> Tensor:
        """Clip the gradients by their global norm and return the norm before clipping.

        norm: a global norm that also covers other gradients; None: the norm of these.
        """
        norm = self.norm() if norm is None else norm
        if self._clip > 0:
            # as torch.nn.utils.clip_grad_norm_
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
            for share in self._gradients:
                share.mul_(factor)
        return norm

    def step(self, lr: float) -> None:
        """Update the weights at learning rate `lr` from the gradients, then delete these."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.engine.step()

    def state(self, keep: bool) -> dict[str, Tensor]:
        """Return all state that the next step depends on, unsharded, named as in MasterAdamW.

        All ranks must call it; those without `keep` receive an empty dict.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        tensors: dict[str, Tensor] = {}
        step = next(iter(self.engine.optimizer.state.values()))["step"]
        for name, parameter in zip(self.names, self.parameters, strict=True):
            parts = {"master": safe_get_full_fp32_param(parameter), "step": step}
            parts |= {key: safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS}
            if keep:
                tensors |= {
                    f"{key}.{name}": value.detach().cpu().clone() for key, value in parts.items()
                }
        return tensors

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned. The weights themselves are loaded before sharding."""
        steps = [tensors[f"step.{name}"] for name in self.names if f"step.{name}" in tensors]
        for state in self.engine.optimizer.state.values():
            state["step"].copy_(steps[0] if steps else torch.zeros(()))
        for name, parameter in zip(self.names, self.parameters, strict=True):
            self._set(parameter, tensors[f"master.{name}"], None)
            for key in _MOMENTS if steps else ():
                self._set(parameter, tensors[f"{key}.{name}"], key)

    def _set(self, parameter: Any, value: Tensor, key: str | None) -> None:
        """Write this rank's shard of `value` to a state, or to the master if key is None."""
        from deepspeed import utils

        value = value.to(self.device, torch.float32)
        set_master = utils.safe_set_full_fp32_param
        set_state = utils.safe_set_full_optimizer_state
        if self.stage == 3:  # DeepSpeed sets full tensors only if the ranks divide their size
            set_master = utils.safe_set_local_fp32_param
            set_state = utils.safe_set_local_optimizer_state
            size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
            missing = size * torch.distributed.get_world_size() - value.numel()
            value = F.pad(value.flatten(), (0, missing))[rank * size : (rank + 1) * size]
        set_master(parameter, value) if key is None else set_state(parameter, value, key)


def gather_parameter(parameter: Tensor) -> Tensor:
    """Return a full copy of a parameter that DeepSpeed shards. All ranks must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_tensor")):
        return parameter.detach().clone()


def _complete(
    settings: dict[str, Any], stage: int, dtype: torch.dtype, parameters: Sequence[Tensor]
) -> None:
    """Add the settings that depend on the model to DeepSpeed's configuration.

    Raises UserError for a dtype other than float32 and bfloat16.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise UserError(
            f"loop.dtype is {str(dtype).removeprefix('torch.')}, but parallel=zero{stage} trains "
            f"in float32 or bfloat16. Set loop.dtype to one of these, or use parallel=ddp"
        )
    settings["bf16"] = {"enabled": dtype == torch.bfloat16}
    if dtype == torch.bfloat16 and stage > 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if stage == 3:  # a norm or bias is too small for a message
        vectors = (parameter.numel() for parameter in parameters if parameter.dim() < 2)
        limit = max(vectors, default=0)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = limit
