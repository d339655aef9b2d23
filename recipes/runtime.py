"""Where the two sides run: in Ray actors, or in this process. Same classes, same bits."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from recipes.in_loop import InLoop
from recipes.precision import remote_trainer, trainer_actor
from recipes.settings import RunConfig, SettingError
from recipes.trainer_group import TrainerGroup, start_group
from rollout.actor import AsyncRolloutActor, RolloutActor
from shared_ops.attest_report import Report
from shared_ops.elementary import FUNCTIONS
from shared_ops.model.config import ModelConfig

PROJECT = Path(__file__).resolve().parent.parent
EXCLUDES = [".git", ".venv", "runs", "wandb", "tests", "benchmarks", "**/__pycache__"]
FORWARDED = ("HF_", "WANDB_", "TRITON_", "CUDA_", "CUBLAS", "NCCL_", "OMP_", "MKL_", "ZEROKL_")
RESOURCE_SECONDS = 8.0
CPUS_PER_SIDE = 0.5
SMALL_MODEL = 20_000_000


class RuntimeSetupError(RuntimeError):
    """The sides cannot be started; the message names need, have and the mend."""


class Sides:
    """Both sides of a run. `rollout` and `trainer` have the methods of their actor classes; with
    max_lag, `rollout.submit(prompt, params)` gives a future of `rollout.generate`."""

    def __init__(self, rollout: Any, trainer: Any):
        self.rollout, self.trainer = rollout, trainer

    def attest(self) -> str:
        """Check the contracts on both sides' machines; a line that says what was compared.

        Functions that the machines' libraries round otherwise are computed by their plain schedules
        on both sides from then on.

        Raises:
            AttestationError: a contract does not hold.
            RuntimeSetupError: the two machines compute different bits all the same.
        """
        reports, note = self._reports(), ""
        other = disagreement(reports)
        if other and other <= set(FUNCTIONS):
            self._use_plain(sorted(other))
            note = f" (the machines' {' and '.join(sorted(other))} differ: plain ones on all sides)"
            reports = self._reports()
            other = disagreement(reports)
        if other:
            raise RuntimeSetupError(
                f"sampler and trainer run on machines that compute different bits"
                f" ({', '.join(sorted(other))}): place both on the same kind of processor or GPU"
                " with the same torch"
            )
        values = sum(check.values for report in reports for check in report.checks)
        return f"attested: {values:,} float32 values, 0 differ, both sides agree{note}"

    def _reports(self) -> list[Report]:
        return [self.rollout.attest(), self.trainer.attest()]

    def _use_plain(self, functions: list[str]) -> None:
        self.rollout.use_plain(functions)
        self.trainer.use_plain(functions)

    def sync_weights(self) -> None:
        """Publish the trainer's weights into the engine, which has them when this returns.

        Raises:
            WeightsError: what the engine then holds has another digest.
        """
        self.rollout.load_weights(*self.trainer.lend())


def disagreement(reports: Sequence[Report]) -> set[str]:
    """The facts that not all sides found alike; AttestationError where one side's own differ."""
    for report in reports:
        report.raise_if_broken()
    names = {name for report in reports for name in report.facts}
    return {name for name in names if len({report.facts.get(name) for report in reports}) > 1}


class _Remote:
    """An actor whose methods wait for their results."""

    def __init__(self, handle: Any):
        self._handle = handle

    def __getattr__(self, name: str):
        import ray

        method = getattr(self._handle, name)
        return lambda *args, **kwargs: _unwrapped(lambda: ray.get(method.remote(*args, **kwargs)))

    def submit(self, prompt: Any, params: Any) -> Any:
        """A future of `generate` for one prompt."""
        return _unwrapping(self._handle.generate.remote([prompt], [params]).future())


class _RemoteSides(Sides):
    """Both sides in actors. shares: whether they are on one GPU, where weights need not be copied
    to the host."""

    def __init__(self, rollout: Any, trainer: Any, shares: bool):
        super().__init__(rollout, trainer)
        self.shares = shares

    def _reports(self) -> list[Report]:
        return self._of_all(lambda handle: handle.attest.remote())

    def _use_plain(self, functions: list[str]) -> None:
        self._of_all(lambda handle: handle.use_plain.remote(functions))

    def _of_all(self, call: Callable[[Any], Any]) -> list[Any]:
        import ray

        handles = self.rollout._handle, *self.trainer.handles
        return _unwrapped(lambda: ray.get([call(handle) for handle in handles]))

    def sync_weights(self) -> None:
        """The tensors go from actor to actor, not through the driver: by handles on one GPU, else
        through the object store. Shared ones change with the next step, so the load is waited for.
        """
        from shared_ops.model.sharing import SharingError

        try:
            self._load("share" if self.shares else "publish")
        except SharingError as error:
            self.shares = False
            warnings.warn(f"weights go through host memory: {error}", stacklevel=2)
            self._load("publish")

    def _load(self, how: str) -> None:
        import ray

        loaded = self.rollout._handle.load_weights.remote(*self.trainer.publication_refs(how))
        _unwrapped(lambda: ray.get(loaded))


def _unwrapped(call):
    """An error of an actor as itself, so that callers need not know where it ran."""
    from ray.exceptions import RayTaskError

    try:
        return call()
    except RayTaskError as error:
        raise error.cause from error


def _unwrapping(future: Future) -> Future:
    """The same result; an error of the actor as itself."""
    own: Future = Future()

    def copy(done: Future) -> None:
        try:
            own.set_result(_unwrapped(done.result))
        except BaseException as error:
            own.set_exception(error)

    future.add_done_callback(copy)
    return own


@contextmanager
def start(config: RunConfig, model_folder: Path) -> Iterator[Sides]:
    """Both sides, ready, with the model loaded.

    Raises:
        RuntimeSetupError: Ray lacks the resources, or an actor does not start.
    """
    if config.runtime == "inline":
        with _inline_rollout(config, model_folder) as rollout:
            threads = _threads(config, model_folder)
            yield Sides(rollout, trainer_actor(config, model_folder, threads))
        return
    with _cluster(config):
        yield _actors(config, model_folder)


@contextmanager
def _inline_rollout(config: RunConfig, model_folder: Path) -> Iterator[Any]:
    threads = _threads(config, model_folder)
    if config.max_lag is None:
        yield RolloutActor(model_folder, config.rollout, threads)
        return
    rollout = InLoop(AsyncRolloutActor(model_folder, config.rollout, threads))
    try:
        yield rollout
    finally:
        rollout.close()


def _threads(config: RunConfig, model_folder: Path) -> int:
    """torch threads of each side; a small model's ops are too short to share between threads."""
    small = ModelConfig.from_folder(model_folder).num_parameters < SMALL_MODEL
    return config.threads or (1 if small else os.cpu_count() or 1)


@contextmanager
def _cluster(config: RunConfig) -> Iterator[None]:
    import ray

    options: dict[str, Any] = {"log_to_driver": True, "logging_level": "ERROR"}
    address = config.address or os.environ.get("RAY_ADDRESS", "local")
    options["runtime_env"] = _runtime_env(address)
    if address == "local":
        options |= {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"--address {address}: {' '.join(str(error).split())[:200]} "
            "(start a cluster with `ray start --head`, or leave --address out)"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def in_submitted_job() -> bool:
    """Whether this process was started by `ray job submit`."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def _runtime_env(address: str) -> dict[str, Any]:
    """The driver's environment for the actors; the code too, for a cluster started elsewhere."""
    waiting = {"OMP_WAIT_POLICY": "PASSIVE"}
    variables = waiting | {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
    environment: dict[str, Any] = {"env_vars": variables}
    if in_submitted_job():
        return environment
    if address == "local":
        return environment | {"env_vars": variables | {"PYTHONPATH": _python_path()}}
    return environment | {"working_dir": str(PROJECT), "excludes": EXCLUDES}


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))


def _actors(config: RunConfig, model_folder: Path) -> Sides:
    import ray
    from ray.exceptions import RayActorError

    from rollout.actor import remote_class as rollout_class

    gpus = _gpus_per_side(config)
    actors = 1 + config.trainer_ranks
    _require_resources({"CPU": actors * CPUS_PER_SIDE, "GPU": actors * gpus})
    threads = _threads(config, model_folder)
    options: dict[str, Any] = {"num_cpus": CPUS_PER_SIDE, "num_gpus": gpus}
    kind = RolloutActor if config.max_lag is None else AsyncRolloutActor
    rollout = rollout_class(kind, **options).remote(str(model_folder), config.rollout, threads)
    make = partial(remote_trainer, config, str(model_folder), threads)
    if config.trainer_ranks > 1:
        trainer = start_group(make, config.trainer_ranks, options)
    else:
        trainer = TrainerGroup([make(**options)])
    try:
        gpu = _unwrapped(lambda: ray.get(rollout.gpu.remote()))
        return _RemoteSides(_Remote(rollout), trainer, shares=gpu == trainer.gpu() != "")
    except RayActorError as error:
        cause = getattr(error, "cause", None) or error
        raise RuntimeSetupError(f"an actor did not start: {str(cause).splitlines()[-1]}") from error


def _gpus_per_side(config: RunConfig) -> float:
    """One GPU is shared by both sides; with two or more, and for ranks, each has its own."""
    import ray

    if not config.device.startswith("cuda"):
        return 0.0
    if config.trainer_ranks > 1:
        return 1.0
    return 1.0 if ray.cluster_resources().get("GPU", 0) >= 2 else 0.5


def _require_resources(need: dict[str, float]) -> None:
    """Fail in seconds where Ray would wait for ever.

    Raises:
        RuntimeSetupError: what is needed, what the cluster has, and what of it is free.
    """
    import ray

    deadline = time.monotonic() + RESOURCE_SECONDS
    while True:
        free = ray.available_resources()
        short = {name: n for name, n in need.items() if n and free.get(name, 0.0) < n}
        if not short:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.25)
    have = ray.cluster_resources()
    lines = [
        f"{name}: needs {n:g}, has {have.get(name, 0.0):g}, of which {free.get(name, 0.0):g} free"
        for name, n in short.items()
    ]
    raise RuntimeSetupError(
        "; ".join(lines) + " (end other jobs, use --device cpu, add nodes, or --runtime inline)"
    )
