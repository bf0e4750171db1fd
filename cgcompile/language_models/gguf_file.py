"""Converts a GGUF file to a folder in the Hub's layout: weights as float32 in safetensors, configuration and tokenizer.

`check_gguf` checks what is possible before torch and transformers are imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from ..errors import BuildError, ModelError

PACKAGES = ("transformers", "gguf", "accelerate")
EXTRA = "pip install 'transformers>=5' 'gguf>=0.17' 'accelerate>=1.1'"
MAGIC = b"GGUF"

MARK = ".from_gguf"
"""A file in every folder that this module writes.  Folders without it are not replaced: they may hold the only copy of a model."""


def check_gguf(label: str, folder: Path, force: bool) -> None:
    """Raises source-missing, folder-invalid for a file that is not GGUF, extra-missing, and output-exists or output-unwritable if
    `folder` cannot be written."""
    path = Path(label)
    if not path.is_file():
        raise BuildError("source-missing", f"{label}: no such file")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError("folder-invalid", f"{label}: not a GGUF file", "download it again")
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            problem = f"reading a GGUF file needs {package}, of the extras llm and gguf, which is not installed"
            raise BuildError("extra-missing", problem, EXTRA)
    if folder.exists():
        if not (folder / MARK).is_file():
            problem = f"{folder}: exists, and was not written from a GGUF file; the weights and the tokenizer of {label} go there"
            raise BuildError("output-unwritable", problem, "give -o in another folder")
        if not force:
            problem = f"{folder}: exists; the weights and the tokenizer of {label} go there"
            raise BuildError("output-exists", problem, f"give --force, or build the folder: cgcompile build {folder}")


def write_folder(label: str, folder: Path) -> None:
    """Writes the folder of a GGUF file, or replaces one that this function wrote.  Raises folder-invalid for a file that
    transformers cannot read."""
    import torch  # imported here, because `check_gguf` needs neither torch nor transformers
    import transformers
    from transformers import modeling_gguf_pytorch_utils as reader

    from .comparison.refusal import error_text
    from .networks import quiet

    path = Path(label).resolve()
    options = {"gguf_file": path.name, "local_files_only": True}
    folder.parent.mkdir(parents=True, exist_ok=True)
    bar = reader.tqdm  # a progress bar that `quiet` does not disable
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        written = os.path.join(scratch, "folder")
        try:
            reader.tqdm = functools.partial(bar, disable=True)
            with quiet(), _read_once():
                model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
                model.hf_quantizer = None  # else save_pretrained refuses to write a model that is not quantized
                model.config.__dict__.pop("quantization_config", None)
                model.save_pretrained(written)
                transformers.AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(written)
        except Exception as error:
            problem = f"{label}: transformers cannot read it: {error_text(error)}"
            raise ModelError("folder-invalid", problem, "build the folder of the same model instead") from error
        finally:
            reader.tqdm = bar
        Path(written, MARK).write_text(f"{path.name}\n")
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(written, folder)


@contextmanager
def _read_once() -> Iterator[None]:
    """Caches the parsed file and the table of tensor names during the block.  transformers (5.23) parses the file for
    configuration, weights and tokenizer, and makes the table for every module.  Both together took half of the time of the
    conversion."""
    gguf = importlib.import_module("gguf")
    with (
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield
