"""The engine: requests in, completions with the logprobs they were drawn with out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rollout.admission import Limits, check_resumable, checked_request, one_each, raise_if_failed
from rollout.ahead import is_live, plan_after
from rollout.batch import build_batch
from rollout.config import EngineConfig, InFlight, check_in_flight
from rollout.graphs import DecodeGraphs, Flight
from rollout.loading import adapters_beside, check_publication
from rollout.memory import choose_num_pages, find_device, naming_memory, require_weights_fit
from rollout.paged_kv import PagedKV
from rollout.params import SamplingParams
from rollout.request import Completion, Environment, Request, samples_of
from rollout.sampler import sample
from rollout.scheduler import Scheduler, StepPlan
from rollout.stops import Decode
from rollout.trace import trace_rows
from shared_ops.attest import attest
from shared_ops.attest_report import Report
from shared_ops.model.config import ModelConfig
from shared_ops.model.decoder import Decoder, dtype_of
from shared_ops.model.vocabulary import vocab_limit
from shared_ops.model.weights import Leaves, Manifest, WeightsError, digest_of, load_folder
from shared_ops.numerics import require_plain_numerics
from shared_ops.unconstrained import sampler_ops

Progress = Callable[[int, int], None]
OnError = Literal["raise", "return"]


class Engine:
    """Serves one model. With config.exact, a request's tokens and logprobs depend on the weights,
    its prompt and its parameters only: not on other requests, limits, chunks, pages or the cache.

    Not thread-safe: one caller at a time.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: EngineConfig | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Load a Hugging Face folder. decode: token ids to text, needed for stop strings only.

        `on_step`, if set, is called with the engine after each step.

        Raises:
            ConfigError, WeightsError: the folder cannot be used.
            EngineError: the device is not there, or weights or KV pages do not fit.
            AttestationError: the contracts do not hold on this GPU or processor.
            NumericsError: a global setting of torch under which they cannot.
        """
        self.config = config or EngineConfig()
        self.device = find_device(self.config.device)
        self.dtype = dtype_of(self.config.dtype)
        self.model_config = ModelConfig.from_folder(model_folder)
        self.lora = self.config.lora.settled()
        require_plain_numerics(self.device)
        if self.config.exact:
            self.attest().raise_if_broken()
        if self.device.type == "cuda":
            require_weights_fit(self.model_config, self.dtype, self.device)
        self.weights = load_folder(model_folder, self.model_config, self.dtype, self.device)
        self.adapters = adapters_beside(self.weights, self.lora) if self.lora.rank else None
        # What load_weights replaces.
        self._loaded: Leaves = self.adapters or self.weights
        self.vocab_limit = vocab_limit(model_folder, self.model_config)
        self.limits = Limits(
            self.model_config.vocab_size,
            self.vocab_limit,
            self.model_config.max_positions,
            tuple(self.model_config.eos_token_ids),
            decode,
        )
        self.on_step: Callable[[Engine], None] | None = None
        self.ops = sampler_ops(self.config.exact, self.device)
        self.model = Decoder(self.model_config, self.weights, self.ops, adapters=self.adapters)
        num_pages = choose_num_pages(self.config, self.model_config, self.dtype, self.device)
        is_captured = self.config.cuda_graphs and self.device.type == "cuda"
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
        environment: Environment | None = None,
        on_error: OnError = "raise",
    ) -> list[list[Completion]]:
        """Complete prompts of token ids; the n completions of each, in prompt order.

        Requests that were added by hand run along; the next `step` returns what they finish here.
        progress(finished, total) is called whenever completions finish.
        environment(completion) is asked after each stop for tokens to append (see `add_request`).
        on_error: what a completion that fails does: "raise" ends the call and the rest of it,
            "return" leaves it among the others, with finish_reason "error".

        Raises:
            RequestError: a prompt or its parameters cannot be served; none was started.
            FloatingPointError: logits are not finite. RuntimeError: the environment failed.
        """
        requests = [
            self._request(prompt, each, environment)
            for prompt, each in zip(prompts, one_each(params, len(prompts)), strict=True)
        ]
        done: dict[str, list[Completion]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._queue(request)
            total = sum(request.params.n for request in requests)
            self._run_until(done, total, progress, on_error)
        except BaseException:
            for name in done:
                self.scheduler.abort(name)
            raise
        return [sorted(each, key=lambda one: one.sample_index) for each in done.values()]

    def add_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> str:
        """Queue one prompt of token ids; its request id.

        environment: called after a stop with the completion so far; the token ids that it returns
            are appended and drawing goes on, nothing or None ends the completion. They count
            towards max_tokens; what leaves no room to draw is not appended, and the reason is then
            "length". If it raises, its request alone ends, with "error".

        Raises:
            RequestError: it cannot be served, ever.
        """
        return self._queue(self._request(prompt, params, environment))

    def check_request(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """RequestError where `add_request` would refuse; nothing is queued."""
        self._request(prompt, params)

    def resume(
        self,
        completion: Completion,
        params: SamplingParams,
        environment: Environment | None = None,
    ) -> str:
        """Go on with an aborted completion, as if it had never been aborted; its new request id.

        params: as before; n and first_sample are taken from the completion.

        Raises:
            RequestError: it was not aborted, or max_tokens are drawn already.
        """
        check_resumable(completion, params)
        params = replace(params, n=1, first_sample=completion.sample_index)
        return self._queue(self._request(completion.prompt_ids, params, environment), completion)

    def step(self) -> list[Completion]:
        """Run one forward; the completions that are finished (each of n as soon as it is)."""
        kept, self._kept = self._kept, []
        return kept + self._advance()

    def abort(self, request_id: str) -> list[Completion]:
        """End a request; its unfinished samples as they are, with finish_reason "abort".

        A request that is unknown or finished has none.
        """
        return self.scheduler.abort(request_id)

    def load_weights(
        self, manifest: Manifest, tensors: dict[str, Tensor], in_flight: InFlight | None = None
    ) -> list[Completion]:
        """Put other weights in place and prove it: the digest is taken of what now is in use.

        With config.lora these are adapters, trained on the very weights that are here.
        The prefix cache is dropped. in_flight (default: config.in_flight) says what becomes of
        unfinished requests; those that it aborts are returned.

        Raises:
            EngineError: in_flight is not possible here.
            WeightsError: the tensors do not fit (nothing has changed), or the digest differs (the
                engine refuses to step until a load succeeds).
        """
        in_flight = in_flight or self.config.in_flight
        check_in_flight(in_flight, self.config.exact)
        check_publication(manifest, self.config.dtype, self._loaded)
        self._kept += self._land_flight()
        self._half_loaded = f"weights version {manifest.version} were not loaded whole"
        try:
            self._loaded.copy_from(tensors)
        except WeightsError:
            self._half_loaded = ""
            raise
        digest = self.weights_digest()
        if digest != manifest.digest:
            raise WeightsError(
                f"weights version {manifest.version}: digest {digest[:16]} is loaded and"
                f" {manifest.digest[:16]} was published: publish them again"
            )
        self._half_loaded = ""
        return self.scheduler.change_weights(manifest.version, in_flight)

    def attest(self) -> Report:
        """The contracts of the model's ops, checked on this machine with the threads in use."""
        return attest(
            self.model_config, device=self.device.type, dtype=self.config.dtype, lora=self.lora
        )

    def weights_digest(self) -> str:
        """Of the weights (or adapters) in use, taken now, as in `Manifest.digest`."""
        return digest_of(self._loaded.views())

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
        require_plain_numerics(self.device)
        began = time.perf_counter()
        flight, self._flight = self._flight or self._launch(self.scheduler.plan()), None
        if flight is None:
            return []
        ahead = self._launch_after(flight)
        done = self._commit(flight)
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
        with naming_memory(self.config, plan.num_tokens):
            batch = build_batch(plan, self.config.page_size, self.device)
            hidden_TD = self.model(batch.token_ids_T, batch.positions_T, self.kv.at(batch))
            drawn = sample(
                hidden_TD[batch.last_B], self.model.head_VD, batch.draws, self.vocab_limit, self.ops
            )
        return Flight(plan, drawn.tokens_B, drawn.logprobs_B, threshold_B=drawn.threshold_B)

    def _launch_after(self, flight: Flight) -> Flight | None:
        """Start the step after one that is under way, where that can be planned already."""
        if self.graphs is None or not flight.is_decode:
            return None
        plan = plan_after(self.scheduler, flight.plan)
        return None if plan is None else self.graphs.launch(plan, after=flight)

    def _land_flight(self) -> list[Completion]:
        """Commit what is under way, so that pages and weights may change."""
        flight, self._flight = self._flight, None
        return [] if flight is None else self._commit(flight)

    def _commit(self, flight: Flight) -> list[Completion]:
        thresholds = None if flight.threshold_B is None else flight.threshold_B.tolist()
        done = self.scheduler.commit(*flight.landed(), thresholds)
        if self.on_step is not None:
            self.on_step(self)
        return done

    def _run_until(
        self,
        done: dict[str, list[Completion]],
        total: int,
        progress: Progress | None,
        on_error: OnError,
    ) -> None:
        finished = 0
        while finished < total and self.scheduler.has_work:
            completions = self._advance()
            for completion in completions:
                done.get(completion.request_id, self._kept).append(completion)
            own = [completion for completion in completions if completion.request_id in done]
            for completion in own if on_error == "raise" else ():
                raise_if_failed(completion)
            finished += len(own)
            if own and progress:
                progress(finished, total)

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, environment: Environment | None = None
    ) -> Request:
        name = f"request-{next(self._names)}"
        request = checked_request(name, prompt, params, environment, self.limits)
        self.scheduler.require_fits(len(request.prompt_ids), params.max_tokens)
        return request

    def _queue(self, request: Request, cut: Completion | None = None) -> str:
        self.model.reserve(len(request.prompt_ids) + request.params.max_tokens)
        samples = samples_of(request)
        if cut is not None:
            samples[0].restore(cut)
        self.scheduler.add(samples)
        return request.request_id

    def _new_kv(self, num_pages: int) -> PagedKV:
        return PagedKV(
            self.model_config, num_pages, self.config.page_size, self.dtype, self.device, self.ops
        )

    def _require_whole_weights(self) -> None:
        if self._half_loaded:
            raise RuntimeError(f"{self._half_loaded}: call load_weights again")
