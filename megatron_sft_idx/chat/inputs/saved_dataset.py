"""Folders that Hugging Face datasets' ``save_to_disk`` writes, read without that library.

``state.json`` lists the Arrow files of a dataset; a folder with ``dataset_dict.json`` holds one such folder
a split.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_sft_idx.chat.inputs.json_value import parse_json
from megatron_sft_idx.errors import FormatError

__all__ = ["KNOWN_FILES", "SAVED_DATASET_NAMES", "files_of_folder", "is_saved_dataset"]

KNOWN_FILES = ".json, .jsonl (each also .gz or .zst), .parquet, .arrow, or a folder made by datasets' save_to_disk"

_STATE = "state.json"
_INFO = "dataset_info.json"
_SPLITS = "dataset_dict.json"
# One of these in a folder tells that it is a saved dataset, or a folder of splits.
SAVED_DATASET_NAMES = {_STATE, _INFO, _SPLITS}


def is_saved_dataset(folder: str | os.PathLike[str]) -> bool:
    """Whether ``files_of_folder`` has something to say about this folder; a folder of splits included."""
    path = Path(folder)
    return any((path / name).is_file() for name in SAVED_DATASET_NAMES)


def files_of_folder(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in the dataset's own order.

    Raises:
        FormatError: another kind of folder, one with several splits, or a dataset that is not complete.
    """
    path = Path(folder)
    if (path / _SPLITS).is_file():
        splits = _read(path / _SPLITS).get("splits")
        names = splits if isinstance(splits, list) else []
        choices = ", ".join(os.path.join(folder, str(name)) for name in names)
        raise FormatError(f"{folder}: a dataset with several splits; name the one you mean: {choices}")
    if (path / _STATE).is_file():
        names = _listed(path / _STATE)
    elif (path / _INFO).is_file():
        names = sorted(file.name for file in path.glob("*.arrow"))
    else:
        raise FormatError(
            f"{folder}: a folder, but not one made by save_to_disk; name the files in it by a glob, "
            f"such as {os.path.join(folder, '*.jsonl')!r}"
        )
    missing = [name for name in names if not (path / name).is_file()]
    if missing or not names:
        raise FormatError(f"{folder}: this saved dataset lacks its data: {', '.join(missing) or 'no .arrow files'}")
    return [os.path.join(folder, name) for name in names]


def _listed(path: Path) -> list[str]:
    state = _read(path)
    if state.get("_indices_data_files"):
        raise FormatError(f"{path}: the dataset is a selection of rows; call flatten_indices() and save it again")
    try:
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise FormatError(f"{path}: expected a list of file names under '_data_files'") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path}: expected a JSON object")
    return content
