"""The parts of a run between its loop and the two sides: records, parity, log, checkpoints."""

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from recipes.accuracy import Accuracy
from recipes.asking import source_of
from recipes.audit import first_differing_op, require_all_compared, require_known_policy
from recipes.drawing import Drawn
from recipes.durable import read_lines
from recipes.evaluate import as_metrics, best_step, evaluate, rewarded_form, sampled_kind
from recipes.plan import signal_line
from recipes.run_folder import RunFolder
from recipes.runlog import RunLog
from recipes.runtime import Sides
from recipes.settings import RunConfig
from recipes.task import Task
from trainer.advantage import advantages, count_rewards
from trainer.checkpoint import CheckpointError, find_latest, keep_last
from trainer.parity import ParityError
from trainer.sample import TrainSample, TrainStats


class Job:
    """One run under way: `begin`, then for each step the methods below, then `end`.

    A resumed run's last checkpoint is loaded when it is made.

    source: gives the groups of each step.
    published: versions of the weights, the newest and as many before it as tokens may be old.
    """

    def __init__(self, config: RunConfig, folder: RunFolder, task: Task, sides: Sides):
        self.config, self.folder, self.task, self.sides = config, folder, task, sides
        self.before: dict[str, Accuracy] = {}
        self.weights_equal = False
        self.published: deque[int] = deque(maxlen=(config.max_lag or 0) + 1)
        latest = find_latest(folder.checkpoints) if folder.resumed else None
        if latest is None and any(folder.checkpoints.glob("step-*")):
            raise CheckpointError(
                f"--resume: every checkpoint in {folder.checkpoints} is damaged, and nothing was "
                "changed: mend one, or start a new run in another --out"
            )
        self.resumed = sides.trainer.load(str(latest)) if latest else {}
        started = self.resumed.get("next_step", 0)
        asked = {"position": started * config.prompts_per_step, **self.resumed}
        self.source = source_of(config, task, sides.rollout, asked)
        self.log = RunLog(
            folder.path,
            total_steps=config.steps,
            wandb_mode=config.wandb,
            tensorboard=config.tensorboard,
            trackio=config.trackio,
            config=dataclasses.asdict(config),
            resume_step=started if folder.resumed else None,
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.log.stopped(f"{type(error).__name__}: {error}")
        self.log.close(exit_code=0 if kind is None else 1)

    def begin(self) -> int:
        """Align both sides, and evaluate at the start of a new run; the step to begin with.

        Raises:
            RuntimeSetupError: the sides compute different bits.
            WeightsError: the engine does not hold what was published.
        """
        step = self.resumed.get("next_step", 0)
        if self.config.rollout.exact:
            self.log.say(self.sides.attest())
        self.sync_weights()
        if step:
            self.before = {kind: Accuracy(*pair) for kind, pair in self.resumed["before"].items()}
            self.log.say(f"resumed: step {step + 1} of {self.config.steps} comes next")
        else:
            self.before = self._evaluate("before", step)
        return step

    def sync_weights(self) -> None:
        """Publish the trainer's weights into the engine.

        Raises:
            WeightsError: the digests differ afterwards.
        """
        self.sides.sync_weights()
        self.published.append(self.sides.trainer.version())

    def _evaluate(self, when: str, step: int) -> dict[str, Accuracy]:
        results = evaluate(self.sides, self.task, self.config)
        for kind, accuracy in results.items():
            self.log.say(f"{when:<7} {kind.replace('_', ', '):<16} {accuracy}")
        if results and when == "before":
            kind = sampled_kind(self.config.evaluation.samples, rewarded_form(self.config))
            share = results[kind].share
            self.log.say(signal_line(share, self.config, "measured"))
        if results:
            self.log.evaluation(step, as_metrics(results))
        return results

    def samples(self, step: int, drawn: Drawn) -> list[TrainSample]:
        """One TrainSample a completion, group after group; no judgement, no advantage.

        Request ids name step, prompt and sample, so that a resumed run writes the same ones.
        """
        totals = drawn.by_group()
        shares = [[0.0] * len(group) for group in totals]
        kept = advantages([totals[i] for i in drawn.kept], self.config.trainer.advantage)
        for index, share in zip(drawn.kept, kept, strict=True):
            shares[index] = share
        return [
            TrainSample.of(
                one,
                advantage,
                self.config.temperature,
                f"step-{step + 1}/prompt-{place}/sample-{one.sample_index}",
            )
            for place, (group, group_advantages) in enumerate(
                zip(drawn.groups, shares, strict=True)
            )
            for one, advantage in zip(group, group_advantages, strict=True)
        ]

    def update(self, samples: Sequence[TrainSample]) -> list[TrainStats]:
        """Prove parity and take the batch's optimiser steps.

        Raises:
            ParityError: naming the first differing token and the op to look at.
            ProofError: the batch was drawn by other weights, or not all of it was compared.
        """
        batch, count = list(samples), min(self.config.updates_per_batch, len(samples))
        trainer, lag = self.sides.trainer, self.config.max_lag or 0
        version = trainer.version()
        self.weights_equal = require_known_policy(self.sides, batch, self.published[0], version)
        try:
            if lag:
                # The weights of tis and mis need every stale token's own value.
                share = self.config.lag_share if self.config.mode == "bitwise" else 1.0
                batch = trainer.with_lag_proof(batch, share, self.config.seed)
            if count > 1:
                batch = trainer.with_old_logprobs(batch)
            edges = [len(batch) * i // count for i in range(count + 1)]
            stats = [trainer.step(batch[first:last]) for first, last in pairwise(edges)]
        except ParityError as error:
            raise self._explained(error, batch, version) from error
        require_all_compared(stats, batch, version)
        return stats

    def _explained(self, error: ParityError, batch: list[TrainSample], version: int) -> ParityError:
        """With the op to look at; both sides can repeat only what the weights now have drawn."""
        if error.first is None:
            return error
        sample = next(s for s in batch if s.request_id == error.first.request_id)
        if sample.policy_versions[error.first.position] != version:
            return error
        return error.with_op(first_differing_op(self.sides, sample, error.first))

    def log_step(
        self,
        step: int,
        drawn: Drawn,
        samples: Sequence[TrainSample],
        stats: Sequence[TrainStats],
        seconds: dict[str, float],
    ) -> None:
        """Write the step's line, its completions, and the console's line."""
        tokens = [len(sample.completion_ids) for sample in samples]
        trained = sum(sample.length + 1 for sample in drawn.trained(samples))
        metrics = {
            **_over_updates(stats),
            "parity/weights_equal": int(self.weights_equal),
            **self.source.counts(),
            **self._reward_metrics(drawn),
            **_lengths(samples, tokens),
            "step_time": sum(seconds.values()),
            **{f"time/{name}": value for name, value in seconds.items()},
            "tokens_per_second/rollout": sum(tokens) / self._rollout_seconds(seconds),
            "tokens_per_second/train": trained / seconds["train"],
        }
        self.log.step(step + 1, metrics, self._completions(drawn, samples))

    def _rollout_seconds(self, seconds: dict[str, float]) -> float:
        """Rollouts that go on while the trainer works take the whole step."""
        return sum(seconds.values()) if self.config.max_lag else seconds["rollout"]

    def _reward_metrics(self, drawn: Drawn) -> dict[str, float]:
        """Over all that was drawn: dynamic sampling does not make rewards look better."""
        rewards = drawn.rewards
        judged = [reward for reward in rewards.totals if reward is not None]
        mean = sum(judged) / max(1, len(judged))
        variance = sum((reward - mean) ** 2 for reward in judged) / max(1, len(judged) - 1)
        counts = count_rewards(drawn.by_group())
        filtered = {
            "filter_groups/num_gen_batches": drawn.rounds,
            "filter_groups/groups_drawn": len(drawn.groups),
            "filter_groups/groups_trained": len(drawn.kept),
        }
        return {
            "reward": mean,
            "reward_std": variance**0.5,
            **rewards.means(),
            "rewards/missing": counts.missing,
            "frac_reward_zero_std": counts.dead / counts.groups,
            **(filtered if self.config.filter_groups.enable else {}),
        }

    def _completions(self, drawn: Drawn, samples) -> list[dict[str, Any]]:
        rewards, kept = drawn.rewards, set(drawn.kept)
        flat = [(i in kept, one) for i, group in enumerate(drawn.groups) for one in group]
        return [
            {
                "request_id": sample.request_id,
                "prompt": self.task.tokenizer.decode(list(one.prompt_ids)),
                "completion": self.task.text(one.token_ids),
                "tokens": len(one.token_ids),
                "reward": rewards.totals[index],
                "rewards": {name: each[index] for name, each in rewards.by_function.items()},
                "advantage": sample.advantage,
                "finish_reason": one.finish_reason,
                "policy_version": one.policy_versions[-1],
                **({"trained": trained} if self.config.filter_groups.enable else {}),
            }
            for index, ((trained, one), sample) in enumerate(zip(flat, samples, strict=True))
        ]

    def finish_step(self, step: int) -> None:
        """Evaluate, then save, where it is due: a run killed between the two repeats both."""
        done, config = step + 1, self.config
        every = config.evaluation.every
        if every and done % every == 0 and done < config.steps:
            self._evaluate(f"step {done}", done)
        best = self._best()
        if done % config.save_every == 0 or done in (config.steps, best):
            before = {k: dataclasses.astuple(a) for k, a in self.before.items()}
            extra = {"next_step": done, "before": before, **self.source.state()}
            self.sides.trainer.save(str(self.folder.checkpoint(done)), extra)
            protected = [self.folder.checkpoint(best)] if best else []
            keep_last(self.folder.checkpoints, config.keep_checkpoints, protected)

    def _best(self) -> int | None:
        """The step with the best evaluation so far, where `evaluation.every` asks for several."""
        if not self.config.evaluation.every:
            return None
        samples = self.config.evaluation.samples
        evaluations = read_lines(self.log.evaluations_path)
        return best_step(evaluations, samples, rewarded_form(self.config))

    def end(self) -> dict[str, str]:
        """Evaluate, and close the log with its table and picture; the paths of all files."""
        after = self._evaluate("after", self.config.steps)
        summary: dict[str, Any] = {}
        for kind, accuracy in after.items():
            name = kind.replace("_", ", ")
            summary[f"{name} accuracy"] = f"{self.before[kind]}  ->  {accuracy}"
        if best := self._best():
            summary["best checkpoint"] = self.folder.checkpoint(best).name
        self.log.say(f"checkpoints  {self.folder.checkpoints}")
        return self.log.finish(summary) | {"checkpoints": str(self.folder.checkpoints)}


def _lengths(samples: Sequence[TrainSample], tokens: Sequence[int]) -> dict[str, float]:
    ended = [n for n, sample in zip(tokens, samples, strict=True) if not sample.truncated]
    return {
        "completions/mean_length": sum(tokens) / len(tokens),
        "completions/clipped_ratio": 1.0 - len(ended) / len(tokens),
        "completions/mean_terminated_length": sum(ended) / max(1, len(ended)),
    }


def _over_updates(stats: Sequence[TrainStats]) -> dict[str, Any]:
    """Metrics of a step with several updates: counts add, extremes hold, the rest is the mean."""
    merged: dict[str, Any] = {}
    for name in {name: None for each in stats for name in each.metrics}:
        values = [each.metrics[name] for each in stats if name in each.metrics]
        # An update that compared nothing has no difference to report.
        values = [value for value in values if value == value] or values
        if name == "num_tokens":
            merged[name] = values[-1]
        elif name.endswith(("compared", "differing")) or name.startswith("lag/tokens/"):
            merged[name] = sum(values)
        elif name.endswith(("max_ulp", "/max", "_max")):
            merged[name] = max(values)
        elif name.endswith("/min"):
            merged[name] = min(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


class Stopwatch:
    """Seconds of a step's parts: call with a name when a part ends; equal names add up."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
