"""A folder in the Hub's layout, read as JSON and tensor headers, so that missing files are reported before torch and transformers
are imported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError

CONFIG, INDEX, WHOLE = "config.json", "model.safetensors.index.json", "model.safetensors"

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A tokenizer has at least one of these files."""

UNQUANTIZED = "take the folder of the same model in bfloat16, float16 or float32"
DOWNLOAD = "download the folder again, with every file of it"
LONGEST_HEADER = 100 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFolder:
    """A complete folder.  `label` is the user's text, `name` the folder's name.  `config` has the contents of config.json, and
    `text` its section for the text model.  `weight_bytes` has the bytes of the weights by dtype of safetensors ("BF16")."""

    label: str
    name: str
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    weight_bytes: Mapping[str, int]

    @property
    def weights(self) -> int:
        """The number of elements of all weights."""
        return sum(size // WIDTHS.get(dtype, 4) for dtype, size in self.weight_bytes.items())


WIDTHS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def read_folder(label: str) -> ModelFolder:
    """Reads a folder.  Raises folder-invalid if a file is missing, damaged or quantized."""
    folder = Path(label)
    config = read_json(folder / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise invalid(folder / CONFIG, "it names no model_type", "it has to be the config.json of a model of transformers")
    text = next((config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config)
    for part in (config, text):
        if isinstance(part.get("quantization_config"), dict):
            method = part["quantization_config"].get("quant_method") or "an unnamed method"
            raise invalid(folder / CONFIG, f"the weights are quantized ({method}), and none of these are read", UNQUANTIZED)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise invalid(
            folder, "no tokenizer in it (tokenizer.json)", f"{DOWNLOAD}; or write it: tokenizer.save_pretrained({label!r})"
        )
    sizes: dict[str, int] = {}
    for path in weight_files(folder):
        for dtype, size in tensor_bytes(path).items():
            sizes[dtype] = sizes.get(dtype, 0) + size
    return ModelFolder(label=label, name=folder.resolve().name, config=config, text=text, weight_bytes=sizes)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files.  Raises folder-invalid if one is missing."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
            raise invalid(folder / INDEX, "it has no weight_map from tensors to files", DOWNLOAD)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise invalid(folder, f"{missing[0]} is missing{others}, which {INDEX} names", DOWNLOAD)
        return files
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if any(folder.glob("pytorch_model*.bin")):
        remedy = "load it with transformers and write it with save_pretrained(folder)"
        raise invalid(folder, f"its weights are pickled (pytorch_model.bin), expected {WHOLE}", remedy)
    raise invalid(folder, f"no weights in it ({WHOLE})", DOWNLOAD)


def tensor_bytes(path: Path) -> dict[str, int]:
    """Returns the bytes of a file's tensors by dtype.  Raises folder-invalid for a file that is not in the format safetensors, is
    truncated, or holds 8-bit floats."""
    length = path.stat().st_size
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        if length < 8 or not 0 < header <= min(length - 8, LONGEST_HEADER):
            raise invalid(path, f"its {length} bytes are no safetensors", DOWNLOAD)
        try:
            rows = json.loads(file.read(header))
            tensors = {name: (row["dtype"], *row["data_offsets"]) for name, row in rows.items() if name != "__metadata__"}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise invalid(path, "its header is damaged", DOWNLOAD) from None
    end = 8 + header + max([end for _, _, end in tensors.values()], default=0)
    if end > length:
        raise invalid(path, f"it is cut short: {length} bytes of {end}", DOWNLOAD)
    sizes: dict[str, int] = {}
    for name, (dtype, begin, end) in tensors.items():
        if str(dtype).startswith(("F8", "F4", "F6")):
            raise invalid(path, f"{name} is quantized ({dtype})", UNQUANTIZED)
        sizes[dtype] = sizes.get(dtype, 0) + end - begin
    return sizes


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a file.  Raises folder-invalid."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise invalid(path, f"it cannot be read: {error.strerror}", DOWNLOAD) from None
    except ValueError as error:
        raise invalid(path, f"it is not JSON: {error}", DOWNLOAD) from None
    if not isinstance(value, dict):
        raise invalid(path, f"it holds a {type(value).__name__}, expected an object", DOWNLOAD)
    return value


def invalid(place: Path, what: str, remedy: str) -> ModelError:
    """Returns the error for a folder."""
    return ModelError("folder-invalid", f"{place}: {what}", remedy)
