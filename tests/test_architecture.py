"""The house rules, held by reading the source: who may import whom, and how long things may be."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared_ops", "rollout", "trainer", "recipes", "benchmarks")
MAY_IMPORT = {
    "shared_ops": {"shared_ops"},
    "rollout": {"rollout", "shared_ops"},
    "trainer": {"trainer", "shared_ops"},
    "recipes": {"recipes", "rollout", "trainer", "shared_ops"},
    "benchmarks": set(PACKAGES),
}
OPS = (
    "linear",
    "lora",
    "rmsnorm",
    "rope",
    "swiglu",
    "attention",
    "logprob",
    "embedding",
    "sample",
    "checksum",
)
ACTORS = ("rollout/actor.py", "trainer/actor.py")
MAY_USE = {
    "ray": ("recipes/", "benchmarks/", *ACTORS),
    "transformers": ("recipes/", "benchmarks/", "shared_ops/model/gguf.py"),
    "datasets": ("recipes/", "benchmarks/"),
    "wandb": ("recipes/", "benchmarks/"),
    "peft": (),
    "matplotlib": ("recipes/", "benchmarks/"),
    "trackio": ("recipes/trackio_log.py",),
}
WITHOUT_TORCH = (
    "rollout.config",
    "rollout.admission",
    "rollout.params",
    "rollout.request",
    "rollout.stops",
    "rollout.pages",
    "rollout.prefix",
    "rollout.scheduler",
    "trainer.config",
    "trainer.advantage",
    "shared_ops.model.config",
    "shared_ops.model.lora_config",
    "shared_ops.model.vocabulary",
    "shared_ops.sample.key",
)
HEAVY = ("torch", "transformers", "ray", "datasets", "wandb", "matplotlib", "trackio")
MAX_FILE, MEDIAN, NINETIETH, MAX_FUNCTION, MAX_KERNEL = 400, 10, 30, 60, 120
TEXT_SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".sh", ".cfg", ".txt", "")
# Spelled in halves, so that this file does not hold them.
MACHINE_PATHS = tuple("/" + name for name in ("work/", "root/", "home/", "Users/", "mnt/"))


@cache
def modules() -> dict[str, tuple[str, ast.Module]]:
    """Dotted name -> (path from the root, syntax tree) of every module of the packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = (path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))
    return found


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def _statements(node: ast.AST):
    """Every node below, without what only a type checker runs."""
    for child in ast.iter_child_nodes(node):
        if not _only_for_types(child):
            yield child
            yield from _statements(child)


def imported_by(tree: ast.Module, package: str) -> set[str]:
    """Dotted names that a module imports anywhere: `from a import b` gives a.b."""
    names = set()
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(
                [*(above if node.level else []), *([node.module] if node.module else [])]
            )
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@cache
def imports() -> dict[str, set[str]]:
    """Module -> dotted names it imports."""
    found = {}
    for name, (path, tree) in modules().items():
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        found[name] = imported_by(tree, package)
    return found


def ours(name: str) -> str | None:
    """The module of ours that a dotted import leads to."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def inner(name: str) -> set[str]:
    return {module for module in map(ours, imports()[name]) if module}


def is_below(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def test_the_reader_sees_the_project():
    assert len(modules()) > 50
    assert "shared_ops.linear.reference" in inner("shared_ops.linear.op")
    assert "rollout.scheduler" in inner("rollout.engine")
    assert sum(len(inner(name)) for name in modules()) > 100
    relative = ast.parse("from . import a\nfrom ..b import c\nif TYPE_CHECKING:\n    import d")
    assert imported_by(relative, "x.y") == {"x.y.a", "x.b.c"}


def test_packages_import_only_what_lies_below_them():
    wrong = {
        (name, target)
        for name in modules()
        for target in imports()[name]
        if target.split(".")[0] in (*PACKAGES, "tests")
        and target.split(".")[0] not in MAY_IMPORT[name.split(".")[0]]
    }
    assert not wrong


def test_op_folders_do_not_import_one_another():
    folders = {op: f"shared_ops.{op}" for op in OPS}
    assert all(f"{folder}.op" in modules() for folder in folders.values())
    wrong = {
        (name, target)
        for op, folder in folders.items()
        for name in modules()
        if is_below(name, folder)
        for target in inner(name)
        for other in folders
        if other != op and is_below(target, folders[other])
    }
    assert not wrong


def test_the_model_reaches_ops_through_their_op_file():
    folders = [f"shared_ops.{op}" for op in OPS]
    wrong = {
        (name, target)
        for name in modules()
        if is_below(name, "shared_ops.model")
        for target in inner(name)
        if any(is_below(target, folder) for folder in folders) and not target.endswith(".op")
    }
    assert not wrong


def test_kernels_do_not_import_the_reference():
    kernels = [name for name in modules() if name.endswith("kernels")]
    assert kernels
    assert not {name for name in kernels if any(x.endswith(".reference") for x in inner(name))}


@pytest.mark.parametrize("library", MAY_USE)
def test_libraries_stay_where_they_belong(library):
    users = {
        modules()[name][0] for name in modules() for x in imports()[name] if is_below(x, library)
    }
    assert not {path for path in users if not path.startswith(MAY_USE[library])}


def test_nobody_imports_in_a_circle():
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for target in sorted(inner(name) - {name}):
                visit(target, (*path, name))
            done.add(name)

    for name in modules():
        visit(name, ())
    assert done == modules().keys()


def test_configs_and_the_planner_do_not_name_torch():
    assert set(WITHOUT_TORCH) <= modules().keys()
    wrong = {n for n in WITHOUT_TORCH for x in imports()[n] if x.split(".")[0] in HEAVY}
    assert not wrong


LAZY = {
    "the public configs": "from rollout import EngineConfig, SamplingParams, Completion; "
    "from trainer import TrainerConfig",
    "the planner": f"import {', '.join(WITHOUT_TORCH)}",
    "the recipe's module": "import recipes.grpo_gsm8k",
    "the report's module": "import recipes.report",
}


@pytest.mark.parametrize("what", LAZY)
def test_importing_loads_nothing_heavy(what):
    code = f"{LAZY[what]}; import sys; print(*[x for x in {HEAVY} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_public_names_are_importable_as_written():
    code = (
        "from rollout import Engine, EngineConfig, SamplingParams, Completion; "
        "from trainer import Trainer, TrainerConfig, TrainSample; "
        "from recipes.gsm8k import correctness_reward"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def body_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def function_lengths() -> dict[str, int]:
    return {
        f"{path}:{node.lineno} {node.name}": body_length(node)
        for path, tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_functions_are_short():
    lengths = function_lengths()
    assert len(lengths) > 200
    limits = {n: MAX_KERNEL if "kernels.py:" in n else MAX_FUNCTION for n in lengths}
    assert not {name: length for name, length in lengths.items() if length > limits[name]}
    assert statistics.median(lengths.values()) <= MEDIAN
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= NINETIETH


def test_a_body_is_counted_without_its_docstring():
    function = ast.parse(
        'def f():\n    """One.\n\n    Two.\n    """\n    x = 1\n\n    return x'
    ).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert body_length(function) == 3


def text_files() -> list[Path]:
    """What git tracks or would track; every file where there is no git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for top in (*PACKAGES, "tests", "docs") for p in (ROOT / top).rglob("*")]
    return [path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES]


def test_files_are_short():
    sources = [path for path in text_files() if path.suffix == ".py"]
    assert len(sources) > 80
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in sources
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE}


def test_no_file_names_a_place_on_one_machine():
    wrong = {
        path.relative_to(ROOT).as_posix(): place
        for path in text_files()
        for place in MACHINE_PATHS
        if place in path.read_text(errors="replace")
    }
    assert not wrong
