"""What an engine may be told. Only dtype, device and exact can change a bit of its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shared_ops.model.lora_config import NO_LORA, LoraConfig

InFlight = Literal["recompute", "keep", "abort"]
DTYPES = ("float32", "bfloat16", "float16")


class EngineError(ValueError):
    """An engine setting that cannot work; the message names the setting and the mend."""


@dataclass(frozen=True)
class EngineConfig:
    """Limits and places of an engine.

    Attributes:
        device: "cpu", "cuda", "cuda:1", or "auto" (cuda where there is one).
        dtype: of weights and KV: "float32", "bfloat16" or "float16".
        page_size: tokens in a KV page.
        num_pages: KV pages; None makes room for `max_sequences` of 2048 tokens (or of the model's
            own limit, where that is shorter) within `memory_share` of the memory that is free.
        max_batch_tokens: tokens in one forward.
        max_sequences: sequences that hold KV at the same time.
        prefill_chunk: most tokens of one sequence in one forward.
        prefix_cache: keep full pages by content and share them, also among the n samples of a
            request.
        cuda_graphs: on CUDA, launch decode steps as captured graphs and plan a step ahead.
        in_flight: what `load_weights` does with unfinished requests unless told otherwise:
            "recompute" their KV under the new weights and go on, "keep" the KV of the old ones and
            go on (no trainer can compute such logprobs again, so an exact engine refuses it), or
            "abort" and return them, for `Engine.resume`.
        exact: False lets bits move with the batch, for measurements only: torch's own ops on a CPU;
            on CUDA this engine with the vendor library's products and attention split by load.
        lora: with a rank or a folder, low-rank adapters stand beside the weights, which then stay
            as they are: `load_weights` takes adapters. They start from the folder, or at 0.
    """

    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    num_pages: int | None = None
    max_batch_tokens: int = 2048
    max_sequences: int = 128
    prefill_chunk: int = 512
    prefix_cache: bool = True
    exact: bool = True
    memory_share: float = 0.4
    cuda_graphs: bool = True
    in_flight: InFlight = "recompute"
    lora: LoraConfig = NO_LORA

    def __post_init__(self) -> None:
        for name in ("page_size", "max_batch_tokens", "max_sequences", "prefill_chunk"):
            _require_positive(name, getattr(self, name))
        if self.num_pages is not None:
            _require_positive("num_pages", self.num_pages)
        if self.dtype not in DTYPES:
            raise EngineError(f"dtype {self.dtype!r} is unknown: use one of {', '.join(DTYPES)}")
        check_in_flight(self.in_flight, self.exact)
        if not 0 < self.memory_share <= 1:
            raise EngineError(
                f"memory_share is {self.memory_share}: use a number above 0 and up to 1"
            )


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EngineError(f"{name} is {value!r}: use a whole number of at least 1")


def check_in_flight(in_flight: str, exact: bool) -> None:
    """EngineError where a weight update may not do that."""
    if in_flight not in get_args(InFlight):
        raise EngineError(
            f"in_flight {in_flight!r} is unknown: use one of {', '.join(get_args(InFlight))}"
        )
    if in_flight == "keep" and exact:
        raise EngineError(
            'in_flight "keep" draws tokens that no trainer can score to the bit: use "recompute" or'
            ' "abort", or exact=False'
        )
