"""From a model's name to a local Hugging Face folder and its tokenizer."""

from pathlib import Path
from typing import Any

from recipes.hub import fetch_model
from recipes.settings import EMBEDDED, SettingError
from shared_ops.model.config import ModelConfig

EMBEDDED_MODEL = Path(__file__).resolve().parent / "tiny_model"


def local_folder(model: str, cache: Path) -> Path:
    """The folder to load: our own, `model` itself, a GGUF file converted into `cache`, the hub's.

    Raises:
        ConfigError, HubError: one line that names --model and the mend.
    """
    if model == EMBEDDED:
        return EMBEDDED_MODEL
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        from shared_ops.model.gguf import convert

        target = cache / f"{path.stem}-{path.stat().st_size if path.exists() else 0}"
        return target if (target / "config.json").exists() else convert(path, target)
    return path.resolve() if path.is_dir() else fetch_model(model)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, by transformers.

    Raises:
        SettingError: there is none, or it needs a package that is not here.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise SettingError(
            f"--model {folder}: its tokenizer cannot be loaded ({reason})"
        ) from error


def check_lengths(config: ModelConfig, prompts: list[list[int]], max_tokens: int) -> None:
    """Every prompt and its completion must fit the model's positions.

    Raises:
        SettingError: names the longest prompt, the limit, and --max-tokens.
    """
    longest = max(map(len, prompts))
    if longest + max_tokens > config.max_positions:
        raise SettingError(
            f"--max-tokens is {max_tokens} and the longest prompt has {longest} tokens: "
            f"the model allows {config.max_positions} together"
        )
