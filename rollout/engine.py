"""The engine: requests in, completions with the logprobs they were drawn with out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from rollout.ahead import is_live, plan_after
from rollout.batch import build_batch
from rollout.config import EngineConfig, EngineError
from rollout.graphs import DecodeGraphs, Flight
from rollout.memory import choose_num_pages, require_weights_fit
from rollout.paged_kv import PagedKV
from rollout.request import (
    Completion,
    Request,
    RequestError,
    SamplingParams,
    checked_prompt,
    samples_of,
)
from rollout.sampler import sample
from rollout.scheduler import Scheduler, StepPlan
from rollout.trace import trace_rows
from shared_ops.attest import attest
from shared_ops.model.config import ModelConfig
from shared_ops.model.decoder import Decoder, dtype_of
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import Manifest, WeightsError, digest_of, load_folder
from shared_ops.opset import EXACT
from shared_ops.ordinary import ORDINARY

Progress = Callable[[int, int], None]


class Engine:
    """Serves one model. With config.exact, a request's tokens and logprobs depend on the weights,
    its prompt and its parameters only: not on other requests, limits, chunks, pages or the cache.

    Not thread-safe: one caller at a time.
    """

    def __init__(self, model_folder: str | Path, config: EngineConfig | None = None) -> None:
        """Load a Hugging Face folder.

        Raises:
            ConfigError, WeightsError: the folder cannot be used.
            EngineError: the device is not there, or weights or KV pages do not fit.
            AttestationError: on CUDA, the contracts do not hold on this GPU.
        """
        self.config = config or EngineConfig()
        self.device = find_device(self.config.device)
        self.dtype = dtype_of(self.config.dtype)
        self.model_config = ModelConfig.from_folder(model_folder)
        if self.device.type == "cuda":
            if self.config.exact:
                attest(self.model_config, device="cuda", dtype=self.config.dtype).raise_if_broken()
            require_weights_fit(self.model_config, self.dtype, self.device)
        self.weights = load_folder(model_folder, self.model_config, self.dtype, self.device)
        self.vocab_limit = vocab_limit(model_folder, self.model_config)
        self.ops = EXACT if self.config.exact else ORDINARY
        self.model = Decoder(self.model_config, self.weights, self.ops)
        num_pages = choose_num_pages(self.config, self.model_config, self.dtype, self.device)
        # Ordinary attention takes lengths from the host, which a captured step would freeze.
        is_captured = self.config.cuda_graphs and self.config.exact and self.device.type == "cuda"
        self.kv = self._new_kv(num_pages + is_captured)
        self.scheduler = Scheduler(self.config, num_pages)
        self.graphs: DecodeGraphs | None = None
        if is_captured:
            self.graphs = DecodeGraphs(
                self.config, self.model, self.kv, self.vocab_limit, spare_page=num_pages
            )
        self._flight: Flight | None = None
        self._kept: list[Completion] = []
        self._names = count()
        self._seconds = 0.0
        self._half_loaded = ""

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 until `load_weights`."""
        return self.scheduler.version

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to return."""
        return self.scheduler.has_work or bool(self._kept)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Complete prompts of token ids; the n completions of each, in prompt order.

        Requests that were added by hand run along; the next `step` returns what they finish here.
        progress(finished, total) is called whenever completions finish.

        Raises:
            RequestError: a prompt or its parameters cannot be served; none was started.
        """
        requests = [
            self._request(prompt, each)
            for prompt, each in zip(prompts, _one_each(params, len(prompts)), strict=True)
        ]
        done: dict[str, list[Completion]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._queue(request)
            self._run_until(done, sum(request.params.n for request in requests), progress)
        except BaseException:
            for name in done:
                self.scheduler.abort(name)
            raise
        return [sorted(each, key=lambda one: one.sample_index) for each in done.values()]

    def add_request(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Queue one prompt of token ids; its request id.

        Raises:
            RequestError: it cannot be served, ever.
        """
        return self._queue(self._request(prompt, params))

    def step(self) -> list[Completion]:
        """Run one forward; the completions that are finished (each of n as soon as it is)."""
        kept, self._kept = self._kept, []
        return kept + self._advance()

    def abort(self, request_id: str) -> list[Completion]:
        """End a request; its unfinished samples as they are, with finish_reason "abort".

        A request that is unknown or finished has none.
        """
        return self.scheduler.abort(request_id)

    def load_weights(self, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
        """Put other weights in place and prove it: the digest is taken of what now is in use.

        The prefix cache is dropped. Unfinished requests keep their tokens, recompute the KV of
        these under the new weights, and draw on with the new version.

        Raises:
            WeightsError: the tensors do not fit (nothing has changed), or the digest differs (the
                engine refuses to step until a load succeeds).
        """
        self._require_same_dtype(manifest)
        self._kept += self._land_flight()
        self._half_loaded = f"weights version {manifest.version} were not loaded whole"
        try:
            self.weights.copy_from(tensors)
        except WeightsError:
            self._half_loaded = ""
            raise
        digest = self.weights_digest()
        if digest != manifest.digest:
            raise WeightsError(
                f"weights version {manifest.version}: digest {digest[:16]} is loaded and"
                f" {manifest.digest[:16]} was published: publish them again"
            )
        self.scheduler.change_weights(manifest.version)
        self._half_loaded = ""

    def weights_digest(self) -> str:
        """sha256 of the weights in use, as in `Manifest.digest`."""
        return digest_of(self.weights.views())

    def stats(self) -> dict[str, float]:
        """Samples and pages now; tokens, and seconds in steps, since the start."""
        pool, counters = self.scheduler.pool, self.scheduler.counters
        seconds = max(self._seconds, 1e-9)
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free_pages": pool.free,
            "cached_pages": pool.idle,
            "held_pages": pool.num_pages - pool.available,
            "preempted": counters["sent_back"],
            "finished": counters["finished"],
            "steps": counters["steps"],
            "computed_tokens": counters["computed_tokens"],
            "drawn_tokens": counters["drawn_tokens"],
            "cache_hit_rate": counters["cached_tokens"] / max(1, counters["admitted_tokens"]),
            "step_seconds": self._seconds,
            "computed_tokens_per_second": counters["computed_tokens"] / seconds,
            "drawn_tokens_per_second": counters["drawn_tokens"] / seconds,
        }

    @torch.inference_mode()
    def trace(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        position: int,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        """What every op put out, in order, when the token at `position` was drawn.

        The given tokens are forced through chunked prefill and decode on pages of their own.

        Args:
            prompt_ids: as in the completion.
            token_ids: as in the completion.
            position: index in prompt + completion of the drawn token, at least len(prompt_ids).
            temperature: of the logits.

        Returns:
            op's place -> its output rows of tokens 0..`position` - 1; then "logits" and
            "logprob" of the last one.
        """
        return trace_rows(self, prompt_ids, token_ids, position, temperature)

    @torch.inference_mode()
    def _advance(self) -> list[Completion]:
        self._require_whole_weights()
        began = time.perf_counter()
        flight, self._flight = self._flight or self._launch(self.scheduler.plan()), None
        if flight is None:
            return []
        ahead = self._launch_after(flight)
        done = self._commit(*flight.landed())
        if ahead is not None and any(map(is_live, ahead.plan.rows)):
            self._flight = ahead
        self._seconds += time.perf_counter() - began
        return done

    def _launch(self, plan: StepPlan) -> Flight | None:
        """Start a step; None where there is nothing to do."""
        if not plan.rows:
            return None
        if self.graphs is not None and self.graphs.serves(plan):
            return self.graphs.launch(plan)
        batch = build_batch(plan, self.config.page_size, self.device)
        hidden_TD = self.model(batch.token_ids_T, batch.positions_T, self.kv.at(batch))
        tokens_B, logprobs_B = sample(
            hidden_TD[batch.last_B], self.model.head_VD, batch.draws, self.vocab_limit, self.ops
        )
        return Flight(plan, tokens_B, logprobs_B)

    def _launch_after(self, flight: Flight) -> Flight | None:
        """Start the step after one that is under way, where that can be planned already."""
        if self.graphs is None or not flight.is_decode:
            return None
        plan = plan_after(self.scheduler, flight.plan)
        return None if plan is None else self.graphs.launch(plan, after=flight)

    def _land_flight(self) -> list[Completion]:
        """Commit what is under way, so that pages and weights may change."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._commit(*flight.landed())

    def _commit(self, plan: StepPlan, tokens: list[int], logprobs: list[float]) -> list[Completion]:
        if not all(map(math.isfinite, logprobs)):
            raise FloatingPointError(
                f"weights version {self.version} give logits that are not finite: look for NaN or"
                f" infinity in the weights, or use a dtype of wider range than {self.config.dtype}"
            )
        return self.scheduler.commit(plan, tokens, logprobs)

    def _run_until(
        self, done: dict[str, list[Completion]], total: int, progress: Progress | None
    ) -> None:
        finished = 0
        while finished < total:
            completions = self._advance()
            for completion in completions:
                done.get(completion.request_id, self._kept).append(completion)
            own = sum(completion.request_id in done for completion in completions)
            finished += own
            if own and progress:
                progress(finished, total)

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        prompt_ids = checked_prompt(prompt, self.model_config.vocab_size)
        if self.config.exact and params.filters:
            raise RequestError(
                "top_p and top_k have no exact counterpart in the trainer: use top_p=1 and top_k=0,"
                " or EngineConfig(exact=False)"
            )
        length, limit = len(prompt_ids) + params.max_tokens, self.model_config.max_positions
        if length > limit:
            raise RequestError(
                f"a prompt of {len(prompt_ids)} tokens with max_tokens {params.max_tokens} exceeds"
                f" the model's {limit} positions: shorten the prompt or lower max_tokens"
            )
        self.scheduler.require_fits(len(prompt_ids), params.max_tokens)
        eos_ids = () if params.ignore_eos else self.model_config.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids).union(eos_ids)
        return Request(f"request-{next(self._names)}", prompt_ids, params, stop_ids)

    def _queue(self, request: Request) -> str:
        self.model.reserve(len(request.prompt_ids) + request.params.max_tokens)
        self.scheduler.add(samples_of(request))
        return request.request_id

    def _new_kv(self, num_pages: int) -> PagedKV:
        return PagedKV(
            self.model_config, num_pages, self.config.page_size, self.dtype, self.device, self.ops
        )

    def _require_same_dtype(self, manifest: Manifest) -> None:
        others = set(manifest.dtypes) - {self.config.dtype}
        if others:
            raise WeightsError(
                f"weights version {manifest.version} are {sorted(others)[0]} and the engine's dtype"
                f" is {self.config.dtype}: publish in the engine's dtype"
            )

    def _require_whole_weights(self) -> None:
        if self._half_loaded:
            raise RuntimeError(f"{self._half_loaded}: call load_weights again")


def find_device(name: str) -> torch.device:
    """EngineError where the device is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise EngineError(f'device {name!r} is unknown: use "cpu", "cuda" or "auto"') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineError(f'device {name!r} is not there: use "cpu" or "auto"')
    return device


def _one_each(
    params: SamplingParams | Sequence[SamplingParams], prompts: int
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if len(params) != prompts:
        raise RequestError(
            f"{len(params)} sampling parameters for {prompts} prompts: pass one for all or one each"
        )
    return params
