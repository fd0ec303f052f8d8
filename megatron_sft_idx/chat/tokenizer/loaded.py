"""A tokenizer that a program loaded with transformers: find its folder, and check that it is unchanged.

Nothing here imports transformers: the object's own class loads the folder again, and both are compared.
"""

from __future__ import annotations

import json
import os
from typing import Any, Protocol, runtime_checkable

from megatron_sft_idx.errors import FormatError

# State that a call such as tokenizer(texts, truncation=True) leaves. This package neither truncates nor pads.
_OF_CALLS = ("truncation", "padding")
_REMEDY = "call its save_pretrained(FOLDER), and pass that folder"
# The methods with which a program gets the ids of a chat. This package uses the folder's files and calls none of them.
_OF_IDS = (
    *("__call__", "_batch_encode_plus", "_encode_plus", "_tokenize", "apply_chat_template", "batch_encode_plus"),
    *("build_inputs_with_special_tokens", "convert_tokens_to_ids", "encode", "encode_plus", "get_chat_template"),
    "tokenize",
)


@runtime_checkable
class LoadedTokenizer(Protocol):
    """The interface of a transformers tokenizer that is used here."""

    name_or_path: str

    def save_pretrained(self, save_directory: Any) -> Any:
        """Write the files from which it can be loaded again."""


def folder_of_loaded(tokenizer: LoadedTokenizer) -> str:
    """Return the folder from which a tokenizer was loaded.

    Args:
        tokenizer: a tokenizer of transformers, loaded from a local folder, or by a name of the Hugging Face hub into
            its cache.

    Raises:
        FormatError: there is no such folder; the tokenizer splits special tokens, or a method that returns ids was
            overridden; or its backend, special tokens or chat template differ from those in the folder.
    """
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise FormatError(
            f"tokenizer: this {kind} has no backend_tokenizer, which is needed to compare it with its files; pass"
            " its folder instead"
        )
    name = str(tokenizer.name_or_path)
    folder = name if os.path.isdir(name) else _cached(name)
    if folder is None:
        raise FormatError(
            f"tokenizer: this {type(tokenizer).__name__} was loaded from {name!r}, which is not a local folder;"
            f" {_REMEDY}"
        )
    if getattr(tokenizer, "split_special_tokens", False) or tokenizer.backend_tokenizer.encode_special_tokens:
        raise FormatError(
            "tokenizer: it splits special tokens, which preprocess does not support; set its split_special_tokens and"
            " its backend_tokenizer.encode_special_tokens to False"
        )
    if foreign := [name for name in _OF_IDS if _is_foreign(tokenizer, name)]:
        raise FormatError(
            f"tokenizer: it overrides {' and '.join(foreign)} of transformers, but preprocess never calls methods of a"
            f" tokenizer; pass {folder} to use the ids of its files, a Jinja template with chat_template=FILE, or rows"
            " with input_ids"
        )
    try:
        again = type(tokenizer).from_pretrained(folder, local_files_only=True)  # type: ignore[attr-defined]
        now, then = _state(tokenizer), _state(again)
    except Exception as error:  # any error of the class: it cannot be compared
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(
            f"tokenizer: this {type(tokenizer).__name__} cannot be compared with {folder} ({reason}); {_REMEDY}"
        ) from None
    if changed := [part for part in now if now[part] != then[part]]:
        raise FormatError(
            f"tokenizer: differs from {folder} in its {' and '.join(changed)}, so it was changed after loading, or"
            f" loaded with other options; {_REMEDY}"
        )
    return folder


def _state(tokenizer: Any) -> dict[str, Any]:
    """Return what determines ids and templates, by the name used in messages."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    ids = {name: value for name in special if (value := getattr(tokenizer, f"{name}_id", None)) is not None}
    return {
        "backend": {name: value for name, value in backend.items() if name not in _OF_CALLS},
        "special tokens": [special, ids, sorted(map(str, tokenizer.all_special_tokens))],
        "chat template": tokenizer.chat_template,
    }


def _is_foreign(tokenizer: Any, name: str) -> bool:
    """Return whether a method was overridden outside transformers, in a class or only on the object."""
    if name in vars(tokenizer):
        return True
    owner = next((each for each in type(tokenizer).__mro__ if name in vars(each)), None)
    modules = [] if owner is None else [owner.__module__, getattr(vars(owner)[name], "__module__", None)]
    return any(str(module).partition(".")[0] != "transformers" for module in modules)


def _cached(name: str) -> str | None:
    """Return the folder of a tokenizer in the cache of the Hugging Face hub, or None. Offline."""
    try:
        from huggingface_hub import snapshot_download

        return str(snapshot_download(name, local_files_only=True))
    except (ImportError, OSError, ValueError):  # the library, the name or the files do not exist
        return None
