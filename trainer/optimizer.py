"""AdamW on float32 masters, the gradient norm, and the learning-rate schedule.

Every operation of the update is one rounded multiplication, addition, division or square root, and
every sum has a fixed tree: bits depend neither on the thread count nor on an element's place.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainer.config import TrainerConfig

SUM_BLOCK = 1024


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Rate of optimiser step `step`, counted from 0.

    Warmup rises linearly to the peak: (step + 1) / warmup_steps. Afterwards, with p the share of
    the steps from warmup_steps to total_steps that are done: constant 1; linear 1 - p;
    cosine (1 + cos(pi p)) / 2, both falling towards final_lr_ratio.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.learning_rate
    progress = (step - config.warmup_steps) / max(config.total_steps - config.warmup_steps, 1)
    progress = min(progress, 1.0)
    left = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_lr_ratio + (1 - config.final_lr_ratio) * left)


def fixed_sum(values: Tensor) -> float:
    """Float64 sum of any tensor as a tree of blocks of 1024.

    torch splits the sum of one row between threads; of two rows or more it never does.
    """
    flat = values.detach().double().reshape(-1)
    while flat.numel() > 1:
        missing = -flat.numel() % SUM_BLOCK
        blocks = torch.nn.functional.pad(flat, (0, missing)).reshape(-1, SUM_BLOCK)
        if blocks.shape[0] == 1:
            blocks = blocks.expand(2, -1).contiguous()
            return blocks.sum(1)[0].item()
        flat = blocks.sum(1)
    return flat.sum().item()


def gradient_norm(gradients: Iterable[Tensor]) -> float:
    """Euclidean norm over every gradient, summed in the order given."""
    total = 0.0
    for gradient in gradients:
        total += fixed_sum(gradient.detach().double().square())
    return math.sqrt(total) if math.isfinite(total) else total


class AdamW:
    """Loshchilov and Hutter 2019, "Decoupled weight decay regularization".

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; with c1 = 1 - b1^t, c2 = 1 - b2^t:
    w = w - lr weight_decay w - (lr / c1) m / (sqrt(v / c2) + epsilon).
    Decay spares tensors of one dimension.

    Attributes:
        masters: float32 tensors that are stepped in place.
        first, second: m and v, float32, in the order of the masters.
        steps: t, updates so far.
    """

    def __init__(self, masters: Sequence[Tensor], config: TrainerConfig) -> None:
        self.masters = list(masters)
        self.config = config
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Update the masters; the gradients, float32 and already clipped, are used up."""
        self.steps += 1
        for master, gradient, first, second in zip(
            self.masters, gradients, self.first, self.second, strict=True
        ):
            self._step_one(master, gradient, first, second, rate)

    def _step_one(
        self, master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rate: float
    ) -> None:
        beta1, beta2 = self.config.beta1, self.config.beta2
        second.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
        first.mul_(beta1).add_(gradient.mul_(1 - beta1))
        if self.config.weight_decay and master.dim() > 1:
            master.mul_(1 - rate * self.config.weight_decay)
        divisor = (second / (1 - beta2**self.steps)).sqrt_().add_(self.config.epsilon)
        master.sub_((first * (rate / (1 - beta1**self.steps))).div_(divisor))
