"""Use shards as ``config.dataset`` of Megatron-Bridge, 0.6 or later.

``BridgePackedConfig`` is for text, ``BridgeVLMConfig`` for text with images.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider
from megatron.bridge.data.packing import PackedSequenceSpecs

from megatron_sft_idx.errors import FormatError
from megatron_sft_idx.shard.judged import require_shard_judged
from megatron_sft_idx.shard.shard_set import ShardSet
from megatron_sft_idx.training.batch import BatchAssembler
from megatron_sft_idx.training.media import MediaInputs
from megatron_sft_idx.training.packed_shard import ON_REJECTED, PackedShard
from megatron_sft_idx.training.sources import StoredPacks
from megatron_sft_idx.training.vlm_batch import VLMPacks


@dataclass(kw_only=True)
class BridgePackedConfig(DatasetProvider):  # type: ignore[misc]
    """Data set configuration for text: ``config.dataset = BridgePackedConfig(path=..., seq_length=...)``.

    Attributes:
        path: prefix, folder or glob of the shards to train on.
        validation_path: the same for validation; None for no validation.
        seq_length: number of positions in a row, the same as that of the model.
        seed: seed of the order in which Bridge draws packs.
        dataloader_type: ``batch`` shuffles each epoch. Bridge drops the packs after the last complete global batch of
            an epoch, and of the validation packs.
        enable_offline_packing: leave the default, from which Bridge knows that every pipeline stage needs boundaries.
        offline_packing_specs: leave the default; its ``packed_sequence_size`` is set to ``seq_length``.

    Raises:
        FormatError: raised when Bridge builds the data sets, for example if packs are longer than ``seq_length``, if
            shards hold preference pairs, images or audio, or if the run has context parallelism, for which sequences
            must be stored with padding (``convert --pad-seq-to-mult``).
        ShardNotFoundError: likewise; there is no such shard.

    Example:
        >>> from megatron.bridge.data.base import DatasetBuildContext
        >>> config = BridgePackedConfig(path="data/chats", seq_length=16)
        >>> train, valid, test = config.build_datasets(DatasetBuildContext(7, 0, 0))  # as Bridge does
        >>> len(train), valid, test
        (7, None, None)
        >>> train[6]["input_ids"]
        array([60, 61, 62, 63, 64, 65, 66, 67, 68], dtype=int32)
    """

    path: str
    seq_length: int
    validation_path: str | None = None
    seed: int = 1234
    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "batch"
    enable_offline_packing: bool = True
    offline_packing_specs: PackedSequenceSpecs = field(default_factory=PackedSequenceSpecs)

    def __post_init__(self) -> None:
        self.offline_packing_specs.packed_sequence_size = self.seq_length

    def build_datasets(self, context: DatasetBuildContext) -> tuple[PackedShard, PackedShard | None, None]:
        """Return the data sets for training and validation, and None; Bridge calls this on every rank."""
        context_parallel = getattr(context.pg_collection, "cp", None)
        if context_parallel is not None and context_parallel.size() > 1:
            raise FormatError(
                f"{self.path}: with context parallelism, Megatron-Bridge needs sequences that are stored with padding,"
                " but shards have none; convert them to Parquet (convert --to parquet --pad-seq-to-mult,"
                " docs/bridge.md)"
            )
        train = self._packs(self.path, context)
        valid = None if self.validation_path is None else self._packs(self.validation_path, context)
        return train, valid, None

    def _packs(self, path: str, context: DatasetBuildContext) -> PackedShard:
        unused = {"prompt_template": "{input} {output}", "label_key": "output", "truncation_field": "input"}
        return PackedShard(
            path, context.tokenizer, max_seq_length=self.seq_length, pad_to_max_length=True, seed=self.seed, **unused
        )


@dataclass(kw_only=True)
class BridgeVLMConfig(DatasetProvider):  # type: ignore[misc]
    """Data set configuration for text with images, for the step ``megatron.bridge.training.vlm_step``.

    Pass it as ``config.dataset``. Each micro-batch is one pack, in one row of ``seq_length`` positions, so the run's
    micro-batch size must be 1.

    Attributes:
        path: prefix, folder or glob of the shards to train on.
        validation_path: the same for validation; None for no validation.
        seq_length: number of positions in a row, the same as that of the model.
        processor: folder of the processor that the shards were made with.
        model_config: folder with the ``config.json`` of the model; None for the folder of the processor.
        sequence_multiple: each sequence is padded to a multiple of this: 2 x context parallel size, times tensor
            parallel size under sequence parallelism. Pack the shards with the same ``--sequence-multiple``.
        dataloader_type: ``cyclic`` shuffles the packs in each epoch, ``single`` keeps their order. Bridge's ``batch``
            is not supported: it collates a global batch at once and then divides it into rows, which is not possible
            for packed rows.
        seed: Bridge does not use it with these two values of ``dataloader_type``.

    Raises:
        FormatError: raised when Bridge builds the data sets: ``dataloader_type`` has another value; shards hold
            preference pairs or KTO labels, or come from different tokenizers; ``sequence_multiple`` does not fit
            context parallelism; or ``MediaInputs`` fails.
        ValueError: likewise; packs may not fit ``seq_length``.

    Example:
        >>> from megatron.bridge.data.base import DatasetBuildContext
        >>> config = BridgeVLMConfig(path="data/colours", processor="data/processor", seq_length=32)
        >>> train, valid, test = config.build_datasets(DatasetBuildContext(1, 0, 0))  # as Bridge does
        >>> batch = train.collate_fn([0])  # of pack 0, which has an image
        >>> batch["input_ids"].shape, batch["visual_inputs"].pixel_values.shape
        (torch.Size([1, 32]), torch.Size([1, 3, 56, 56]))
    """

    path: str
    seq_length: int
    processor: str
    model_config: str | None = None
    validation_path: str | None = None
    sequence_multiple: int = 1
    seed: int = 1234
    dataloader_type: Literal["single", "cyclic"] | None = "cyclic"

    def build_datasets(self, context: DatasetBuildContext) -> tuple[VLMPacks, VLMPacks | None, None]:
        """Return the data sets for training and validation, and None; Bridge calls this on every rank."""
        if self.dataloader_type not in ("single", "cyclic"):
            raise FormatError(
                f"dataloader_type {self.dataloader_type!r}: micro-batches of packs with images have one row; use"
                " 'cyclic' or 'single'"
            )
        context_parallel = getattr(context.pg_collection, "cp", None)
        parts = 1 if context_parallel is None else context_parallel.size()
        if parts > 1 and self.sequence_multiple % (2 * parts):
            raise FormatError(
                f"sequence_multiple {self.sequence_multiple}: with {parts} context-parallel ranks, sequences are padded"
                f" to multiples of {2 * parts}; pack with --sequence-multiple {2 * parts}, and pass it here too"
            )
        media = MediaInputs(self.processor, self.model_config)
        train = self._packs(self.path, media)
        valid = None if self.validation_path is None else self._packs(self.validation_path, media)
        return train, valid, None

    def _packs(self, path: str, media: MediaInputs) -> VLMPacks:
        shards = ShardSet.open(path)
        for prefix, header in zip(shards.prefixes, shards.headers, strict=True):
            require_shard_judged(prefix, header, (), ON_REJECTED)
        multiple = self.sequence_multiple
        assembler = BatchAssembler(
            StoredPacks(shards), self.seq_length, sequence_multiple=multiple, padding_mask=True, media=media
        )
        return VLMPacks(assembler)
