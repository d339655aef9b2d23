"""The trainer: score, compare bits, take one optimiser step, publish."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared_ops.attest import attest
from shared_ops.attest_report import Report
from shared_ops.model.config import ModelConfig
from shared_ops.model.weights import Manifest
from shared_ops.numerics import require_plain_numerics
from trainer import checkpoint, metrics
from trainer.checks import check_fit, check_trainable
from trainer.config import TrainerConfig
from trainer.held import Held
from trainer.lag import KeptVersions, LagProver, with_fresh
from trainer.loss import Denominators
from trainer.metrics import TokenLog
from trainer.objective import counts, gather, objective
from trainer.optimizer import AdamW, gradient_norm, learning_rate
from trainer.packing import MicroBatch, idle, pack, split_samples, spread
from trainer.parity import FirstDifference, ParityError, ParityReport, compare_fresh
from trainer.publish import publish
from trainer.ranks import Ranks
from trainer.sample import TrainSample, TrainStats
from trainer.score import Scores


class Trainer:
    """One policy under training.

    Attributes:
        version: of the weights, from 0; every step adds one.
        steps: optimiser steps taken.
        num_tokens: prompt and completion tokens trained on so far, over every rank.
    """

    def __init__(self, model_folder: str | Path, config: TrainerConfig | None = None) -> None:
        """Load a model.

        Args:
            model_folder: Hugging Face folder; with beta > 0 it is the reference as well, and with
                adapters (config.lora) the frozen base.
            config: settings; None takes the defaults.

        Raises:
            ValueError: folder, device or setting that cannot be used, named with the mend.
            AttestationError: the contracts do not hold on this GPU or processor.
            NumericsError: a global setting of torch under which they cannot.
        """
        self.config = config or TrainerConfig()
        self.folder = Path(model_folder)
        self.ranks = Ranks(self.config.device)
        self.model_config = ModelConfig.from_folder(self.folder)
        self.lora = self.config.lora.settled()
        require_plain_numerics(self.ranks.device)
        if self.config.exact:
            self.attest().raise_if_broken()
        self.version = self.steps = self.num_tokens = 0
        self._held = self._hold()
        self.vocab_limit = self._held.vocab_limit
        self.optimizer = AdamW(self._held.masters.leaves(), self.config, self._held.copies())
        kept = KeptVersions(self.config.keep_versions, self.config.keep_versions_on)
        self._lag = LagProver(
            kept,
            self._held.weights,
            lambda weights, of: self._score(self._held.scorer_of(weights), of),
        )

    def _hold(self) -> Held:
        """One process alone holds all, whatever config.sharding asks."""
        kind = Held
        if self.config.sharding == "full" and self.ranks.count > 1:
            from trainer.sharding import Sharded

            kind = Sharded
        return kind(self.folder, self.model_config, self.config, self.lora, self.ranks)

    def attest(self) -> Report:
        """The contracts of the model's ops, checked on this machine with the threads in use."""
        device = self.ranks.device.type
        return attest(self.model_config, device=device, dtype=self.config.dtype, lora=self.lora)

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Score completions under the current weights, with the forward that `step` uses.

        A completion's bits depend on that sample and the weights only. Greedy samples
        (temperature 0) are scored at temperature 1.

        Args:
            samples: any number; advantages and versions are not looked at.

        Returns:
            float32 [C] on the CPU for each sample, 0 where loss_mask is False.

        Raises:
            ValueError: a sample that the model cannot take.
        """
        self._check_fit(samples)
        return self._score(self._held.scorer, samples)

    def _score(self, scorer: Scores, samples: Sequence[TrainSample]) -> list[Tensor]:
        require_plain_numerics(self.ranks.device)
        scored: list[Tensor] = []
        for batch in self._micro_batches(samples, range(len(samples)), self._held.together):
            logprobs_N, _ = scorer.score(batch)
            values = logprobs_N.cpu().split(batch.lengths)
            chosen = (samples[index] for index in batch.samples)
            scored += map(spread, chosen, values)
        return scored

    def with_old_logprobs(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples as several optimiser steps on one batch need them.

        Every token gets its proximal_logprobs, and a fresh one its old_logprobs: it stays proved
        (against behaviour_logprobs, bit for bit) after the first of those steps made it stale.

        Raises:
            ParityError: in bitwise mode, a fresh token differs or is NaN.
        """
        scored = self.logprobs(samples)
        self._require_equal(*compare_fresh(samples, scored, self.version))
        return [
            replace(
                sample,
                old_logprobs=with_fresh(sample, values.tolist(), self.version),
                proximal_logprobs=values.tolist(),
            )
            for sample, values in zip(samples, scored, strict=True)
        ]

    @torch.no_grad()
    def with_lag_proof(
        self, samples: Sequence[TrainSample], share: float = 1.0, seed: int = 0
    ) -> list[TrainSample]:
        """Score a random share of the stale tokens under the versions that drew them.

        Args:
            samples: of any versions; the fresh ones come back as they are.
            share: of the (sample, older version) pairs; at least one is scored where there are any.
            seed: of the choice, together with the current version.

        Returns:
            The samples with old_logprobs of the chosen tokens filled in; `step` counts them as
            `parity/lag_rescored_compared`.

        Raises:
            ValueError: a version that is not kept (keep_versions).
            ParityError: in bitwise mode, one of them differs or is NaN.
        """
        self._check_fit(samples)
        report, first, proved = self._lag.prove(samples, self.version, share, seed)
        self._require_equal(report, first)
        return proved

    def _require_equal(self, report: ParityReport, first: FirstDifference | None) -> None:
        """In bitwise mode, raise on every rank where a token differs on any."""
        if self.config.mode != "bitwise":
            return
        counts = self.ranks.sum([float(report.tokens_compared), float(report.tokens_differing)])
        compared, differing = map(int, counts)
        if differing:
            report = report._replace(tokens_compared=compared, tokens_differing=differing)
            raise ParityError(report, first)

    def step(self, samples: Sequence[TrainSample]) -> TrainStats:
        """Compare bits, then take one optimiser step.

        Samples with no gradient (advantage 0 without a reference, or masked) are compared and
        counted like the others, without a backward.

        Args:
            samples: the whole optimiser batch (of this rank, at least one).

        Returns:
            What was done.

        Raises:
            ParityError: in bitwise mode, a token differs, is NaN, or none could be compared.
            FloatingPointError: the gradient is not finite.
            ValueError: a sample that cannot be trained on.
            After any of these, weights, optimiser and version are what they were.
        """
        require_plain_numerics(self.ranks.device)
        self.ranks.all_pass(lambda: self._check_step(samples))
        log, gradients = self._accumulate(samples)
        parity = metrics.check_parity(log, self.ranks)
        total = parity.total
        if self.config.mode == "bitwise" and (total.tokens_differing or not total.tokens_compared):
            raise ParityError(total, metrics.first_difference(log, samples))
        summary = metrics.summarise(log, parity, self.ranks)
        if self._held.reference is None:
            del summary["kl"]
        norm, rate = self._update(gradients)
        self.num_tokens += int(
            self.ranks.sum([float(sum(sample.length + 1 for sample in samples))])[0]
        )
        summary |= {"grad_norm": norm, "learning_rate": rate, "num_tokens": self.num_tokens}
        return TrainStats(
            step=self.steps,
            version=self.version,
            loss=summary["loss"],
            grad_norm=norm,
            learning_rate=rate,
            tokens_compared=total.tokens_compared,
            tokens_differing=total.tokens_differing,
            max_ulp=total.max_ulp,
            metrics=summary,
        )

    def _accumulate(self, samples: Sequence[TrainSample]) -> tuple[TokenLog, list[Tensor]]:
        """Forward, loss and backward of every micro-batch: token columns and float32 gradients."""
        denominators = self._denominators(samples)
        active = [i for i, sample in enumerate(samples) if self._has_gradient(sample)]
        inert = sorted(set(range(len(samples))) - set(active))
        self._held.drop_gradients()  # those of a step that was refused
        logs = []
        for batch in self._micro_batches(samples, active, True):
            loss, log = self._forward(batch, samples, denominators)
            self._held.backward(loss)
            logs.append(log)
        with torch.no_grad():
            for batch in self._micro_batches(samples, inert, self._held.together):
                logs.append(self._forward(batch, samples, denominators)[1])
        lengths = [len(sample.places) for sample in samples]
        log = metrics.in_sample_order([log for log in logs if log], active + inert, lengths)
        return log, self._held.take_gradients()

    def _micro_batches(
        self, samples: Sequence[TrainSample], indices: Sequence[int], together: bool
    ) -> Iterator[MicroBatch]:
        """together: end with idle ones, so that every rank has as many."""
        lengths = [samples[index].length for index in indices]
        groups = split_samples(lengths, self.config.micro_batch_tokens)
        missing = self.ranks.most(len(groups)) - len(groups) if together else 0
        for group in groups:
            chosen = tuple(indices[place] for place in group)
            yield pack(samples, chosen, self.ranks.device)
        for _ in range(missing):
            yield idle(self.ranks.device)

    def _has_gradient(self, sample: TrainSample) -> bool:
        every = self._held.reference is not None or self.config.entropy_coefficient != 0
        informs = sample.advantage != 0 or every
        return informs and counts(self.config, sample)

    def _denominators(self, samples: Sequence[TrainSample]) -> Denominators:
        counted = [sample for sample in samples if counts(self.config, sample)]
        tokens = sum(len(sample.places) for sample in counted)
        return Denominators(*self.ranks.sum([float(len(counted)), float(tokens)]))

    def _forward(
        self, batch: MicroBatch, samples: Sequence[TrainSample], denominators: Denominators
    ) -> tuple[Tensor, TokenLog | None]:
        """Loss and token columns; of an idle micro-batch a loss of 0 and none."""
        now_N, entropy_N = self._held.scorer.score(batch)
        reference_N = None
        if self._held.reference is not None:
            with torch.no_grad():
                reference_N, _ = self._held.reference.score(batch)
        if not batch.samples:
            return now_N.sum() * 0, None
        chosen = [samples[index] for index in batch.samples]
        given = gather(self.config, chosen, self.version, denominators, self.ranks.device)
        return objective(self.config, given, now_N, entropy_N, reference_N)

    def _update(self, gradients: list[Tensor]) -> tuple[float, float]:
        """Clip, step masters and working weights; returns norm and learning rate."""
        norm = gradient_norm(self._held.gathered(gradients))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm of step {self.steps + 1} is {norm}; nothing was updated: look "
                "at the rewards and behaviour_logprobs of this batch, or lower learning_rate"
            )
        limit = self.config.max_grad_norm
        scale = limit / norm if limit and norm > limit else 1.0
        rate = learning_rate(self.config, self.steps)
        self.optimizer.step(gradients, rate, scale)
        self.steps += 1
        self.version += 1
        return norm, rate

    def publish(self) -> tuple[Manifest, dict[str, Tensor]]:
        """The working weights or adapters for a sampler; the tensors alias them (publish.py)."""
        self._lag.kept.add(self.version, self._held.weights)
        return publish(self.version, self._held.weights)

    def trace(self, sample: TrainSample, position: int) -> dict[str, Tensor]:
        """Each op's output at one drawn token, for finding the op where two programs part.

        Args:
            sample: its own prompt and completion are run alone.
            position: index of the drawn token in prompt + completion.

        Returns:
            Op name -> its output rows of tokens 0..position - 1, in the order of the forward;
            `logits` and `logprob` of the last one come at the end.

        Raises:
            ValueError: the position is not one of a drawn token.
        """
        self._check_fit([sample])
        return self._held.scorer.trace(sample, position)

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Write a checkpoint that continues to the bit (trainer/checkpoint.py).

        Args:
            path: its folder, which a Hugging Face loader can read as a model, or peft as adapters;
                replaced if there.
            extra: what the caller wants back, as JSON holds it (data position, pending samples).

        Raises:
            CheckpointError: `extra` is not JSON.
            OSError: disk full or folder not writable; nothing is left behind.
        """
        state = {
            "step": self.steps,
            "version": self.version,
            "num_tokens": self.num_tokens,
            "dtype": self.config.dtype,
            "base": self._held.weights.base,
            "scale": self._held.weights.scale,
            "extra": extra or {},
        }
        weights, tensors = self._held.whole_weights(), self._whole_state()
        if self.ranks.is_first:
            checkpoint.write(path, weights, self.folder, tensors, state)
        self.ranks.wait()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model and dtype; returns its `extra`.

        Raises:
            CheckpointError: missing, damaged, or of another model or dtype; nothing was changed.
        """
        state, tensors = checkpoint.read(path)
        checkpoint.check_base(path, state, self._held.weights)
        own = self._state_tensors()
        shapes = dict(zip(own, cycle(self._held.whole_shapes()), strict=False))
        checkpoint.check_same(path, state["dtype"], self.config.dtype, tensors, shapes)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self._held.rows(tensors[name]))
        self._held.refresh()
        self._lag.kept.forget()
        self.steps, self.version = state["step"], state["version"]
        self.num_tokens, self.optimizer.steps = state["num_tokens"], state["step"]
        return state["extra"]

    def _state_tensors(self) -> dict[str, Tensor]:
        """What this rank holds of every float32 tensor that training continues from, by name."""
        groups = {
            "master": self._held.masters.leaves(),
            "first moment": self.optimizer.first,
            "second moment": self.optimizer.second,
        }
        return {
            f"{group}: {name}": tensor
            for group, tensors in groups.items()
            for name, tensor in zip(self._held.masters.leaf_names(), tensors, strict=True)
        }

    def _whole_state(self) -> dict[str, Tensor]:
        """All of them, on the rank that writes files; nothing on the others."""
        own = self._state_tensors()
        whole = zip(own, self._held.gathered(list(own.values())), strict=True)
        return {name: tensor.cpu() for name, tensor in whole if self.ranks.is_first}

    def _check_step(self, samples: Sequence[TrainSample]) -> None:
        self._check_fit(samples)
        check_trainable(samples, self.version, self.config.mode)

    def _check_fit(self, samples: Sequence[TrainSample]) -> None:
        check_fit(samples, self.model_config.max_positions, self.vocab_limit)
