"""Checkpoints: folders that appear whole or not at all, and say so themselves when damaged.

A checkpoint is a Hugging Face folder (working weights, config, tokenizer), or a peft folder where
adapters are trained, with three files more:
`training.safetensors` (float32 masters and the optimiser's moments), `state.json`, and
`digests.json` with the sha256 of every other file. It is written beside its place under a
temporary name, flushed to disk, and renamed.
"""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared_ops.model.adapters import Adapters, save_adapters
from shared_ops.model.lora_config import TENSORS_FILE
from shared_ops.model.weights import DIGEST_KIND, Leaves, Weights, save_folder

FORMAT = 1
TENSORS, STATE, DIGESTS = "training.safetensors", "state.json", "digests.json"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model; the message names it."""


def write(
    path: str | Path,
    weights: Leaves,
    source_folder: str | Path,
    tensors: dict[str, Tensor],
    state: dict[str, Any],
) -> None:
    """Write a checkpoint; one that is already at `path` is replaced.

    Killed at any moment, this leaves the old checkpoint, the new one, or (between the two renames
    of a replacement) neither, but never half of one. What a killed call left is removed by the
    next one for the same path.

    Raises:
        CheckpointError: `state` holds something JSON cannot.
        OSError: disk full or folder not writable; nothing is left behind.
    """
    path = Path(path).absolute()
    text = _dump({"format": FORMAT, **state})
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        folder = scratch / "checkpoint"
        _save_model(folder, weights, Path(source_folder))
        save_file(_contiguous(tensors), folder / TENSORS)
        (folder / STATE).write_text(text)
        digests = {file.name: _sha256(file) for file in sorted(folder.iterdir())}
        (folder / DIGESTS).write_text(json.dumps(digests, indent=1))
        for file in [*folder.iterdir(), folder]:
            _flush(file)
        if path.exists():
            os.replace(path, scratch / "replaced")
        os.replace(folder, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_model(folder: Path, weights: Leaves, source_folder: Path) -> None:
    if isinstance(weights, Adapters):
        save_adapters(folder, weights, source_folder.resolve())
    else:
        assert isinstance(weights, Weights)
        save_folder(folder, weights, source_folder)


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and tensors of a checkpoint whose every digest has been verified.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    state = verify(path)
    try:
        return state, load_file(Path(path) / TENSORS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint {str(path)!r}: cannot read {TENSORS}: {error}") from None


def verify(path: str | Path) -> dict[str, Any]:
    """The state of a checkpoint, after comparing every file with its digest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = Path(path)
    digests = _load(path, DIGESTS)
    models = {"model.safetensors", TENSORS_FILE}
    if not ({STATE, TENSORS} <= digests.keys() and models & digests.keys()):
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {DIGESTS} is not complete")
    for name, digest in digests.items():
        file = path / name
        if not file.is_file() or _sha256(file) != digest:
            raise CheckpointError(
                f"checkpoint {str(path)!r} is damaged: {name} is not what was written; "
                "use an earlier checkpoint"
            )
    state = _load(path, STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has format {state.get('format')}, this program reads "
            f"{FORMAT}; use the version that wrote it"
        )
    return state


def check_base(path: str | Path, state: dict[str, Any], own: Leaves) -> None:
    """Refuse adapters for whole weights, the other way round, and those of another base or scale.

    Raises:
        CheckpointError: naming what differs.
    """
    base, scale = state.get("base", ""), state.get("scale", 1.0)
    if bool(base) != bool(own.base):
        kinds = ("whole weights", "adapters")
        raise CheckpointError(
            f"checkpoint {str(path)!r} holds {kinds[bool(base)]}, this trainer trains "
            f"{kinds[bool(own.base)]}; give the lora settings that it was trained with"
        )
    if base and not base.startswith(DIGEST_KIND):
        raise CheckpointError(
            f"checkpoint {str(path)!r} names its base model by a digest of an older kind; use the "
            "version that wrote it, or start anew from its adapters with lora.folder"
        )
    if base != own.base:
        raise CheckpointError(
            f"checkpoint {str(path)!r} holds adapters of another base model (digest {base[:16]}, "
            f"here {own.base[:16]}); give the model and dtype that it was trained from"
        )
    if scale != own.scale:
        raise CheckpointError(
            f"checkpoint {str(path)!r} has adapters scaled by {scale:g}, this trainer scales by "
            f"{own.scale:g}; give the lora.alpha that it was trained with"
        )


def check_same(
    path: str | Path,
    dtype: str,
    own_dtype: str,
    tensors: dict[str, Tensor],
    own: Mapping[str, Sequence[int]],
) -> None:
    """Refuse a checkpoint of another model or dtype; own: shapes by name.

    Raises:
        CheckpointError: naming what differs.
    """
    if dtype != own_dtype:
        raise CheckpointError(
            f"checkpoint {str(path)!r} was trained in {dtype}, this trainer runs {own_dtype}; "
            f"set dtype to {dtype}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    own_shapes = {name: tuple(shape) for name, shape in own.items()}
    for name in sorted(shapes.keys() | own_shapes.keys()):
        if shapes.get(name) != own_shapes.get(name):
            raise CheckpointError(
                f"checkpoint {str(path)!r} is of another model: {name} is {shapes.get(name)} "
                f"there and {own_shapes.get(name)} here; give the model that it was trained from"
            )


def find_latest(folder: str | Path) -> Path | None:
    """The checkpoint in `folder` with the most steps; damaged ones are skipped with a warning."""
    for path in reversed(_by_step(folder)):
        try:
            verify(path)
            return path
        except CheckpointError as error:
            warnings.warn(f"skipped: {error}", stacklevel=2)
    return None


def keep_last(folder: str | Path, count: int, protected: Iterable[str | Path] = ()) -> None:
    """Delete all checkpoints in `folder` but the `count` with the most steps and the protected.

    What killed writers left is deleted too, so call it from the one that writes.

    Raises:
        ValueError: count is below 1.
    """
    if count < 1:
        raise ValueError(f"checkpoints to keep is {count}; it must be at least 1")
    for stale in Path(folder).glob(".*.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    spared = {Path(path).resolve() for path in protected}
    for path in _by_step(folder)[:-count]:
        if path.resolve() not in spared:
            # A kill in the middle must not leave a folder that no longer looks like a checkpoint.
            leaving = path.with_name(f".{path.name}.partial-removed")
            os.replace(path, leaving)
            shutil.rmtree(leaving)


def _by_step(folder: str | Path) -> list[Path]:
    """Checkpoints by step, then name; one whose state cannot be read goes by its name's number."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    paths = [p for p in folder.iterdir() if not p.name.startswith(".") and (p / DIGESTS).exists()]
    return sorted(paths, key=lambda path: (_step(path), path.name))


def _step(path: Path) -> int:
    try:
        return int(_load(path, STATE)["step"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        digits = "".join(character for character in path.name if character.isdigit())
        return int(digits or 0)


def _load(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((path / name).read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{str(path)!r} is no checkpoint: {name} is missing; give a folder that was saved"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {name}: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint {str(path)!r} is damaged: {name} is no object")
    return value


def _dump(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra cannot be saved: {error}; give what JSON can hold") from None


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
