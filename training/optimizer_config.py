"""Settings of the optimizer, in a module that does not import Hydra."""

from dataclasses import dataclass, field


@dataclass
class OptimizerConfig:
    """Settings of torch's AdamW and of the learning-rate schedule."""

    # peak learning rate
    lr: float = 1e-3
    # AdamW betas
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # weight decay of matrices; norms and biases are not decayed
    weight_decay: float = 0.0
    # steps of the linear warm-up, after which the cosine starts
    warmup_steps: int = 20
    # learning rate at the end, as a share of the peak
    final_lr: float = 0.1
    # largest global gradient norm; 0 turns clipping off
    clip: float = 1.0
