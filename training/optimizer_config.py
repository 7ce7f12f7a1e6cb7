"""Settings of the optimizer, in a module that imports no Hydra packages."""

from dataclasses import dataclass, field


@dataclass
class OptimizerConfig:
    """torch's AdamW and its schedule."""

    # peak learning rate
    lr: float = 1e-3
    # AdamW betas
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # on matrices; norms and biases are never decayed
    weight_decay: float = 0.0
    # linear warm-up from 0; the cosine starts at its end
    warmup_steps: int = 20
    # share of the peak that the cosine ends at
    final_lr: float = 0.1
    # largest global gradient norm; 0 turns clipping off
    clip: float = 1.0
