"""``PackedSFTDataset``: packed SFT data for Megatron's dataset builder; ``PackedSFTDatasetConfig``: what it is told.

Megatron lets rank 0 build first while the others wait at a barrier. An error on rank 0 alone would leave them waiting
until the process group times out, so everything that headers can tell is checked when the configuration is made.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
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
from megatron_sft_idx.layout.media_layout import Kind
from megatron_sft_idx.lines import Shown, get_logger, value_text
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.storage import ReadOptions, is_remote
from megatron_sft_idx.training.batch import Batch, SourceFiles, parallel_multiple
from megatron_sft_idx.training.media import CARRIED_BY, MediaStep
from megatron_sft_idx.training.pretraining import Corpus, EveryToken, PretrainingPacks, is_pretraining
from megatron_sft_idx.training.rows import PackedRows, PretrainingRows, SingleRows
from megatron_sft_idx.training.sources import (
    PlannedPacks,
    PlanOptions,
    StoredPacks,
    blend_weights,
    require_fit,
    require_text,
)

logger = get_logger(__name__)

# ---- what a run says ----


@dataclass(repr=False)
class PackedSFTDatasetConfig(Shown, GPTDatasetConfig):  # type: ignore[misc]
    """Configuration of ``PackedSFTDataset``.

    Of the parent's fields, ``random_seed``, ``sequence_length``, ``blend`` or ``blend_per_split``, ``split``,
    ``path_to_cache`` and ``num_dataset_builder_threads`` mean what they mean there; a path of a blend may be one shard,
    a folder or a glob of shards, on disk or at ``s3://`` or ``msc://``, whose index files are then kept in
    ``object_storage_cache_path`` (None for the usual folder); or ``pretrain:`` and the prefix of a stock Megatron
    dataset on disk, of whose rows every token is trained. The tokenizer may be None. What has to do with stock
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
        media: makes of the images and audio of each batch what is added to it: ``training.media.MediaInputs``. Without
            it shards with images or audio are refused.
        media_costs: what ranks are kept level by, beside attention: the work of the model's encoders for one position
            of ``image`` and of ``audio``; see ``rows.ENCODER_COSTS``, which None stands for.
        ignore_media: train on shards with images and audio, as if their placeholder tokens were text.
        padding_mask: whether rows have one, bool [sequence_length], True on padding: for forward steps that hand it to
            ``GPTModel``, whose MoE routers then count tokens alone.
        tokenizer_fingerprint: of the tokenizer the model is trained with; shards that were made with another one are
            refused.
        vocab_size: rows of the model's embedding; shards whose tokenizer has more tokens are refused. None is not
            looked at.
        num_samples: rows wanted of each split, None for an epoch. Splits of 0 rows are left out, also if a shard is too
            small to have any for them.
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
    media: MediaStep | None = None
    media_costs: Mapping[Kind, float] | None = None
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
        """The fields whose values are not their defaults, of more than fifty."""
        changed = ((each.name, getattr(self, each.name)) for each in fields(self) if each.repr)
        defaults = {each.name: each.default for each in fields(self)}
        return ", ".join(f"{name}={value_text(value)}" for name, value in changed if value != defaults[name])

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
        self._check_options()
        self.read, blends = ReadOptions.of("read", self.read), [blend for _, blend in self._blends()]
        # Megatron wants it off for object storage, where nothing is mapped here either.
        all_remote = all(is_remote(path) for paths, _ in blends for path in paths)
        if not self.mmap_bin_files and self.read.backend == "mmap" and not all_remote:
            self.read = self.read._replace(backend="pread")
        for blend in blends:
            self._check_weights(*blend)
        try:
            # Not GPTDatasetConfig's, which insists on a tokenizer.
            BlendedMegatronDatasetConfig.__post_init__(self)
        except (AssertionError, ValueError) as error:
            why = " ".join(str(error).split()) or "a split is up to three numbers, such as 98,1,1"
            if why.startswith("--"):  # Megatron names its flags
                raise FormatError(why) from None
            raise FormatError(f"split {self.split!r}, or what goes with it: {why}") from None
        self._leave_out_unwanted()
        if self.sequence_multiple is None:
            self.sequence_multiple = parallel_multiple(self.context_parallel_size, self.sequence_parallel_size)
        if self.sequence_multiple < 1 or self.sequence_length % self.sequence_multiple:
            raise FormatError(
                f"sequence_length {self.sequence_length} is no multiple of the sequence multiple"
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
        # What the shards of each path agree on, those of all paths do.
        together = ShardSet.joined(list(self._opened.values()))
        together.agree_on("tokenizer is", lambda header: header.tokenizer, "tokenize them with one")
        if not self.index_only_packing:
            remedy = "pack them again for one --seq-length, or set index_only_packing"
            together.agree_on("capacity is", lambda header: header.capacity or None, remedy)
        # All data sets of a blend number files alike, so that it does not matter which of them a row is read from.
        united = SourceFiles.of(together.columns["source"]) if "source" in self.columns else None
        if self._corpora:
            self._check_mixed(has_files=united is not None)
        self.source_files: list[dict[str, Any]] = []
        if united and len(self._opened) + len(self._corpora) > 1:
            self.source_files = [*united.files, *(corpus.source_file for corpus, _ in self._corpora.values())]

    def _check_options(self) -> None:
        """Require options that do something."""
        if self.single_sequences and (self.columns or self.media is not None):
            what = f"columns {', '.join(self.columns)}" if self.columns else "media"
            raise FormatError(
                f"{what}: Megatron's packing scheduler hands on tokens and masks alone; leave this out, or train on"
                " packs"
            )
        if not self.index_only_packing and (self.packing_method, self.max_sequences_per_pack) != ("auto", None):
            raise FormatError("packing_method and max_sequences_per_pack are for index_only_packing; set that too")
        if self.pad_id is not None and not 0 <= self.pad_id < (self.vocab_size or MAX_COUNT):
            size = f" of {self.vocab_size}" if self.vocab_size else ""
            raise FormatError(
                f"pad_id {self.pad_id}: not in the model's vocabulary{size}; leave it out for the shards'"
            )

    def _check_paths(self) -> None:
        for path, split, ends in self._split_ranges():
            if not ends[0] <= ends[1]:  # no number, or none above 0
                what = "sequences" if self.index_only_packing else "packs"
                raise FormatError(f"split {self.split!r}: expected parts of all {what}, such as 98,1,1")
            if is_pretraining(path):
                self._check_documents(path, split, ends)
                continue
            if path not in self._opened:
                self._check_shards(path, self.open_shards(path))
            self._check_split(path, split, ends)
        if not self._opened:
            raise FormatError(
                f"{', '.join(self._corpora)}: no packed SFT data in the blend; name a shard too, or train on this with"
                " Megatron's own data sets"
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
                f"split {self.split!r}: nothing to train on, because no split of which rows are asked for has a part;"
                " write it like --split 99,1,0"
            )

    @staticmethod
    def _check_weights(paths: list[str], weights: list[float] | None) -> None:
        if not paths:
            raise FormatError("a blend without any path; name at least one shard, or leave the blend out")
        if weights is None:
            return
        if not isinstance(weights, list | tuple):
            raise FormatError(f"blend: the weights are {brief(weights)}, expected a list of numbers, one a path")
        if len(weights) != len(paths):
            raise FormatError(f"{len(weights)} weights for {len(paths)} paths in a blend; give one weight a path")
        blend_weights(paths, weights)

    def _choose_caches(self) -> None:
        """Keep the cache for plans, and away from Megatron's blends where they cannot use it.

        On a cache miss megatron-core 0.16 asks for the rank to find out who writes the blend's index, and fails where
        torch.distributed is not initialised. Such an index is quickly made, so one process makes it anew every time.
        """
        # Not plan_cache, which may be a folder on each node.
        self._documents_cache = self.path_to_cache
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

    def _split_ranges(self) -> Iterator[tuple[str, Split, tuple[float, float]]]:
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
        """The pretraining data of a path of a blend, and Megatron's ``IndexedDataset`` of its documents."""
        if path not in self._corpora:
            corpus = Corpus.open(path)
            documents = GPTDataset.build_low_level_dataset(corpus.prefix, self.config_of_documents(corpus))
            self._corpora[path] = corpus, documents
        return self._corpora[path]

    def config_of_documents(self, corpus: Corpus) -> GPTDatasetConfig:
        """What Megatron's ``GPTDataset`` is told about a corpus."""
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
        """Require that a split has a row at least: of one without any, Megatron would never stop looking for more."""
        lengths = self.open_documents(path)[1].sequence_lengths
        first, last = (round(end * float(len(lengths))) for end in ends)
        tokens = int(lengths[first:last].sum(dtype=np.int64))
        if tokens <= self.sequence_length:
            raise FormatError(
                f"{path}: the {split.name} split has {tokens} tokens, in {last - first} of {len(lengths)} documents,"
                f" and a row takes {self.sequence_length + 1}, its last label included; give it more of --split, or"
                " none at all, such as --split 99,1,0"
            )

    def _check_mixed(self, has_files: bool) -> None:
        """Require what the chats of a blend with pretraining data may not have."""
        paths = ", ".join(self._corpora)
        if self.single_sequences:
            raise FormatError(
                f"{paths}: Megatron's packing scheduler takes single sequences, and rows of pretraining data are none;"
                " leave these paths out, or train on packs"
            )
        others = [name for name in self.columns if name != "source" or not has_files]
        if others:
            raise FormatError(f"{paths}: pretraining data has no column {others[0]}; leave out the one or the other")

    def _check_shards(self, path: str, shards: ShardSet) -> None:
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            size, tokenizer = header.vocab_size or 0, header.tokenizer
            if self.vocab_size is not None and size > self.vocab_size:
                raise FormatError(
                    f"{prefix}: its tokenizer has {size} tokens, the model's vocabulary {self.vocab_size}; raise"
                    " --vocab-size, or take the tokenizer the shard was made with"
                )
            if None not in (tokenizer, self.tokenizer_fingerprint) and tokenizer != self.tokenizer_fingerprint:
                raise FormatError(
                    f"{prefix}: tokenized with {tokenizer}, the tokenizer of this job is {self.tokenizer_fingerprint};"
                    " take the tokenizer the shard was made with, or tokenize again"
                )
            require_shard_judged(prefix, header, self.columns)
            if self.media is None:
                require_text(prefix, header.has_media, self.ignore_media, CARRIED_BY)
            if self.index_only_packing:
                continue
            if header.capacity > self.sequence_length:
                raise FormatError(
                    f"{prefix}: packs of up to {header.capacity} tokens, sequence_length is {self.sequence_length};"
                    " raise it (--seq-length), pack the shard again, or set index_only_packing"
                )
            if header.sequence_multiple % self.plan_options.sequence_multiple:
                raise FormatError(
                    f"{prefix}: packed for sequence multiple {header.sequence_multiple}, this job pads sequences to"
                    f" multiples of {self.sequence_multiple}; pack it with --sequence-multiple"
                    f" {self.sequence_multiple}, or set index_only_packing"
                )
        if masked := shards.total("num_masked_packs"):
            what = "sequences" if len(shards) == shards.num_sequences else "packs"
            message = f"{masked} of {len(shards)} {what} train no token at all; megatron-sft-idx inspect names them"
            log_single_rank(logger, logging.WARNING, "%s: %s", path, message)
        if self.index_only_packing:
            require_fit(shards, self.plan_options)
            return
        fill = shards.total("num_tokens") / max(len(shards) * self.sequence_length, 1)
        if fill < 0.5:  # hardly packed for this job
            message = "%s: rows of %d are %.0f%% full; pack the shards, or set index_only_packing"
            log_single_rank(logger, logging.WARNING, message, path, self.sequence_length, 100 * fill)
        self.most_sequences = max(self.most_sequences, *(header.most_sequences for header in shards.headers))

    def _check_split(self, path: str, split: Split, ends: tuple[float, float]) -> None:
        what, count = "sequences" if self.index_only_packing else "packs", self.count(path)
        # As Megatron's builder rounds; pairs are planned whole.
        step = 2 if self.index_only_packing and "pair" in self.columns else 1
        first, last = (round(end * float(count)) // step for end in ends)
        if first >= last:
            without = {
                Split.train: "",
                Split.valid: ", or evaluate nothing: --eval-iters 0",
                Split.test: ", or none at all, such as --split 99,1,0",
            }
            raise FormatError(
                f"{path}: the {split.name} split is empty, {ends[0]:.4g} to {ends[1]:.4g} of {count} {what}; give it"
                f" more of --split{without[split]}"
            )

    @property
    def pretraining(self) -> list[str]:
        """The paths of pretraining data in the blend."""
        return list(self._corpora)

    def count(self, path: str) -> int:
        """What splits of a path divide: packs, sequences with index-only packing, documents of pretraining data."""
        if is_pretraining(path):
            return len(self.open_documents(path)[1])
        shards = self.open_shards(path)
        return shards.num_sequences if self.index_only_packing else len(shards)

    @property
    def cu_seqlens_width(self) -> int:
        """Length of ``cu_seqlens``, one for all data sets of this configuration, so that their rows stack.

        Known from the headers for stored packs; with index-only packing, once all data sets are built.
        """
        return self.most_sequences + 2


def _require_no_stock_dataset(path: str) -> None:
    """FormatError where a path of a blend is a data set of Megatron's own, which has no loss masks."""
    paths = ShardPaths.of(path)
    if is_remote(path) or paths.missing() != [each for each in paths.all if each not in (paths.tokens, paths.idx)]:
        return
    raise FormatError(
        f"{paths.prefix}: only its .bin and .idx are here, as of a stock Megatron dataset without loss masks; to train"
        f" on all of its tokens, as in pretraining, give --data-path pretrain:{paths.prefix}, or make a shard of it:"
        f" megatron-sft-idx convert {paths.prefix} {paths.prefix}-sft --mask-rule all"
    )


# ---- what Megatron builds ----


class PackedSFTDataset(Shown, MegatronDataset):  # type: ignore[misc]
    """Rows of packed sequences, in another order for every epoch; see ``megatron_sft_idx.training.rows``.

    A path of pretraining data has the rows of Megatron's ``GPTDataset``, in the order in which that has them.

    Built by ``BlendedMegatronDatasetBuilder``. It pickles as its light ``rows``.

    Args:
        dataset: what ``build_low_level_dataset`` made.
        dataset_path: the path of the blend it was made from.
        indices: the split: consecutive packs, or sequences with index-only packing; None is all of them.
        num_samples: rows to serve, over as many epochs as it takes; None is one epoch.
        index_split: which split it is.
        config: how rows are made.

    Raises:
        FormatError: the split is empty or not consecutive.
        SequenceError: with index-only packing, sequences longer than a row.
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
                    f"{dataset_path}: the {index_split.name} split is empty, or not a run of consecutive numbers;"
                    " give it more of --split, or none at all"
                )
            first, last = int(indices[0]), int(indices[-1]) + 1
        # The parent keeps what it is given; a range says the same as gigabytes of consecutive numbers.
        super().__init__(dataset, dataset_path, range(first, last), num_samples, index_split, config)
        self.source: StoredPacks | PlannedPacks | PretrainingPacks
        if is_pretraining(dataset_path):
            self.source = self._pretraining_packs(indices)
        else:
            self.source = self._packs_of_shards(config.open_shards(dataset_path), first, last)
        config.most_sequences = max(config.most_sequences, self.source.most_sequences)
        self._rows: PackedRows | PretrainingRows | None = None
        # Put the content into the key of Megatron's caches, which holds the path only.
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
            log_single_rank(logger, logging.INFO, "without path_to_cache every process packs for itself")
        plan, cache = config.plan_options, config.plan_cache
        return PlannedPacks(shards, plan, cache, first, last)

    def _pretraining_packs(self, indices: NDArray[np.integer[Any]] | None) -> PretrainingPacks:
        path, config = self.dataset_path, self.config
        corpus, documents = config.open_documents(path)
        if indices is None and not config.fast_cache_load:  # Megatron gives none where its caches are whole
            indices = np.arange(len(documents), dtype=np.int32)
        of_documents = config.config_of_documents(corpus)
        try:
            rows = GPTDataset(documents, corpus.prefix, indices, self.num_samples, self.index_split, of_documents)
        except (ValueError, EOFError, OSError) as error:  # what numpy says of a file of indices that was cut short
            cache = of_documents.path_to_cache or os.path.join(corpus.prefix, "cache")
            raise FormatError(
                f"{path}: Megatron cannot read or write its indices of it in {cache} ({error}); see that this is a"
                " folder with room, remove what is damaged in it, and run again"
            ) from error
        return PretrainingPacks(corpus, rows, config.sequence_length, config.columns, config.vocab_size)

    def _epoch(self) -> str:
        """What an epoch has, for the log."""
        packs, tokens = self.source.num_packs, self.source.num_tokens()
        if isinstance(self.source, PretrainingPacks):
            return f"{packs} rows of pretraining data, {tokens} tokens, all of them trained on"
        shards = self.source.shards
        everything = shards.total("num_tokens")
        # Of a split, what is trained on is its share of all, by tokens.
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
        # Without the tokenizer, which changes nothing here and need not be given.
        return ["random_seed", "sequence_length", "split", "split_matrix", "sequence_multiple", "index_only_packing"]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: PackedSFTDatasetConfig) -> range:
        """Numbers of what splits of a path divide; see ``PackedSFTDatasetConfig.count``."""
        return range(config.count(dataset_path))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: range) -> int:
        """How much splits divide."""
        return len(low_level_dataset)

    @property
    def rows(self) -> PackedRows | PretrainingRows:
        """The samples without Megatron around them; what loaders read and what is pickled."""
        width = self.config.cu_seqlens_width
        if self._rows is None or self._rows.shape["width"] != width:  # data sets built since then may need wider rows
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
        """One row; see ``PackedRows.__getitem__``, for negative and missing indices too."""
        return self.rows[idx]

    def __getitems__(self, samples: Sequence[int]) -> Batch:
        """A whole batch; see ``PackedRows.__getitems__``."""
        return self.rows.__getitems__(samples)
