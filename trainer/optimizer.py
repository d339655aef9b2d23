"""AdamW on float32 masters, the gradient norm, and the learning-rate schedule.

Every operation of the update is one rounded multiplication, addition, division or square root, and
every sum has a fixed tree: bits depend neither on the thread count nor on an element's place. CUDA
takes them for all tensors in one launch (trainer/optimizer_kernels.py), with the same bits; the
norm's tree is another there.
"""

import functools
import importlib
import math
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from shared_ops.cuda import require_triton
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
    """Euclidean norm over every gradient, summed in the order given.

    One wait for the device in all. Gradients that are not a list are looked at one by one.
    """
    total = 0.0
    groups = [gradients] if isinstance(gradients, list) else ([one] for one in gradients)
    sums_on_device = []
    for group in groups:
        if group[0].is_cuda:
            sums_on_device.append(_kernels().square_sums(group))
            continue
        for gradient in group:
            total += fixed_sum(gradient.detach().double().square())
    if sums_on_device:
        total = torch.cat(sums_on_device).sum().item()
    return math.sqrt(total) if math.isfinite(total) else total


@functools.cache
def _kernels() -> ModuleType:
    require_triton()
    return importlib.import_module("trainer.optimizer_kernels")


class Numbers(NamedTuple):
    """Of one step; each is rounded to float32 where it is used.

    scale: of the gradient. keep: what weight decay leaves of a master. correction2: c2.
    rate: lr / c1.
    """

    scale: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    keep: float
    correction2: float
    epsilon: float
    rate: float


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

    def __init__(
        self,
        masters: Sequence[Tensor],
        config: TrainerConfig,
        copies: Sequence[Tensor] | None = None,
    ) -> None:
        """copies: what takes the masters' values over, in its own dtype, with every step."""
        self.masters = list(masters)
        self.copies = [None] * len(self.masters) if copies is None else list(copies)
        self.config = config
        self.first = [torch.zeros_like(master) for master in self.masters]
        self.second = [torch.zeros_like(master) for master in self.masters]
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float, scale: float = 1.0) -> None:
        """Update masters and copies; the gradients, float32, times `scale`, are used up."""
        self.steps += 1
        leaves = [*zip(self.masters, gradients, self.first, self.second, self.copies, strict=True)]
        numbers = self._numbers(rate, scale)
        if leaves[0][0].is_cuda:
            decays = [self._decays(master) for master in self.masters]
            _kernels().adamw(leaves, decays, numbers)
            return
        for leaf in leaves:
            self._step_one(*leaf, numbers)

    def _numbers(self, rate: float, scale: float) -> Numbers:
        beta1, beta2 = self.config.beta1, self.config.beta2
        return Numbers(
            scale=scale,
            beta1=beta1,
            rest1=1 - beta1,
            beta2=beta2,
            rest2=1 - beta2,
            keep=1 - rate * self.config.weight_decay,
            correction2=1 - beta2**self.steps,
            epsilon=self.config.epsilon,
            rate=rate / (1 - beta1**self.steps),
        )

    def _decays(self, master: Tensor) -> bool:
        return self.config.weight_decay != 0 and master.dim() > 1

    def _step_one(
        self,
        master: Tensor,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        copy: Tensor | None,
        numbers: Numbers,
    ) -> None:
        if numbers.scale != 1:
            gradient.mul_(numbers.scale)
        second.mul_(numbers.beta2).add_((gradient * gradient).mul_(numbers.rest2))
        first.mul_(numbers.beta1).add_(gradient.mul_(numbers.rest1))
        if self._decays(master):
            master.mul_(numbers.keep)
        # A tensor, because by a number CUDA divides as it multiplies by the rounded reciprocal.
        correction = torch.tensor(numbers.correction2, dtype=torch.float32, device=master.device)
        divisor = (second / correction).sqrt_().add_(numbers.epsilon)
        master.sub_((first * numbers.rate).div_(divisor))
        if copy is not None:
            copy.copy_(master)
