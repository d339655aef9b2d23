"""The Hugging Face hub, or a quick and clear answer where it cannot be reached."""

import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
PROBE_SECONDS = 5.0


class HubError(ValueError):
    """A model or data set that the hub did not give."""


def hub_reachable(seconds: float = PROBE_SECONDS) -> bool:
    """Whether the hub answers a request at all, found out within `seconds`.

    False without asking where HF_HUB_OFFLINE is set.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    answers: list[bool] = []
    # A thread, as name resolution obeys no timeout; a daemon, so that it cannot hold up the exit.
    asking = threading.Thread(target=lambda: answers.append(_ask(seconds)), daemon=True)
    asking.start()
    asking.join(seconds)
    return bool(answers and answers[0])


def fetch_model(name: str, flag: str = "--model") -> Path:
    """The folder of a model: `name` itself where it is one, else the hub's (cached or loaded).

    Raises HubError in one line, within seconds where the hub is out of reach.
    """
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    require_hub_name(name, flag)
    go_offline_unless_reachable()
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise hub_error("model", name, flag, error) from error


def require_hub_name(name: str, flag: str) -> None:
    """Raises HubError for what can only be meant as a path, and is none."""
    parts = name.split("/")
    if Path(name).exists():
        raise HubError(f"{flag} {name}: is a file, give the folder that holds it")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~")):
        raise HubError(f"{flag} {name}: no such folder, give an existing folder or a hub name")


def go_offline_unless_reachable() -> None:
    """Puts the hub's libraries into offline mode, for this process, where the hub does not answer.

    They then use their caches, and fail at once instead of retrying for half a minute.
    """
    if hub_reachable():
        return
    os.environ.update(dict.fromkeys(OFFLINE_VARIABLES, "1"))
    # The libraries read the variables when they are imported, which may have been before.
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            vars(sys.modules[module]).update(dict.fromkeys(OFFLINE_VARIABLES, True))


def hub_error(kind: str, name: str, flag: str, error: Exception) -> HubError:
    """One line that says what was asked of the hub, what it said, and which flags need no hub."""
    reason = " ".join(str(error).split())[:160]
    return HubError(
        f"{flag} {name}: the hub gave no such {kind} ({type(error).__name__}: {reason}); "
        "without a hub use local paths, --data FOLDER (train.jsonl, test.jsonl) and --model FOLDER"
    )


def _ask(seconds: float) -> bool:
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(endpoint, method="HEAD"), timeout=seconds
        ):
            return True
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        # It answered; whether its certificate is to be trusted is for the hub's library to say.
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, ValueError):
        return False
