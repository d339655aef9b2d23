"""Scoring: log-probabilities of given completion tokens by the one forward that training uses."""

from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shared_ops.model.decoder import Decoder
from trainer.packed_kv import PackedKV
from trainer.packing import MicroBatch, pack
from trainer.sample import TrainSample


class Scores(Protocol):
    """What scores micro-batches; the methods are those of `Scorer`."""

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]: ...

    def trace(self, sample: TrainSample, position: int) -> dict[str, Tensor]: ...


class Scorer(NamedTuple):
    """A decoder and the number of vocabulary rows that a token may come from."""

    model: Decoder
    vocab_limit: int

    def score(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """float32 log-probabilities [N] and entropies [N] in nats, both differentiable."""
        hidden_ND = self._hidden(batch).index_select(0, batch.rows_N)
        return self.model.ops.token_logprobs(
            hidden_ND,
            self.model.head_VD,
            batch.targets_N,
            batch.temperature_N,
            self.vocab_limit,
            batch.restriction,
        )

    @torch.no_grad()
    def trace(self, sample: TrainSample, position: int) -> dict[str, Tensor]:
        """See Trainer.trace."""
        first = len(sample.prompt_ids)
        if position - first not in sample.places:
            raise ValueError(
                f"position is {position}: the drawn tokens of {sample.name} are between "
                f"{first + sample.places[0]} and {first + sample.places[-1]}"
            )
        rows: dict[str, Tensor] = {}

        def observe(name: str, value: Tensor) -> None:
            rows[name] = value[:position].clone()

        batch = pack([sample], (0,), self.model.head_VD.device)
        hidden_1D = self._hidden(batch, observe)[position - 1 : position]
        place = sample.places.index(position - first)
        target = slice(place, place + 1)
        head = (self.model.head_VD, batch.temperature_N[target], self.vocab_limit)
        rows["logits"] = self.model.ops.scaled_logits(hidden_1D, *head)[0]
        rows["logprob"] = self.model.ops.token_logprobs(
            hidden_1D, head[0], batch.targets_N[target], *head[1:]
        )[0][0]
        return rows

    def _hidden(self, batch: MicroBatch, observe=None) -> Tensor:
        self.model.reserve(max(end - start for start, end in pairwise(batch.starts)))
        kv = PackedKV(self.model.ops.packed_attention, batch.starts)
        return self.model(batch.token_ids_T, batch.positions_T, kv, observe)
