"""Settings of the optimizer, in a module that imports no Hydra packages."""

from dataclasses import dataclass, field


@dataclass
class OptimizerConfig:
    """torch's AdamW and its schedule."""

    lr: float = 1e-3  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW betas
    weight_decay: float = 0.0  # on matrices; norms and biases are never decayed
    warmup_steps: int = 20  # linear warm-up from 0; the cosine starts at its end
    final_lr: float = 0.1  # share of the peak that the cosine ends at
    clip: float = 1.0  # largest global gradient norm; 0 turns clipping off
