"""Trainer actors that are the ranks of one data-parallel group, called as if they were one."""

import socket
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from trainer.parity import ParityError

SHARED_OUT = ("step", "logprobs", "with_old_logprobs", "with_lag_proof")


class TrainerGroup:
    """The methods of `TrainerActor`: samples are cut into shares in their order, one for each rank;
    all else is asked of every rank alike, as gathering sharded weights needs."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = self._share_out if name in SHARED_OUT else self._call
        return lambda *arguments, **settings: call(name, arguments, settings)

    def _call(self, name: str, arguments: tuple, settings: dict[str, Any]) -> Any:
        refs = [getattr(handle, name).remote(*arguments, **settings) for handle in self.handles]
        return results(refs)[0]

    def _share_out(self, name: str, arguments: tuple, settings: dict[str, Any]) -> Any:
        samples, *rest = arguments
        count = len(self.handles)
        edges = [len(samples) * rank // count for rank in range(count + 1)]
        refs = [
            getattr(handle, name).remote(samples[first:last], *rest, **settings)
            for handle, (first, last) in zip(self.handles, pairwise(edges), strict=True)
        ]
        parts = results(refs, edges)
        return [one for part in parts for one in part] if name != "step" else parts[0]

    def publication_refs(self, how: str) -> tuple[Any, Any]:
        """References to the first rank's manifest and tensors; every rank takes part.

        how: the method that publishes, "publish" or "share".
        """
        refs = [getattr(each, how).options(num_returns=2).remote() for each in self.handles]
        return tuple(refs[0])


def results(refs: list[Any], edges: list[int] | None = None) -> list[Any]:
    """What the ranks return.

    Raises:
        An error of a rank as itself, of several that which says most: a ParityError that has the
        differing token, its `sample_index` counted over all shares (which begin at `edges`).
    """
    import ray
    from ray.exceptions import RayTaskError

    values, errors = [], []
    for rank, ref in enumerate(refs):
        try:
            values.append(ray.get(ref))
        except RayTaskError as error:
            errors.append(_shifted(error.cause, edges[rank] if edges else 0))
    if errors:
        raise min(errors, key=lambda error: getattr(error, "first", None) is None)
    return values


def _shifted(error: Exception, start: int) -> Exception:
    if not isinstance(error, ParityError) or error.first is None:
        return error
    first = error.first._replace(sample_index=error.first.sample_index + start)
    return ParityError(error.report, first)


def start_group(make: Callable[..., Any], count: int, options: dict[str, float]) -> TrainerGroup:
    """Start the ranks; make(**options) starts one actor.

    The first rank's node is where the group meets (torch's MASTER_ADDR), which is known before
    the actors start because they are placed beforehand.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    group = placement_group([{name: n for name, n in bundle.items() if n}] * count)

    def at(rank: int) -> dict[str, Any]:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, rank)}

    address, port = ray.get(ray.remote(num_cpus=0, **at(0))(_meeting_place).remote())
    shared = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    # LOCAL_RANK picks a GPU, and Ray shows each actor only its own.
    places = [shared | {"RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(count)]
    return TrainerGroup(
        [
            make(**options, **at(rank), runtime_env={"env_vars": place})
            for rank, place in enumerate(places)
        ]
    )


def _meeting_place() -> tuple[str, int]:
    import ray

    with socket.socket() as listener:
        listener.bind(("", 0))
        return ray.util.get_node_ip_address(), listener.getsockname()[1]
