"""When bits differ: which op is the first to put out other bits on the two sides."""

from typing import Any

from recipes.runtime import Sides
from trainer.sample import TrainSample


def first_differing_op(sides: Sides, sample: TrainSample, index: int) -> str:
    """The place of the first op whose output differs at completion token `index`.

    Both sides run the sample again and record every op's output row at that token: the sampler
    through chunked prefill and paged decode, the trainer through its packed forward.
    """
    position = len(sample.prompt_ids) + index
    sampler = sides.rollout.trace(
        sample.prompt_ids, sample.completion_ids, position, sample.temperature
    )
    trainer = sides.trainer.trace(sample, position)
    for name, value in sampler.items():
        if name in trainer and _differ(value, trainer[name]):
            return name
    if sides.rollout.weights_digest() != sides.trainer.weights_digest():
        return "weights (the digests differ)"
    return "none in a repeated run: the difference came with the batch, or with other weights"


def _differ(first: Any, second: Any) -> bool:
    """Bits, NaN counting as different."""
    import torch

    first, second = first.float().flatten(), second.float().flatten()
    if first.shape != second.shape:
        return True
    same = first.view(torch.int32) == second.view(torch.int32)
    return not bool((same & ~first.isnan()).all())
