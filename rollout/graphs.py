"""Decode steps as CUDA graphs, their input tokens fed back on the device.

A step in which every row computes one token and draws the next is captured once for each padded
number of rows, and replayed. It covers embedding to logprob. Its inputs lie in one array that one
copy from pinned memory fills; a row's input token is taken from what the step before drew, or from
the host. Rows that pad the batch compute a token in a page that no sequence owns. Nothing that a
real row reads depends on them, so no bit depends on the pad.

The kernels read lengths from the device; what is captured is the grid for the longest context of a
class (`bound`). Weights are updated in place, so a graph outlives them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from rollout.ahead import is_decode, is_live
from rollout.batch import Batch, Draws, page_table
from rollout.config import EngineConfig, EngineError
from rollout.paged_kv import PagedKV
from rollout.request import Sample
from rollout.sampler import sample
from rollout.scheduler import StepPlan
from shared_ops.attention.op import PagedLayout
from shared_ops.model.decoder import Decoder

ALIGNMENT = 256
SHORT_CONTEXT = 1024
FINE_STEP, FINE_ROWS, COARSE_STEP = 8, 256, 32


class Flight(NamedTuple):
    """A step under way: its plan and, on the device or on their way to the host, what it draws.

    `ready`: recorded after the copies to the host; None where the tensors are read directly.
    `threshold_B`: of kept sets, where a row has a filter (such a step is not captured).
    """

    plan: StepPlan
    tokens_B: Tensor
    logprobs_B: Tensor
    ready: torch.cuda.Event | None = None
    is_decode: bool = False
    threshold_B: Tensor | None = None

    def landed(self) -> tuple[StepPlan, list[int], list[float]]:
        """Wait; the plan and what its drawing rows drew, without rows that lost their purpose."""
        if self.ready is not None:
            self.ready.synchronize()
        tokens, logprobs = self.tokens_B.tolist(), self.logprobs_B.tolist()
        live = [i for i, row in enumerate(self.plan.rows) if not self.is_decode or is_live(row)]
        if len(live) == len(self.plan.rows):
            return self.plan, tokens, logprobs
        rows = tuple(self.plan.rows[i] for i in live)
        return StepPlan(rows), [tokens[i] for i in live], [logprobs[i] for i in live]


class Inputs(NamedTuple):
    """The rows of one decode step, as views of one array of bytes.

    source_B indexes the tokens of the step before, followed by tokens_B (from the host). slots_B is
    where a row's key and value go; draw_positions_B the index of the token that it draws.
    """

    tokens_B: Tensor
    source_B: Tensor
    positions_B: Tensor
    draw_positions_B: Tensor
    slots_B: Tensor
    keys_B2: Tensor
    table_BP: Tensor
    contexts_B: Tensor
    temperature_B: Tensor
    greedy_B: Tensor


def carve(arena: Tensor, rows: int, pages: int) -> tuple[Inputs, int]:
    """Lay the inputs of so many rows and pages a row out in bytes; and how many bytes they take."""
    wide = torch.int64
    fields = [(wide, (rows,))] * 5 + [(wide, (rows, 2)), (wide, (rows, pages))]
    fields += [(torch.int32, (rows,)), (torch.float32, (rows,)), (torch.bool, (rows,))]
    views, offset = [], 0
    for dtype, shape in fields:
        size = math.prod(shape) * dtype.itemsize
        views.append(arena[offset : offset + size].view(dtype).view(shape))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return Inputs(*views), offset


def bytes_of(rows: int, pages: int) -> int:
    return (8 * (7 + pages) + 9) * rows + 10 * ALIGNMENT


def padded(rows: int) -> int:
    """1, 2, 4, 8, then steps of 8, beyond 256 of 32."""
    if rows <= FINE_STEP:
        return 1 << (rows - 1).bit_length()
    step = FINE_STEP if rows <= FINE_ROWS else COARSE_STEP
    return -(-rows // step) * step


class Rows:
    """What the host knows of the rows of a decode step, carried on from step to step."""

    def __init__(self, samples: list[Sample], pages: int) -> None:
        temperatures = [sample.request.params.temperature for sample in samples]
        self.samples = samples
        self.keys_B2 = numpy.array([sample.key for sample in samples], dtype=numpy.int64)
        self.temperature_B = numpy.array(temperatures, dtype=numpy.float32)
        self.marks_2B = _marks(samples)
        self.table_BP = numpy.zeros((len(samples), pages), dtype=numpy.int64)
        table_BP = page_table(samples)[:, :pages]
        self.table_BP[:, : table_BP.shape[1]] = table_BP

    def keep(self, kept_B: numpy.ndarray) -> None:
        """Go on with these rows only."""
        self.samples = [self.samples[i] for i in kept_B]
        self.keys_B2, self.temperature_B = self.keys_B2[kept_B], self.temperature_B[kept_B]
        self.table_BP, self.marks_2B = self.table_BP[kept_B], self.marks_2B[:, kept_B]

    def refresh(self) -> None:
        """Look up again the pages of samples that got one, or went over to a shared one."""
        marks_2B = _marks(self.samples)
        for i in numpy.flatnonzero((marks_2B != self.marks_2B).any(0)):
            pages = self.samples[i].pages
            self.table_BP[i, : len(pages)] = pages
        self.marks_2B = marks_2B


def _marks(samples: list[Sample]) -> numpy.ndarray:
    return numpy.array(
        [[len(one.pages) for one in samples], [one.full_pages for one in samples]],
        dtype=numpy.int64,
    )


class DecodeGraphs:
    """Launches decode steps of one engine; at most two are under way."""

    def __init__(
        self, config: EngineConfig, model: Decoder, kv: PagedKV, vocab_limit: int, spare_page: int
    ) -> None:
        self.model, self.kv, self.vocab_limit = model, kv, vocab_limit
        self.page_size, self.spare_page = config.page_size, spare_page
        self.device = model.head_VD.device
        self.max_rows = padded(min(config.max_sequences, config.max_batch_tokens))
        self.limit = min(model.config.max_positions, spare_page * config.page_size)
        model.reserve(self.limit)  # graphs hold the table's address
        self._allocate(bytes_of(self.max_rows, self._pages(self.limit)))
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = None
        self._side = 0
        self._rows: Rows | None = None

    def _allocate(self, size: int) -> None:
        """Device: [drawn tokens | inputs]. Host, twice: inputs, drawn tokens, logprobs; pinned."""
        pinned = self.device.type == "cuda"
        rows = self.max_rows
        drawn_bytes = -(-8 * rows // ALIGNMENT) * ALIGNMENT
        self._arena = torch.zeros(drawn_bytes + size, dtype=torch.uint8, device=self.device)
        self._drawn_N = self._arena[:drawn_bytes].view(torch.int64)
        self._inputs = self._arena[drawn_bytes:]
        self._logprobs_N = torch.zeros(rows, device=self.device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in "ab"]
        self._host_tokens = [torch.zeros(rows, dtype=torch.int64, pin_memory=pinned) for _ in "ab"]
        self._host_logprobs = [torch.zeros(rows, pin_memory=pinned) for _ in "ab"]
        self._done = [torch.cuda.Event() for _ in "ab"] if pinned else [None, None]

    def serves(self, plan: StepPlan) -> bool:
        return is_decode(plan)

    def launch(self, plan: StepPlan, after: Flight | None = None) -> Flight:
        """Queue a decode step on the device and return at once.

        after: the last step launched, not committed yet; then the rows of `plan` are some of its
            rows, in order, and go on from the tokens that it draws.
        """
        count = len(plan.rows)
        bound = self._bound(max(row.start for row in plan.rows) + 1)
        source_B = self._carry_on(plan, after, self._pages(bound))
        assert self._rows is not None
        key = (padded(count), bound)
        self._prepare(key)
        self._side = 1 - self._side
        ready = self._done[self._side]
        if ready is not None:
            ready.synchronize()
        size = self._fill(self._host[self._side], plan, source_B, key)
        self._inputs[:size].copy_(self._host[self._side][:size], non_blocking=True)
        self._replay(key)
        tokens_B, logprobs_B = self._host_tokens[self._side], self._host_logprobs[self._side]
        tokens_B[:count].copy_(self._drawn_N[:count], non_blocking=True)
        logprobs_B[:count].copy_(self._logprobs_N[:count], non_blocking=True)
        if ready is not None:
            ready.record()
        return Flight(plan, tokens_B[:count], logprobs_B[:count], ready, is_decode=True)

    def _pages(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def _bound(self, context: int) -> int:
        """The class of a context: powers of two from SHORT_CONTEXT on, up to the limit."""
        bound = SHORT_CONTEXT
        while bound < context:
            bound *= 2
        return min(bound, self.limit)

    def _carry_on(self, plan: StepPlan, after: Flight | None, pages: int) -> numpy.ndarray | None:
        """Bring `_rows` to the plan's rows; where their tokens lie among those drawn before."""
        samples = [row.sample for row in plan.rows]
        kept_B = None
        if after is not None:
            kept_B = numpy.arange(len(after.plan.rows))
            if len(samples) < len(kept_B):
                chosen = set(samples)
                kept_B = kept_B[[row.sample in chosen for row in after.plan.rows]]
        if self._rows is None or kept_B is None or self._rows.table_BP.shape[1] != pages:
            self._rows = Rows(samples, pages)
        else:
            if len(kept_B) < len(self._rows.samples):
                self._rows.keep(kept_B)
            self._rows.refresh()
        return kept_B

    def _fill(
        self, host: Tensor, plan: StepPlan, source_B: numpy.ndarray | None, key: tuple[int, int]
    ) -> int:
        """Write a step's inputs into pinned memory; their size in bytes."""
        padded_rows, bound = key
        rows, count = self._rows, len(plan.rows)
        assert rows is not None
        views, size = carve(host, padded_rows, self._pages(bound))
        to: Any = Inputs._make(view.numpy() for view in views)
        positions_B = numpy.array([row.start for row in plan.rows], dtype=numpy.int64)
        place_B = numpy.arange(count)
        to.source_B[:] = numpy.arange(padded_rows) + len(self._drawn_N)
        to.tokens_B[:] = 0
        if source_B is None:
            to.tokens_B[:count] = [row.sample.tokens[row.start] for row in plan.rows]
        else:
            to.source_B[:count] = source_B
        to.positions_B[:count], to.positions_B[count:] = positions_B, 0
        to.draw_positions_B[:] = to.positions_B + 1
        pages_B = rows.table_BP[place_B, positions_B // self.page_size]
        to.slots_B[:count] = pages_B * self.page_size + positions_B % self.page_size
        to.slots_B[count:] = self.spare_page * self.page_size
        to.keys_B2[:count], to.keys_B2[count:] = rows.keys_B2, 0
        to.table_BP[:count], to.table_BP[count:] = rows.table_BP, self.spare_page
        to.contexts_B[:] = to.draw_positions_B
        greedy_B = rows.temperature_B == 0
        to.greedy_B[:count], to.greedy_B[count:] = greedy_B, False
        to.temperature_B[:count] = numpy.where(greedy_B, 1, rows.temperature_B)
        to.temperature_B[count:] = 1
        return size

    def _replay(self, key: tuple[int, int]) -> None:
        self._graphs[key].replay()

    def _prepare(self, key: tuple[int, int]) -> None:
        """Capture the step if it is new. What is under way stays as it is.

        Raises:
            EngineError: no memory for it.
        """
        if key in self._graphs:
            return
        try:
            self._graphs[key] = self._capture(key)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"no memory to capture a decode step of {key[0]} rows: lower memory_share or"
                f" max_sequences, or use cuda_graphs=False ({str(error).splitlines()[0]})"
            ) from None

    def _capture(self, key: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Run once on padding rows only, so that every kernel is loaded, then capture."""
        rows, bound = key
        side, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        inputs, _ = carve(self._inputs, rows, self._pages(bound))
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._pad(inputs)
            self._forward(inputs, [bound] * rows)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            self._step(inputs, [bound] * rows)
        return graph

    def _pad(self, inputs: Inputs) -> None:
        for view in inputs:
            view.zero_()
        inputs.source_B.fill_(len(self._drawn_N))
        inputs.slots_B.fill_(self.spare_page * self.page_size)
        inputs.table_BP.fill_(self.spare_page)
        inputs.contexts_B.fill_(1)
        inputs.temperature_B.fill_(1)

    def _step(self, inputs: Inputs, bounds: list[int]) -> None:
        tokens_B, logprobs_B = self._forward(inputs, bounds)
        self._drawn_N[: len(tokens_B)].copy_(tokens_B)
        self._logprobs_N[: len(tokens_B)].copy_(logprobs_B)

    def _forward(self, inputs: Inputs, bounds: list[int]) -> tuple[Tensor, Tensor]:
        rows = len(bounds)
        known = self._arena[: 8 * (len(self._drawn_N) + rows)].view(torch.int64)
        layout = PagedLayout(
            list(range(rows + 1)),
            bounds,
            inputs.table_BP,
            self._starts[: rows + 1],
            inputs.contexts_B,
        )
        draws = Draws(
            keys_B2=inputs.keys_B2,
            positions_B=inputs.draw_positions_B,
            temperature_B=inputs.temperature_B,
            greedy_B=inputs.greedy_B,
            all_greedy=False,
            any_greedy=True,
            filters=None,
        )
        batch = Batch(
            known.index_select(0, inputs.source_B),
            inputs.positions_B,
            inputs.slots_B,
            layout,
            inputs.positions_B,
            draws,
        )
        hidden_BD = self.model(batch.token_ids_T, batch.positions_T, self.kv.at(batch))
        return sample(hidden_BD, self.model.head_VD, draws, self.vocab_limit, self.model.ops)[:2]
