"""``PackedSFTDataset``: packed SFT data for Megatron's dataset builder; ``PackedSFTDatasetConfig``: its configuration.

Megatron lets rank 0 build first while the other ranks wait at a barrier. An error only on rank 0 would leave them
waiting until the process group times out. Everything that can be checked with the headers is therefore checked when the
configuration is made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank
from numpy.typing import NDArray

from megatron_sft_idx.errors import FormatError, brief
from megatron_sft_idx.layout import ShardPaths
from megatron_sft_idx.layout.files import MAX_COUNT
from megatron_sft_idx.lines import Shown, get_logger, value_text
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import ReadOptions, is_remote
from megatron_sft_idx.training.batch import Batch, SourceFiles, parallel_multiple
from megatron_sft_idx.training.media import MediaStep, check_media_options
from megatron_sft_idx.training.pretraining import Corpus, EveryToken, PretrainingPacks, is_pretraining
from megatron_sft_idx.training.rows import MediaCosts, PackedRows, PretrainingRows, SingleRows, encoder_costs
from megatron_sft_idx.training.sources import (
    CARRIED_BY,
    PlannedPacks,
    PlanOptions,
    StoredPacks,
    blend_weights,
    require_fit,
    require_text,
)

logger = get_logger(__name__)

# ---- configuration of a run ----


@dataclass(repr=False)
class PackedSFTDatasetConfig(Shown, GPTDatasetConfig):  # type: ignore[misc]
    """Configuration of ``PackedSFTDataset``.

    These fields of the parent have the same meaning as there: ``random_seed``, ``sequence_length``, ``blend`` or
    ``blend_per_split``, ``split``, ``path_to_cache`` and ``num_dataset_builder_threads``. The tokenizer can be None.
    Fields for stock documents (resetting positions and masks, EOD) are ignored, because rows have sequence boundaries.

    A path of a blend is a shard, a folder or a glob of shards, on disk or at ``s3://`` or ``msc://``. The index files
    of remote shards are cached in ``object_storage_cache_path`` (None for the default folder). A path can also be
    ``pretrain:`` and the prefix of a stock Megatron dataset on disk; every token of its rows is trained.

    Attributes:
        index_only_packing: pack the sequences of the shards for ``sequence_length`` when training starts, instead of
            using the stored packs. Splits then divide sequences, not packs.
        packing_method: method of ``pack_sequences``, for index-only packing.
        max_sequences_per_pack: limit for index-only packing; None for no limit.
        single_sequences: one sequence per sample, for Megatron's packing scheduler; see ``SingleRows``.
        sequence_multiple: pad each sequence to a multiple of this inside its row. None uses the multiple that the
            parallelism needs: 2 x ``context_parallel_size`` if that is above 1, times ``sequence_parallel_size`` if
            set.
        pad_id: id for padding; None uses that of the shards, then that of the tokenizer, then 0.
        columns: names of columns that rows have in addition to the fields of Megatron's own data sets; every shard must
            have them. ``docs/megatron.md`` shows how to use them in a forward step.
        media: makes model inputs from the images and audio of each batch, which are added to the batch:
            ``training.media.MediaInputs``. Without it, shards with images or audio are refused.
        media_costs: the work of the model's encoders for ``image`` and ``audio``, which ranks are balanced by in
            addition to attention: numbers per position, or ``rows.EncoderCost``. None for ``rows.ENCODER_COSTS``.
        ignore_media: train on shards with images and audio as if their placeholder tokens were text.
        padding_mask: whether rows have a padding mask, bool [sequence_length], True on padding. It is for forward steps
            that pass it to ``GPTModel``; MoE routers then count only tokens.
        tokenizer_fingerprint: fingerprint of the model's tokenizer; shards that were made with another tokenizer are
            refused.
        vocab_size: rows of the model's embedding; shards whose tokenizer has more tokens are refused. None skips this
            check.
        num_samples: requested rows of each split, None for one epoch. Splits with 0 rows are left out, even if a shard
            is too small to have any rows for them.
        global_batch_size: used in the log line with the number of steps per epoch.
        plan_cache: folder for the plans of index-only packing; None for ``path_to_cache``.
        read: how to read local shards: with memory maps, or with ``pread`` if ``mmap_bin_files`` is False.

    Example:
        >>> blend = (["data/chats"], None)  # paths and weights
        >>> config = PackedSFTDatasetConfig(random_seed=1, sequence_length=16, blend=blend, split="90,10,0")
        >>> config.count("data/chats"), config.split_matrix  # 7 packs, divided into 90 and 10 percent
        (7, [(0, 0.9), (0.9, 1.0), None])
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
    media: MediaStep | None = None
    media_costs: MediaCosts | None = None
    ignore_media: bool = False
    padding_mask: bool = False
    tokenizer_fingerprint: str | None = None
    vocab_size: int | None = None
    num_samples: tuple[int | None, ...] | None = None
    global_batch_size: int | None = None
    plan_cache: str | None = None
    read: ReadOptions = field(default_factory=ReadOptions)
    most_sequences: int = field(init=False, default=0, repr=False)
    _opened: dict[str, ShardSet] = field(init=False, default_factory=dict, repr=False)
    _documents_cache: str | None = field(init=False, default=None, repr=False)
    _corpora: dict[str, tuple[Corpus, Any]] = field(init=False, default_factory=dict, repr=False)

    def _shown(self) -> str:
        """Return the fields that differ from their defaults; there are more than fifty fields."""
        changed = ((each.name, getattr(self, each.name)) for each in fields(self) if each.repr)
        defaults = {each.name: each.default for each in fields(self)}
        return ", ".join(f"{name}={value_text(value)}" for name, value in changed if value != defaults[name])

    def __post_init__(self) -> None:
        """Set derived fields, and check everything that needs only the headers.

        Raises:
            FormatError: options or shards cannot be used for training; the message says which and what to do.
            ShardNotFoundError: there is no shard at a path.
            SequenceError: with index-only packing, sequences are longer than a row.
        """
        if self.blend is None and not any(self.blend_per_split or ()):
            raise FormatError("neither blend nor blend_per_split is given; pass the shards to train on (--data-path)")
        if self.single_sequences:
            self.index_only_packing, self.packing_method, self.max_sequences_per_pack = True, "sequential", 1
        self._check_options()
        self.read, blends = ReadOptions.of("read", self.read), [blend for _, blend in self._blends()]
        # Megatron requires mmap_bin_files to be off for object storage, where nothing is mapped here either.
        all_remote = all(is_remote(path) for paths, _ in blends for path in paths)
        if not self.mmap_bin_files and self.read.backend == "mmap" and not all_remote:
            self.read = self.read._replace(backend="pread")
        for blend in blends:
            self._check_weights(*blend)
        try:
            # Not that of GPTDatasetConfig, which requires a tokenizer.
            BlendedMegatronDatasetConfig.__post_init__(self)
        except (AssertionError, ValueError) as error:
            why = " ".join(str(error).split()) or "expected up to three numbers, such as 98,1,1"
            if why.startswith("--"):  # Megatron's message begins with its flag
                raise FormatError(why) from None
            raise FormatError(f"split {self.split!r} or a related option: {why}") from None
        self._leave_out_unwanted()
        if self.sequence_multiple is None:
            self.sequence_multiple = parallel_multiple(self.context_parallel_size, self.sequence_parallel_size)
        if self.sequence_multiple < 1 or self.sequence_length % self.sequence_multiple:
            raise FormatError(
                f"sequence_length {self.sequence_length} is not a multiple of the sequence multiple"
                f" {self.sequence_multiple}, so rows cannot be divided among context-parallel ranks; round it up"
            )
        self.plan_options = PlanOptions(
            self.sequence_length,
            self.sequence_multiple,
            self.packing_method,
            self.max_sequences_per_pack,
            self.random_seed,
        )
        self._choose_caches()
        self._check_paths()
        # Properties that all shards of one path must share must be the same for the shards of all paths.
        together = ShardSet.joined(list(self._opened.values()))
        together.agree_on(
            "tokenizer is", lambda header: header.tokenizer, "tokenize all of them with the same tokenizer"
        )
        if not self.index_only_packing:
            remedy = "pack them again with the same --seq-length, or set index_only_packing"
            together.agree_on("capacity is", lambda header: header.capacity or None, remedy)
        # All data sets of a blend number files in the same way, so that a number does not depend on the data set.
        united = SourceFiles.of(together.columns["source"]) if "source" in self.columns else None
        if self._corpora:
            self._check_mixed(has_files=united is not None)
        self.source_files: list[dict[str, Any]] = []
        if united and len(self._opened) + len(self._corpora) > 1:
            self.source_files = [*united.files, *(corpus.source_file for corpus, _ in self._corpora.values())]

    def _check_options(self) -> None:
        """Check that no option is set without effect."""
        check_media_options(self.media, self.ignore_media)
        encoder_costs(self.media_costs)  # raises its errors now
        if self.media_costs is not None and self.media is None:
            raise FormatError("media_costs only apply to batches with images and audio; also set media")
        if self.single_sequences and (self.columns or self.media is not None):
            what = f"columns {', '.join(self.columns)}" if self.columns else "media"
            raise FormatError(
                f"{what}: Megatron's packing scheduler only supports tokens and masks; leave this out, or train on"
                " packs"
            )
        if not self.index_only_packing and (self.packing_method, self.max_sequences_per_pack) != ("auto", None):
            raise FormatError("packing_method and max_sequences_per_pack need index_only_packing; also set that")
        if self.pad_id is not None and not 0 <= self.pad_id < (self.vocab_size or MAX_COUNT):
            size = f" of {self.vocab_size}" if self.vocab_size else ""
            raise FormatError(
                f"pad_id {self.pad_id}: not in the model's vocabulary{size}; leave it out to use the pad id of"
                " the shards"
            )

    def _check_paths(self) -> None:
        for path, split, ends in self._split_ranges():
            if not ends[0] <= ends[1]:  # NaN: the parts are not numbers, or none is above 0
                what = "sequences" if self.index_only_packing else "packs"
                raise FormatError(f"split {self.split!r}: expected shares of all {what}, such as 98,1,1")
            if is_pretraining(path):
                self._check_documents(path, split, ends)
                continue
            if path not in self._opened:
                self._check_shards(path, self.open_shards(path))
            self._check_split(path, split, ends)
        if not self._opened:
            raise FormatError(
                f"{', '.join(self._corpora)}: no packed SFT data in the blend; add a shard, or train on this with"
                " Megatron's own datasets"
            )

    def _blends(self) -> Iterator[tuple[Split | None, tuple[list[str], list[float] | None]]]:
        if self.blend is not None:
            yield None, self.blend
        for split, blend in zip(Split, self.blend_per_split or (), strict=False):
            if blend is not None:
                yield split, blend

    def _leave_out_unwanted(self) -> None:
        for split in Split:
            if self.num_samples is None or self.num_samples[split.value] != 0:
                continue
            for of_splits in (self.split_matrix, self.blend_per_split):
                if of_splits is not None:
                    of_splits[split.value] = None
        if not any(self.split_matrix or self.blend_per_split or ()):
            raise FormatError(
                f"split {self.split!r}: nothing to train on, because every split with requested rows has the share 0;"
                " write it like --split 99,1,0"
            )

    @staticmethod
    def _check_weights(paths: list[str], weights: list[float] | None) -> None:
        if not paths:
            raise FormatError("a blend without any path; pass at least one shard, or leave the blend out")
        if weights is None:
            return
        if not isinstance(weights, list | tuple):
            raise FormatError(f"blend: the weights are {brief(weights)}, expected a list of numbers, one per path")
        if len(weights) != len(paths):
            raise FormatError(f"{len(weights)} weights for {len(paths)} paths in a blend; pass one weight per path")
        blend_weights(paths, weights)

    def _choose_caches(self) -> None:
        """Use the cache folder for plans, and disable it for Megatron's blends if they cannot use it.

        On a cache miss, megatron-core 0.16 asks for the rank to decide which process writes the index of the blend.
        This fails if torch.distributed is not initialised. Building such an index is fast, so a single process rebuilds
        it every time.
        """
        # Not plan_cache, which can be a local folder on each node.
        self._documents_cache = self.path_to_cache
        self.plan_cache = self.plan_cache or self.path_to_cache
        needed = self.fast_cache_load or self.defer_npy_index_mmap
        if self.path_to_cache and not torch.distributed.is_initialized() and not needed:
            log_single_rank(
                logger,
                logging.INFO,
                "torch.distributed is not initialised: packing plans are cached in %s, but blend indices are"
                " not cached",
                self.path_to_cache,
            )
            self.path_to_cache = None

    def _split_ranges(self) -> Iterator[tuple[str, Split, tuple[float, float]]]:
        """Yield each path with each split that uses it and the split's range of the path, as fractions."""
        for split, (paths, _) in self._blends():
            for path in paths:
                if split is not None:
                    yield path, split, (0.0, 1.0)
                    continue
                for each, ends in zip(Split, self.split_matrix, strict=True):
                    if ends is not None:
                        yield path, each, ends

    def open_shards(self, path: str) -> ShardSet:
        """Return the shards of a path of a blend. They are opened once, so the checked shards are the trained ones."""
        if path not in self._opened:
            _require_no_stock_dataset(path)
            self._opened[path] = ShardSet.open(
                path,
                backend=self.read,
                same_capacity=not self.index_only_packing,
                index_cache=self.object_storage_cache_path,
                columns=self.columns,
            )
        return self._opened[path]

    def open_documents(self, path: str) -> tuple[Corpus, Any]:
        """Return the pretraining data of a path of a blend, and Megatron's ``IndexedDataset`` of its documents."""
        if path not in self._corpora:
            corpus = Corpus.open(path)
            documents = GPTDataset.build_low_level_dataset(corpus.prefix, self.config_of_documents(corpus))
            self._corpora[path] = corpus, documents
        return self._corpora[path]

    def config_of_documents(self, corpus: Corpus) -> GPTDatasetConfig:
        """Return the configuration of Megatron's ``GPTDataset`` for a corpus."""
        blend = [corpus.prefix], None
        one_for_all = self.blend is not None
        return GPTDatasetConfig(
            random_seed=self.random_seed,
            sequence_length=self.sequence_length,
            blend=blend if one_for_all else None,
            blend_per_split=None if one_for_all else [blend] * len(Split),
            split=self.split if one_for_all else None,
            path_to_cache=self._documents_cache,
            mmap_bin_files=self.mmap_bin_files,
            tokenizer=EveryToken(corpus.content),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            fast_cache_load=self.fast_cache_load,
            defer_npy_index_mmap=self.defer_npy_index_mmap,
        )

    def _check_documents(self, path: str, split: Split, ends: tuple[float, float]) -> None:
        """Check that a split has at least one row. For a split without rows, Megatron would loop endlessly."""
        lengths = self.open_documents(path)[1].sequence_lengths
        first, last = (round(end * float(len(lengths))) for end in ends)
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        if tokens <= self.sequence_length:
            raise FormatError(
                f"{path}: the {split.name} split has {tokens} tokens, in {last - first} of {len(lengths)} documents,"
                f" but a row needs {self.sequence_length + 1}, including its last label; give the split a larger share"
                " of --split, or 0, such as --split 99,1,0"
            )

    def _check_mixed(self, has_files: bool) -> None:
        """Refuse options that cannot be combined with pretraining data in a blend."""
        paths = ", ".join(self._corpora)
        if self.single_sequences:
            raise FormatError(
                f"{paths}: Megatron's packing scheduler needs single sequences, which pretraining data does not have;"
                " leave these paths out, or train on packs"
            )
        others = [name for name in self.columns if name != "source" or not has_files]
        if others:
            raise FormatError(f"{paths}: pretraining data has no column {others[0]}; leave out the paths or the column")

    def _check_shards(self, path: str, shards: ShardSet) -> None:
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            size, tokenizer = header.vocab_size or 0, header.tokenizer
            if self.vocab_size is not None and size > self.vocab_size:
                raise FormatError(
                    f"{prefix}: its tokenizer has {size} tokens, but the model's vocabulary has {self.vocab_size};"
                    " raise --vocab-size, or use the tokenizer that the shard was made with"
                )
            if None not in (tokenizer, self.tokenizer_fingerprint) and tokenizer != self.tokenizer_fingerprint:
                raise FormatError(
                    f"{prefix}: tokenized with {tokenizer}, but the tokenizer of this job is"
                    f" {self.tokenizer_fingerprint}; use the tokenizer that the shard was made with, or tokenize again"
                )
            require_shard_judged(prefix, header, self.columns)
            if self.media is None:
                require_text(prefix, header.has_media, self.ignore_media, CARRIED_BY)
            if self.index_only_packing:
                continue
            if header.capacity > self.sequence_length:
                raise FormatError(
                    f"{prefix}: packs of up to {header.capacity} tokens, but sequence_length is"
                    f" {self.sequence_length}; raise it (--seq-length), pack the shard again, or set"
                    " index_only_packing"
                )
            if header.sequence_multiple % self.plan_options.sequence_multiple:
                raise FormatError(
                    f"{prefix}: packed for sequence multiple {header.sequence_multiple}, but this job pads sequences"
                    f" to multiples of {self.sequence_multiple}; pack it with --sequence-multiple"
                    f" {self.sequence_multiple}, or set index_only_packing"
                )
        if masked := shards.total("num_masked_packs"):
            what = "sequences" if len(shards) == shards.num_sequences else "packs"
            message = f"{masked} of {len(shards)} {what} have no trained token; list them with megatron-sft-idx inspect"
            log_single_rank(logger, logging.WARNING, "%s: %s", path, message)
        if self.index_only_packing:
            require_fit(shards, self.plan_options)
            return
        fill = shards.total("num_tokens") / max(len(shards) * self.sequence_length, 1)
        if fill < 0.5:  # probably not packed for this job
            message = "%s: rows of %d are %.0f%% full; pack the shards, or set index_only_packing"
            log_single_rank(logger, logging.WARNING, message, path, self.sequence_length, 100 * fill)
        self.most_sequences = max(self.most_sequences, *(header.most_sequences for header in shards.headers))

    def _check_split(self, path: str, split: Split, ends: tuple[float, float]) -> None:
        what, count = "sequences" if self.index_only_packing else "packs", self.count(path)
        # Round like Megatron's builder; plans never separate pairs.
        step = 2 if self.index_only_packing and "pair" in self.columns else 1
        first, last = (round(end * float(count)) // step for end in ends)
        if first >= last:
            without = {
                Split.train: "",
                Split.valid: ", or turn evaluation off: --eval-iters 0",
                Split.test: ", or a share of 0, such as --split 99,1,0",
            }
            raise FormatError(
                f"{path}: the {split.name} split is empty, {ends[0]:.4g} to {ends[1]:.4g} of {count} {what}; give it a"
                f" larger share of --split{without[split]}"
            )

    @property
    def pretraining(self) -> list[str]:
        """Paths of the pretraining data in the blend."""
        return list(self._corpora)

    def count(self, path: str) -> int:
        """Return the number of units that splits of a path divide.

        Units are packs; with index-only packing, sequences; for pretraining data, documents.
        """
        if is_pretraining(path):
            return len(self.open_documents(path)[1])
        shards = self.open_shards(path)
        return shards.num_sequences if self.index_only_packing else len(shards)

    @property
    def cu_seqlens_width(self) -> int:
        """Length of ``cu_seqlens``, the same for all data sets of this configuration, so that rows can be stacked.

        For stored packs, the headers give it. With index-only packing, it is known when all data sets are built.
        """
        return self.most_sequences + 2


def _require_no_stock_dataset(path: str) -> None:
    """Raise FormatError if a path of a blend is a stock Megatron dataset, which has no loss masks."""
    paths = ShardPaths.of(path)
    if is_remote(path) or paths.missing() != [each for each in paths.all if each not in (paths.tokens, paths.idx)]:
        return
    raise FormatError(
        f"{paths.prefix}: only its .bin and .idx exist, so this looks like a stock Megatron dataset without loss"
        f" masks; to train on all of its tokens, as in pretraining, pass --data-path pretrain:{paths.prefix}, or make"
        f" a shard of it: megatron-sft-idx convert {paths.prefix} {paths.prefix}-sft --mask-rule all"
    )


# ---- the data set that Megatron builds ----


class PackedSFTDataset(Shown, MegatronDataset):  # type: ignore[misc]
    """Rows of packed sequences, in a different order in each epoch; see ``megatron_sft_idx.training.rows``.

    For a path of pretraining data, the rows and their order are the same as in Megatron's ``GPTDataset``.

    Built by ``BlendedMegatronDatasetBuilder``. It pickles as its ``rows``, which are small.

    Args:
        dataset: the result of ``build_low_level_dataset``.
        dataset_path: the path in the blend.
        indices: the split: consecutive packs, or sequences with index-only packing; None for all.
        num_samples: number of rows, over as many epochs as needed; None for one epoch.
        index_split: the split.
        config: the configuration of the rows.

    Raises:
        FormatError: the split is empty or not consecutive.
        SequenceError: with index-only packing, sequences are longer than a row.

    Example:
        >>> from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        >>> from megatron_sft_idx import PackedSFTDatasetConfig
        >>> config = PackedSFTDatasetConfig(
        ...     random_seed=1, sequence_length=16, blend=(["data/chats"], None), split="90,10,0"
        ... )
        >>> builder = BlendedMegatronDatasetBuilder(PackedSFTDataset, [12, None, None], lambda: True, config)
        >>> train, valid, test = builder.build()
        >>> train
        <PackedSFTDataset data/chats: 12 samples of 6 packs of up to 12 tokens, split train>
        >>> train[0]["tokens"].shape, train[0]["cu_seqlens"].shape
        (torch.Size([16]), torch.Size([6]))
    """

    def __init__(
        self,
        dataset: range,
        dataset_path: str,
        indices: NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: PackedSFTDatasetConfig,
    ) -> None:
        first, last = 0, len(dataset)
        if indices is not None:
            if not len(indices) or (np.diff(indices) != 1).any():
                raise FormatError(
                    f"{dataset_path}: the {index_split.name} split is empty, or not a range of consecutive numbers;"
                    " give it a larger share of --split, or 0"
                )
            first, last = int(indices[0]), int(indices[-1]) + 1
        # The parent keeps this argument; a range takes no memory, while consecutive numbers can take gigabytes.
        super().__init__(dataset, dataset_path, range(first, last), num_samples, index_split, config)
        self.source: StoredPacks | PlannedPacks | PretrainingPacks
        if is_pretraining(dataset_path):
            self.source = self._pretraining_packs(indices)
        else:
            self.source = self._packs_of_shards(config.open_shards(dataset_path), first, last)
        config.most_sequences = max(config.most_sequences, self.source.most_sequences)
        self._rows: PackedRows | PretrainingRows | None = None
        # Put the content into the key of Megatron's caches, which otherwise has only the path.
        self.unique_identifiers["data"] = self.source.fingerprint
        self.unique_description = json.dumps(self.unique_identifiers, indent=4)
        described = self.unique_description.encode("utf-8")
        self.unique_description_hash = hashlib.md5(described, usedforsecurity=False).hexdigest()
        log_single_rank(logger, logging.INFO, "%s (%s): %s", dataset_path, index_split.name, self._epoch())

    def _packs_of_shards(self, shards: ShardSet, first: int, last: int) -> StoredPacks | PlannedPacks:
        config = self.config
        if not config.index_only_packing:
            return StoredPacks(shards, first, last)
        if config.plan_cache is None:
            log_single_rank(
                logger, logging.INFO, "without path_to_cache, every process computes the packing plan itself"
            )
        plan, cache = config.plan_options, config.plan_cache
        return PlannedPacks(shards, plan, cache, first, last)

    def _pretraining_packs(self, indices: NDArray[np.integer[Any]] | None) -> PretrainingPacks:
        path, config = self.dataset_path, self.config
        corpus, documents = config.open_documents(path)
        if indices is None and not config.fast_cache_load:  # Megatron passes None if its caches are complete
            indices = np.arange(len(documents), dtype=np.int32)
        of_documents = config.config_of_documents(corpus)
        try:
            rows = GPTDataset(documents, corpus.prefix, indices, self.num_samples, self.index_split, of_documents)
        except (ValueError, EOFError, OSError) as error:  # raised by numpy for a truncated file of indices
            cache = of_documents.path_to_cache or os.path.join(corpus.prefix, "cache")
            raise FormatError(
                f"{path}: Megatron cannot read or write its indices for this path in {cache} ({error}); check that"
                " this folder has free space, remove damaged files from it, and run again"
            ) from error
        return PretrainingPacks(corpus, rows, config.sequence_length, config.columns, config.vocab_size)

    def _epoch(self) -> str:
        """Describe an epoch, for the log."""
        packs, tokens = self.source.num_packs, self.source.num_tokens()
        if isinstance(self.source, PretrainingPacks):
            return f"{packs} rows of pretraining data, {tokens} tokens, all trained on"
        shards = self.source.shards
        everything = shards.total("num_tokens")
        # For a split, estimate the trained tokens by its share of all tokens.
        trained = f"{round(shards.total('num_trained_tokens') * tokens / everything)} of them trained on"
        about = "" if tokens == everything else "about "
        batch = self.config.global_batch_size
        steps = f", {packs / batch:.1f} steps of {batch} packs" if batch else ""
        return f"an epoch is {packs} packs, {tokens} tokens, {about}{trained}{steps}"

    def _shown(self) -> str:
        epoch = f"{self.source.num_packs:,} packs of up to {self.source.capacity:,} tokens"
        return f"{self.dataset_path}: {len(self):,} samples of {epoch}, split {self.index_split.name}"

    @staticmethod
    def _key_config_attributes() -> list[str]:
        # Without the tokenizer, which changes nothing here and is optional.
        return ["random_seed", "sequence_length", "split", "split_matrix", "sequence_multiple", "index_only_packing"]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedSFTDatasetConfig) -> range:
        """Return the numbers of the units that splits of a path divide; see ``PackedSFTDatasetConfig.count``."""
        return range(config.count(dataset_path))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: range) -> int:
        """Return the number of units that splits divide."""
        return len(low_level_dataset)

    @property
    def rows(self) -> PackedRows | PretrainingRows:
        """The samples without Megatron, for loaders and for pickling."""
        width = self.config.cu_seqlens_width
        if self._rows is None or self._rows.shape["width"] != width:  # data sets built later may need wider rows
            pad_ids = (self.config.pad_id, self.source.pad_id, self._pad_token_id)
            shape = {
                "seq_length": self.config.sequence_length,
                "sequence_multiple": self.config.sequence_multiple,
                "width": width,
                "pad_id": next((pad for pad in pad_ids if pad is not None and pad >= 0), None),
                "padding_mask": self.config.padding_mask,
                "files": self.config.source_files,
                "media": self.config.media,
                "ignore_media": self.config.ignore_media,
            }
            if isinstance(self.source, PretrainingPacks):
                self._rows = PretrainingRows(self.source, len(self), **shape)
            else:
                kind = SingleRows if self.config.single_sequences else PackedRows
                seed, split = self.config.random_seed, self.index_split.name
                costs = self.config.media_costs
                self._rows = kind(self.source, seed, split, len(self), **shape, media_costs=costs)
        return self._rows

    def __reduce__(self) -> Any:
        return self.rows.__reduce__()

    def __len__(self) -> int:
        return self.source.num_packs if self.num_samples is None else int(self.num_samples)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return one row; see ``PackedRows.__getitem__``, also for negative and missing indices."""
        return self.rows[idx]

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        """Return a whole batch; see ``PackedRows.__getitems__``."""
        return self.rows.__getitems__(samples)
