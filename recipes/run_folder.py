"""Where a run's files go, and how a killed run is found again."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.settings import RunConfig, SettingError

SETTINGS = "config.json"
CHECKPOINTS = "checkpoints"
FREE_TO_CHANGE = {
    "out",
    "runtime",
    "address",
    "resume",
    "wandb",
    "tensorboard",
    "trackio",
    "dry_run",
    "threads",
} | {
    "save_every",
    "keep_checkpoints",
}


@dataclass(frozen=True)
class RunFolder:
    """An absolute folder; `resumed` if it holds a run that is to go on."""

    path: Path
    resumed: bool

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def checkpoint(self, steps: int) -> Path:
        """Where the checkpoint after `steps` steps lies."""
        return self.checkpoints / f"step-{steps:06d}"


def choose(config: RunConfig) -> RunFolder:
    """The folder that --out and --resume ask for; nothing is written.

    Raises:
        SettingError: it holds another run, or there is nothing to resume.
    """
    base = _base()
    if config.resume not in ("off", "auto"):
        path = Path(config.resume).expanduser().resolve()
        if not (path / SETTINGS).exists():
            raise SettingError(f"--resume {config.resume}: no run there (no {SETTINGS})")
        return RunFolder(path, True)
    stem = f"{config.preset}-seed{config.seed}"
    if config.out is None:
        earlier = _numbered(base, stem)
        if config.resume == "auto" and earlier:
            return RunFolder(earlier[-1], True)
        number = int(earlier[-1].name.rsplit("-", 1)[1]) + 1 if earlier else 1
        return RunFolder(base / f"{stem}-{number}", False)
    path = (Path.cwd() if base.name == "runs" else base).joinpath(Path(config.out).expanduser())
    holds_run = (path / SETTINGS).exists()
    if holds_run and config.resume == "off":
        raise SettingError(
            f"--out {config.out} already holds a run: choose another folder, or --resume auto"
        )
    return RunFolder(path.resolve(), holds_run)


def started_with(config: RunConfig) -> dict[str, Any]:
    """The settings of the run that --out and --resume lead to; empty where none is resumed.

    Raises:
        SettingError: there is nothing to resume.
    """
    folder = choose(config)
    return json.loads((folder.path / SETTINGS).read_text()) if folder.resumed else {}


def _base() -> Path:
    """runs/ here; under a submitted Ray job, whose folder is thrown away, ~/zerokl-runs."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return Path.home() / "zerokl-runs"
    return Path.cwd() / "runs"


def _numbered(base: Path, stem: str) -> list[Path]:
    """Earlier runs stem-1, stem-2, ... in the order of their numbers."""
    found = [p for p in base.glob(f"{stem}-*") if (p / SETTINGS).exists()]
    numbered = [p for p in found if p.name.removeprefix(f"{stem}-").isdigit()]
    return sorted(numbered, key=lambda p: int(p.name.rsplit("-", 1)[1]))


def prepare(folder: RunFolder, config: RunConfig) -> None:
    """Make the folder and write the settings, or check that a resumed run has the same ones.

    Raises:
        SettingError: the folder cannot be written, or a setting differs from the resumed run's.
    """
    settings = json.loads(json.dumps(_comparable(config)))
    if folder.resumed:
        before = json.loads((folder.path / SETTINGS).read_text())
        _require_same(_with_defaults(before, dataclasses.asdict(RunConfig())), settings, "")
        return
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        temporary = folder.path / f".{SETTINGS}.new"
        temporary.write_text(json.dumps(settings, indent=2) + "\n")
        os.replace(temporary, folder.path / SETTINGS)
    except OSError as error:
        raise SettingError(
            f"--out {folder.path}: cannot be written ({error.strerror}): choose another folder"
        ) from error


def _comparable(config: RunConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name not in FREE_TO_CHANGE}


def _with_defaults(before: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What a run was started with, settings that came later at their defaults."""
    nested = {
        name: _with_defaults(value, defaults[name])
        for name, value in before.items()
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
    }
    return {**json.loads(json.dumps(defaults)), **before, **nested}


def _require_same(before: dict[str, Any], now: dict[str, Any], prefix: str) -> None:
    """A longer run is no other run: `steps` may grow where no schedule depends on it. Nor is one
    that keeps more or less for its backward, with the same bits."""
    for name in now:
        old, new = before.get(name), now[name]
        if isinstance(new, dict) and isinstance(old, dict):
            _require_same(old, new, f"{prefix}{name}.")
        elif old != new and not _may_change(prefix + name, before, now):
            flag = (prefix + name).replace("_", "-")
            raise SettingError(
                f"--{flag} is {new!r} and the run to resume has {old!r}: leave it out (the run's "
                "own is taken), or start a new run with --resume off"
            )


def _may_change(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if name == "trainer.recompute":
        return True
    if name != "steps":
        return False
    constant = now["trainer"]["schedule"] == before["trainer"]["schedule"] == "constant"
    return constant and now["steps"] > before["steps"]
