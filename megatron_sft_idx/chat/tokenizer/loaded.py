"""A tokenizer that a program has loaded with transformers: the folder it came from, if it is still what that holds.

Nothing here imports transformers: the object's own class loads the folder again, and both are compared.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol, runtime_checkable

from megatron_sft_idx.errors import FormatError

# What a call such as tokenizer(texts, truncation=True) leaves in the state. We neither cut nor pad.
_OF_CALLS = ("truncation", "padding")
_REMEDY = "call its save_pretrained(FOLDER), and pass that folder"


@runtime_checkable
class LoadedTokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    name_or_path: str

    def save_pretrained(self, save_directory: Any) -> Any:
        """Write the files from which it can be loaded again."""


def folder_of_loaded(tokenizer: LoadedTokenizer) -> str:
    """The folder that a loaded tokenizer came from.

    Args:
        tokenizer: of transformers, loaded from a local folder, or by a name of the Hugging Face hub into its cache.

    Raises:
        FormatError: there is no such folder, or the tokenizer was changed after it was loaded: its backend, special
            tokens or chat template are not what the folder holds.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise FormatError(f"tokenizer: a {kind} without a backend_tokenizer, by which it is compared; pass its folder")
    name = str(tokenizer.name_or_path)
    folder = name if os.path.isdir(name) else _cached(name)
    if folder is None:
        raise FormatError(
            f"tokenizer: a {type(tokenizer).__name__} from {name!r}, which is no folder on this machine; {_REMEDY}"
        )
    try:
        again = type(tokenizer).from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]
        now, then = _state(tokenizer), _state(again)
    except Exception as error:  # whatever the class raises: it cannot be compared
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(
            f"tokenizer: a {type(tokenizer).__name__} that cannot be compared with {folder} ({reason}); {_REMEDY}"
        ) from None
    if changed := [part for part in now if now[part] != then[part]]:
        raise FormatError(
            f"tokenizer: differs from {folder} in its {' and '.join(changed)}, so it was changed after it was loaded,"
            f" or loaded with other options; {_REMEDY}"
        )
    return folder


def _state(tokenizer: Any) -> dict[str, Any]:
    """What decides over ids and templates, by the name that messages give it."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ids = {name: value for name in special if (value := getattr(tokenizer, f"{name}_id", None)) is not None}
    return {
        "backend": {name: value for name, value in backend.items() if name not in _OF_CALLS},
        "special tokens": [special, ids, sorted(map(str, tokenizer.all_special_tokens))],
        "chat template": tokenizer.chat_template,
    }


def _cached(name: str) -> str | None:
    """The folder in the cache of the Hugging Face hub that holds a tokenizer; None where there is none. Offline."""
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):  # no such library, name, or files in the cache
        return None
