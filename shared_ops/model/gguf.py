"""Turn a GGUF file into a Hugging Face folder, through transformers.

`python -m shared_ops.model.gguf FILE.gguf FOLDER`; needs the `gguf` extra.
"""

import sys
from pathlib import Path

from shared_ops.model.config import ConfigError


def convert(file: str | Path, folder: str | Path) -> Path:
    """Write the dequantised float32 model and the tokenizer of `file` to `folder`.

    Raises:
        ConfigError: the file is missing, or the gguf package is not installed.
    """
    file, folder = Path(file), Path(folder)
    if not file.is_file():
        raise ConfigError(f"GGUF file {str(file)!r} does not exist")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError("reading GGUF needs the package gguf: pip install gguf") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m shared_ops.model.gguf FILE.gguf FOLDER")
    try:
        print(convert(sys.argv[1], sys.argv[2]))
    except ConfigError as error:
        sys.exit(f"error: {error}")
