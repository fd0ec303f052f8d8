"""``PackedSFTDatasetConfig``: what Megatron's dataset builder is told, checked on every rank before any rank waits.

Megatron lets rank 0 build first while the others wait at a barrier. An error on rank 0 alone would leave them waiting
until the process group times out, so everything that headers can tell is checked when the configuration is made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.layout import Header
from megatron_sft_idx.layout.column import listed_columns
from megatron_sft_idx.shard.shard_set import ShardSet, joined_columns
from megatron_sft_idx.storage import ReadOptions, is_remote
from megatron_sft_idx.training.sources import PlanOptions, require_fit

__all__ = ["PackedSFTDatasetConfig"]

logger = logging.getLogger(__name__)

# Rows less full than this were hardly packed for this job.
_LITTLE = 0.5


@dataclass
class PackedSFTDatasetConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Configuration of ``PackedSFTDataset``.

    Of the parent's fields, ``random_seed``, ``sequence_length``, ``blend`` or ``blend_per_split``, ``split``,
    ``path_to_cache`` and ``num_dataset_builder_threads`` mean what they mean there; a path of a blend may be one shard,
    a folder or a glob of shards, on disk or at ``s3://`` or ``msc://``, whose index files are then kept in
    ``object_storage_cache_path`` (None for the usual folder). The tokenizer may be None. What has to do with stock
    documents (resetting positions and masks, EOD) is not looked at: rows carry their sequence boundaries.

    Attributes:
        index_only_packing: pack the sequences of the shards for ``sequence_length`` when training starts, instead of
            taking packs as they are stored. Splits then go by sequence, not by pack.
        packing_method: of ``pack_sequences``, for index-only packing.
        max_sequences_per_pack: for index-only packing; None for no limit.
        single_sequences: one sequence a sample, for Megatron's packing scheduler; see ``SingleRows``.
        sequence_multiple: pad each sequence to a multiple of this inside its row. None takes what the parallelism
            needs: 2 x ``context_parallel_size`` where that is above 1, times ``sequence_parallel_size`` where set.
        pad_id: fills up rows; None takes the shards', then the tokenizer's, then 0.
        columns: names of columns that rows come with, beside what Megatron's own data sets give; every shard has them.
            ``docs/megatron.md`` says how a forward step takes them.
        padding_mask: whether rows have one, bool [sequence_length], True on padding: for forward steps that hand it to
            ``GPTModel``, whose MoE routers then count tokens alone.
        tokenizer_fingerprint: of the tokenizer the model is trained with; shards that were made with another one are
            refused.
        vocab_size: rows of the model's embedding; shards whose tokenizer has more tokens are refused. None is not
            looked at.
        global_batch_size: for the log line that says how many steps an epoch has.
        plan_cache: folder for the plans of index-only packing; None takes ``path_to_cache``.
        read: how local shards are read: by maps, or by ``pread`` where ``mmap_bin_files`` is False.
    """

    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    eod_mask_loss: bool | None = False
    create_attention_mask: bool = False
    path_to_cache: str | None = None
    index_only_packing: bool = False
    packing_method: str = "auto"
    max_sequences_per_pack: int | None = None
    single_sequences: bool = False
    sequence_multiple: int | None = None
    pad_id: int | None = None
    columns: tuple[str, ...] = ()
    padding_mask: bool = False
    tokenizer_fingerprint: str | None = None
    vocab_size: int | None = None
    global_batch_size: int | None = None
    plan_cache: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    _most_sequences: int = field(init=False, default=0, repr=False)
    _opened: dict[str, ShardSet] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Fill in what is derived, and check everything that needs no more than headers.

        Raises:
            FormatError: options or shards that cannot be trained on; the message says which and what to do.
            ShardNotFoundError: a path without a shard.
            SequenceError: index-only packing of sequences longer than a row.
        """
        if self.blend is None and not any(self.blend_per_split or ()):
            raise FormatError("neither blend nor blend_per_split is given; name the shards to train on (--data-path)")
        if self.single_sequences:
            self.index_only_packing, self.packing_method, self.max_sequences_per_pack = True, "sequential", 1
            if self.columns:
                raise FormatError(
                    f"columns {', '.join(self.columns)}: Megatron's packing scheduler hands on none; leave them out, or"
                    " train on packs"
                )
        self.read = ReadOptions.of("read", self.read)
        # Megatron wants it off for object storage, where nothing is mapped here either.
        if not self.mmap_bin_files and self.read.backend == "mmap" and not self._all_remote():
            self.read = self.read._replace(backend="pread")
        self._check_weights()
        # Not GPTDatasetConfig's, which insists on a tokenizer.
        BlendedMegatronDatasetConfig.__post_init__(self)
        self._derive_multiple()
        self._choose_caches()
        checked: dict[str, ShardSet] = {}
        for path, split, ends in self._parts():
            if path not in checked:
                checked[path] = self.open_shards(path)
                self._check_shards(path, checked[path])
            self._check_split(path, split, ends, checked[path])
        self._check_together(checked)

    def _blends(self) -> Iterator[tuple[Split | None, tuple[list[str], list[float] | None]]]:
        if self.blend is not None:
            yield None, self.blend
        for split, blend in zip(Split, self.blend_per_split or (), strict=False):
            if blend is not None:
                yield split, blend

    def _all_remote(self) -> bool:
        return all(is_remote(path) for _, (paths, _) in self._blends() for path in paths)

    def _check_weights(self) -> None:
        for _, (paths, weights) in self._blends():
            if not paths:
                raise FormatError("a blend without any path; name at least one shard, or leave the blend out")
            if weights is None:
                continue
            if len(weights) != len(paths):
                raise FormatError(f"{len(weights)} weights for {len(paths)} paths in a blend; give one weight a path")
            for path, weight in zip(paths, weights, strict=True):
                if not (math.isfinite(weight) and weight > 0):
                    raise FormatError(f"{path}: blend weight {weight}, weights are above zero; leave the path out")

    def _derive_multiple(self) -> None:
        if self.sequence_multiple is None:
            context = self.context_parallel_size or 1
            self.sequence_multiple = (2 * context if context > 1 else 1) * max(self.sequence_parallel_size, 1)
        multiple = self.sequence_multiple
        if multiple < 1 or self.sequence_length % multiple:
            raise FormatError(
                f"sequence_length {self.sequence_length} is no multiple of the sequence multiple {multiple}, so rows"
                " cannot be divided among context-parallel ranks; round it up"
            )

    def _choose_caches(self) -> None:
        """Keep the cache for plans, and away from Megatron's blends where they cannot use it.

        On a cache miss megatron-core 0.16 asks for the rank to find out who writes the blend's index, and fails where
        torch.distributed is not initialised. Such an index is quickly made, so one process makes it anew every time.
        """
        self.plan_cache = self.plan_cache or self.path_to_cache
        needed = self.fast_cache_load or self.defer_npy_index_mmap
        if self.path_to_cache and not torch.distributed.is_initialized() and not needed:
            log_single_rank(
                logger,
                logging.INFO,
                "torch.distributed is not initialised: packing plans are cached in %s, blend indices are not",
                self.path_to_cache,
            )
            self.path_to_cache = None

    def _parts(self) -> Iterator[tuple[str, Split, tuple[float, float]]]:
        """Each path with each split that draws from it and the share of the path that is the split's."""
        for split, (paths, _) in self._blends():
            for path in paths:
                if split is not None:
                    yield path, split, (0.0, 1.0)
                    continue
                for each, ends in zip(Split, self.split_matrix, strict=True):
                    if ends is not None:
                        yield path, each, ends

    def open_shards(self, path: str) -> ShardSet:
        """The shards of one path of a blend; what was checked is what is trained on, and headers are read once."""
        if path not in self._opened:
            self._opened[path] = ShardSet.open(
                path,
                backend=self.read,
                same_capacity=not self.index_only_packing,
                index_cache=self.object_storage_cache_path,
                columns=self.columns,
            )
        return self._opened[path]

    @property
    def plan_options(self) -> PlanOptions:
        """How index-only packing packs."""
        return PlanOptions(
            self.sequence_length,
            self.sequence_multiple or 1,
            self.packing_method,
            self.max_sequences_per_pack,
            self.random_seed,
        )

    def _check_shards(self, path: str, shards: ShardSet) -> None:
        self._check_tokenizer(shards)
        self._check_judged(shards)
        if masked := shards.total("num_masked_packs"):
            what = "sequences" if len(shards) == shards.num_sequences else "packs"
            log_single_rank(
                logger,
                logging.WARNING,
                "%s: %d of %d %s train no token at all; megatron-sft-idx inspect names them",
                path,
                masked,
                len(shards),
                what,
            )
        if self.index_only_packing:
            require_fit(shards, self.plan_options)
            return
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            if header.capacity > self.sequence_length:
                raise FormatError(
                    f"{prefix}: packs of up to {header.capacity} tokens, sequence_length is {self.sequence_length};"
                    " raise it, pack the shard again, or set index_only_packing"
                )
            if header.sequence_multiple % (self.sequence_multiple or 1):
                raise FormatError(
                    f"{prefix}: packed for sequence multiple {header.sequence_multiple}, this job pads sequences to"
                    f" multiples of {self.sequence_multiple}; pack it with --sequence-multiple"
                    f" {self.sequence_multiple}, or set index_only_packing"
                )
        fill = shards.total("num_tokens") / max(len(shards) * self.sequence_length, 1)
        if fill < _LITTLE:
            log_single_rank(
                logger,
                logging.WARNING,
                "%s: rows of %d are %.0f%% full; pack the shards, or set index_only_packing",
                path,
                self.sequence_length,
                100 * fill,
            )
        self.allow_sequences(max(header.most_sequences for header in shards.headers))

    def _check_tokenizer(self, shards: ShardSet) -> None:
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            size, found = header.vocab_size or 0, header.tokenizer
            if self.vocab_size is not None and size > self.vocab_size:
                raise FormatError(
                    f"{prefix}: its tokenizer has {size} tokens, the model's vocabulary {self.vocab_size}; raise"
                    " --vocab-size, or take the tokenizer the shard was made with"
                )
            if None not in (found, self.tokenizer_fingerprint) and found != self.tokenizer_fingerprint:
                raise FormatError(
                    f"{prefix}: tokenized with {found}, the tokenizer of this job is {self.tokenizer_fingerprint};"
                    " take the tokenizer the shard was made with, or tokenize again"
                )

    def _check_judged(self, shards: ShardSet) -> None:
        """FormatError where answers that are judged would be trained on as if they were not."""
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            listed, options = listed_columns(header.metadata), header.metadata.get("options")
            of_kto = isinstance(options, dict) and options.get("row_kind") == "kto"
            told = listed.keys() & ({"pair", "label"} if of_kto else {"pair"})
            if missing := told.difference(self.columns):
                raise FormatError(
                    f"{prefix}: its answers are judged, by the column {missing.pop()}; ask for it in columns, and take"
                    " a loss that goes by it, such as training.dpo's: without, the rejected ones are learnt too"
                )

    def _check_split(self, path: str, split: Split, ends: tuple[float, float], shards: ShardSet) -> None:
        what = "sequences" if self.index_only_packing else "packs"
        count = shards.num_sequences if self.index_only_packing else len(shards)
        if not ends[0] <= ends[1]:  # no number, or none above 0
            raise FormatError(f"split {self.split!r}: expected parts of all {what}, such as 98,1,1")
        # As Megatron's builder rounds.
        if round(ends[0] * float(count)) >= round(ends[1] * float(count)):
            raise FormatError(
                f"{path}: the {split.name} split is empty, {ends[0]:.4g} to {ends[1]:.4g} of {count} {what}; give it"
                " more of --split, or none at all"
            )

    def _check_together(self, checked: dict[str, ShardSet]) -> None:
        """FormatError where paths differ in what their shards agree on within each."""
        joined_columns(list(checked.values()))
        for what, value_of, remedy in (
            ("tokenizer is", lambda header: header.tokenizer, "tokenize them with one"),
            ("capacity is", self._capacity_of, "pack them again for one --seq-length, or set index_only_packing"),
        ):
            first: tuple[str, Any] | None = None
            for path, shards in checked.items():
                value = next((v for v in map(value_of, shards.headers) if v is not None), None)
                if value is None:
                    continue
                first = first or (path, value)
                if value != first[1]:
                    raise FormatError(f"{path}: {what} {value}, in {first[0]} {first[1]}; {remedy}")

    def _capacity_of(self, header: Header) -> int | None:
        return None if self.index_only_packing else header.capacity

    def allow_sequences(self, most: int) -> None:
        """Make room in ``cu_seqlens`` for rows of this many sequences."""
        self._most_sequences = max(self._most_sequences, most)

    @property
    def cu_seqlens_width(self) -> int:
        """Length of ``cu_seqlens``, one for all data sets of this configuration, so that their rows stack.

        Known from the headers for stored packs; with index-only packing, once all data sets are built.
        """
        return self._most_sequences + 2
