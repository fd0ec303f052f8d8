"""``LiveLoader``, the iterator for a trainer: one rank's micro-batches of live shards, and its checkpoints.

The steps of a micro-batch::

    Walk           which packs come next, as shards appear                    in the loader's thread
    OpenShards     opens these shards, and closes others                      in the loader's thread
    BatchLoader    assembles the batches, and keeps two ready                 in the loader's thread
    LiveLoader     returns a batch, and records the rank's position           in the trainer's thread

So the thread runs ahead, but ``LiveLoader.state`` does not: a checkpoint contains what was trained on, never what is
only prepared.

A checkpoint has two steps. The trainer saves ``state_dict()`` with its model. When all ranks have done so, it calls
``commit``, which informs the producer. A trainer that is killed between the two neither repeats nor skips data, because
the producer keeps all shards that are not acknowledged.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_sft_idx.arguments import checked, require_fields
from megatron_sft_idx.errors import FormatError, SFTIndexError
from megatron_sft_idx.layout.files import check_column_name
from megatron_sft_idx.lines import Shown, get_logger, shown_by_fields
from megatron_sft_idx.live.acks import ConsumerAcks, ack_folder, uncompleted
from megatron_sft_idx.live.catalog import Catalog, Limits
from megatron_sft_idx.live.catalog_shards import CatalogShards
from megatron_sft_idx.live.live_order import (
    Deal,
    RankState,
    dealt_anew,
    last_shard_of_step,
    least_ahead,
    states_from_json,
)
from megatron_sft_idx.live.live_shards import LiveShards, OpenShards
from megatron_sft_idx.live.live_walk import AtEnd, Walk
from megatron_sft_idx.live.waiting import Stopped, Stopwatch, Waiter
from megatron_sft_idx.training import (
    BatchAssembler,
    BatchIterator,
    BatchLoader,
    Form,
    MediaStep,
    Tensors,
    Wanted,
    check_media_options,
)

logger = get_logger("megatron_sft_idx.live")


@shown_by_fields
@dataclass(frozen=True)
class LiveConfig:
    """Options for reading live data on one data-parallel rank.

    All processes of one data-parallel rank (tensor, pipeline, context parallelism) use the same ``rank`` and read the
    same micro-batches.

    Attributes:
        rank: data-parallel rank, from 0.
        size: number of data-parallel ranks.
        seq_length: number of positions in a row.
        micro_batch_size: number of rows in a micro-batch.
        micro_batches: number of micro-batches per rank and step. All ranks end with a complete step.
        shuffle: whether packs are shuffled inside a window; otherwise they keep the order of storage.
        window: number of shards of this rank that are shuffled together. All of them are open at once, with four maps
            each.
        seed: seed of all shuffles.
        epochs: number of epochs. Only the last epoch completes shards, so that they can be removed.
        at_end: how all ranks get the same number of steps: ``pad`` adds rows with masked loss, ``drop`` omits packs.
        sequence_multiple: each sequence is padded to a multiple of this inside its row.
        pad_id: padding id for rows; None for the tokenizer's.
        form: form of the batches; see ``BatchLayout``.
        columns: names of the shards' columns to include in batches, with values as stored. Not ``source``, because it
            numbers the files of a list in its own shard, which other ranks may never see.
        media: function that makes the additional inputs for the images and audio of each batch:
            ``training.media.MediaInputs``. Without it, opening a shard with images or audio ends training.
        ignore_media: train on shards with images and audio as if their placeholder tokens were text.
        consumer: name of this training run among the consumers of the catalog.
        ack_dir: folder of acknowledgements, if consumers may not write into the catalog.

    Raises:
        FormatError: an option has an invalid value.

    Example:
        >>> config = LiveConfig(rank=0, size=2, seq_length=4096, micro_batch_size=2, micro_batches=8)
        >>> config.step_rows  # of this rank, in a step of the optimizer
        16
    """

    rank: int
    size: int
    seq_length: int
    micro_batch_size: int = 1
    micro_batches: int = 1
    shuffle: bool = True
    window: int = 1
    seed: int = 1234
    epochs: int = 1
    at_end: AtEnd = "pad"
    sequence_multiple: int = 1
    pad_id: int | None = None
    form: Form = "wide"
    columns: Sequence[str] = ()
    media: MediaStep | None = None
    ignore_media: bool = False
    consumer: str = "train"
    ack_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_fields(self)
        check_media_options(self.media, self.ignore_media)
        if not 0 <= self.rank < self.size:
            raise FormatError(f"rank {self.rank}, expected 0 to {self.size - 1} (there are {self.size} ranks)")
        for name, least in (
            ("seed", 0),
            ("seq_length", 1),
            ("micro_batch_size", 1),
            ("micro_batches", 1),
            ("window", 1),
            ("epochs", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise FormatError(f"{name} {value}, expected at least {least}")
        if self.at_end not in ("pad", "drop"):
            raise FormatError(f"at_end {self.at_end!r}, expected 'pad' or 'drop'")
        for name in self.columns:
            check_column_name(name)
        if "source" in self.columns:
            raise FormatError(
                "columns: the column source refers to the file list of each shard, and live shards can have different"
                " lists; leave it out, or read it from finished shards"
            )

    @property
    def step_rows(self) -> int:
        """Number of rows of this rank in a step of the optimizer."""
        return self.micro_batch_size * self.micro_batches


class LiveLoader(Shown, Iterator[Tensors]):
    """The micro-batches of a rank, prepared ahead by a thread. Use it as a context manager, which closes it.

    On each of several ranks::

        with LiveLoader("catalog", LiveConfig(rank=rank, size=size, seq_length=4096)) as loader:
            if checkpoint is not None:
                loader.load_state_dict(checkpoint)
            loader.commit()                 # keep data that an earlier run read beyond the checkpoint
            for batch in loader:
                step(batch)
                if time_to_save:
                    state = loader.state_dict()
                    save(model, state)
                    barrier()               # every rank's part is on disk
                    loader.commit(state)    # shards that are done may be removed now

    If the producer limits how far it runs ahead, ``may_need_commit`` says when it is time to save.

    Batches have the keys and shapes of ``BatchAssembler``. A batch is valid until the next one is taken, as with
    ``BatchLoader``, and pinned if there is a GPU.

    Args:
        catalog: the folder of a catalog, or other live shards.
        config: options for this rank.

    Attributes:
        shards: the live shards.
        config: as given.
        state: the rank's position after the batches that were taken.
        acks: the acknowledgements of this consumer.

    Example:
        >>> from megatron_sft_idx import LiveConfig
        >>> config = LiveConfig(rank=0, size=1, seq_length=16, micro_batch_size=2)
        >>> with LiveLoader("data/catalog", config) as loader:
        ...     for batch in loader:
        ...         print(list(batch["tokens"].shape))
        ...     loader.commit(loader.state_dict())  # after the checkpoint is on disk
        [2, 16]
        [2, 16]
        [2, 16]
    """

    @checked
    def __init__(self, catalog: str | os.PathLike[str] | LiveShards, config: LiveConfig) -> None:
        self.shards = catalog if isinstance(catalog, LiveShards) else CatalogShards(os.fspath(catalog))
        self.config = config
        folder = ack_folder(Catalog(self.shards.folder), config.ack_dir)
        self.acks = ConsumerAcks(folder, config.consumer, config.epochs)
        self.state = RankState(
            Deal(config.size, config.window, config.seed, config.shuffle),
            config.rank,
            batch_rows=config.micro_batch_size,
            step_rows=config.step_rows,
        )
        # Set when the loader is closed or collected. It ends every wait, so the thread must not refer to the loader
        # itself.
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        # The thread's waits count only the time during which the trainer also waits. The trainer may save for longer
        # than any limit, while the thread waits for a shard that is published only after that.
        self._asking = Stopwatch()
        self._waiter = Waiter(f"rank {config.rank}", self._stop.wait, clock=self._asking)
        # The producer's limits; None before ``prepare``.
        self._limits: Limits | None = None
        self._begun: tuple[Walk, BatchIterator] | None = None
        self._closed = False

    def _shown(self) -> str:
        state, config = "closed" if self._closed else "open", self.config
        size = f"{config.micro_batch_size} x {config.seq_length:,} tokens"
        return f"{self.shards.folder}: rank {config.rank} of {config.size}, {size}; {state}"

    # ---- batches ----

    def __next__(self) -> Tensors:
        if self._closed:
            raise StopIteration
        try:
            if self._begun is None:
                self._begun = self._begin()
            walk, batches = self._begun
            with self._asking:
                tensors = next(batches)
        except StopIteration:
            if not self._closed:  # by another thread
                self.state = walk.state  # possibly after shards without packs
            self.close()
            raise
        except Stopped:
            self.close()
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        self.state = batches.state
        return tensors

    def _begin(self) -> tuple[Walk, BatchIterator]:
        """Start the thread."""
        self.prepare()
        self.may_acknowledge()
        state, config = self.state, self.config
        logger.info(
            f"data-parallel rank {config.rank} of {config.size}: catalog {self.shards.folder},"
            f" window {config.window}, {'shuffled' if config.shuffle else 'as stored'},"
            f" epoch {state.deal.epoch + 1} of {config.epochs}, from row {state.rows}"
        )
        with self._asking:
            allow_media = config.ignore_media or config.media is not None
            source = OpenShards(self.shards, self._waiter, config.columns, allow_media=allow_media)
        try:
            assembler = BatchAssembler(
                source,
                config.seq_length,
                width=source.most_sequences + 2,
                columns=tuple(source.columns),
                sequence_multiple=config.sequence_multiple,
                pad_id=config.pad_id,
                form=config.form,
                media=config.media,
            )
        except ValueError as error:
            raise FormatError(f"{self.shards.folder}: {error}") from None
        walk = Walk(
            self.shards,
            state,
            epochs=config.epochs,
            at_end=config.at_end,
            acknowledged=self.acks.done_in,
            waiter=self._waiter,
        )
        # The loader must not look further ahead in the order than it fills batches. Otherwise a batch that is ready
        # would have to wait until the next shard is published.
        return walk, iter(BatchLoader(assembler, _holding_shards(walk, source), ahead=0))

    def close(self) -> None:
        """End the thread, even while it waits for a shard. Any thread may call this repeatedly."""
        self._closed = True
        self._stop.set()
        if self._begun is not None:
            self._begun[1].close()

    def __enter__(self) -> LiveLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- limits of the producer ----

    def prepare(self) -> None:
        """Wait for the catalog's limits, and check the options against them, once. The first batch also does this.

        Raises:
            FormatError: with these limits, training would come to a stop.
            SFTIndexError: no limits were written in time.
        """
        if self._limits is None:
            limits = self.require_room()
            self.state = dataclasses.replace(self.state, generation=self.acks.next_generation(self.state))
            self._limits = limits

    def require_room(self) -> Limits:
        """Wait for the catalog's limits and return them. FormatError: the producer may not run far enough ahead."""
        with self._asking:
            limits = self.shards.limits(self._waiter)[0]
        deal, step_rows = self.state.deal, self.config.step_rows
        if limits.max_ahead_shards is None:
            return limits
        least = least_ahead(deal, step_rows, self.shards.least_packs())
        if limits.max_ahead_shards < least:
            raise FormatError(
                f"{self.shards.folder}: the producer runs at most {limits.max_ahead_shards} shards ahead, but"
                f" {deal.size} ranks with a window of {deal.window} and {step_rows} packs per step need {least}; start"
                f" the producer with --max-ahead-shards {least} or more, or train with a smaller window or smaller"
                " batches"
            )
        return limits

    @property
    def needs_acks(self) -> bool:
        """Whether the producer needs acknowledgements to continue or to remove shards; False before ``prepare``."""
        return self._limits is not None and self._limits.needs_acks

    def may_need_commit(self, committed: Sequence[RankState]) -> bool:
        """Return whether the next step may need a shard that the producer publishes only after another commit.

        A trainer calls this before each step on every rank. If any rank returns True, all ranks save and commit first.
        If the result is still True then, some ranks have read much less than others, and their unread shards hold the
        producer back. Then all ranks start a new loader from the list of their states, so that the rest is distributed
        again.

        While the end of the data is not known, runs with the same data and the same commits get the same results,
        independent of the pace of the producer: they depend on the shards that a step can need at most, not on the
        existing ones.

        Args:
            committed: the most recently acknowledged states of all ranks.
        """
        self.prepare()
        packs_in = lambda shard: self.shards.count(shard) or 0  # noqa: E731
        last = last_shard_of_step(self.state, packs_in, self.shards.least_packs())
        acks = [self.acks.of(state) for state in committed]
        return self.shards.may_not_come(uncompleted(acks, last))

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's position after the batches that were taken, as plain values for a checkpoint."""
        return self.state.to_json()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Start at the position of a checkpoint.

        Args:
            state: this rank's own state, for a job with the same number of ranks: the same batches follow, bit for bit,
                as if the job had continued. Or a list of all ranks' states of one checkpoint, for a job with any number
                of ranks and any micro-batches: the rest is then distributed again, every pack exactly once.

        Raises:
            FormatError: it is not a state, or it is from a job with another seed, shuffle or number of epochs.
            SFTIndexError: batches were already taken.

        Example:
            >>> from megatron_sft_idx import LiveConfig
            >>> config = LiveConfig(rank=0, size=1, seq_length=16, micro_batch_size=2)
            >>> with LiveLoader("data/catalog", config) as loader:
            ...     batch = next(loader)
            ...     state = loader.state_dict()  # saved in a checkpoint
            >>> with LiveLoader("data/catalog", config) as loader:
            ...     loader.load_state_dict(state)
            ...     print(sum(1 for batch in loader), "of 3 batches are left")
            2 of 3 batches are left
        """
        folder, config = self.shards.folder, self.config
        if self._begun is not None or self._closed:
            raise SFTIndexError(f"{folder}: the loader has already returned batches; load the state into a new loader")
        found = states_from_json([state] if isinstance(state, dict) else state)
        for one in found:
            if (one.deal.seed, one.deal.shuffle) != (config.seed, config.shuffle):
                raise FormatError(
                    f"{folder}: the state has seed {one.deal.seed} and shuffle {one.deal.shuffle}, but this run has"
                    f" seed {config.seed} and shuffle {config.shuffle}, so packs would be repeated or lost; resume"
                    " with the same values"
                )
            if one.deal.epoch >= config.epochs:
                raise FormatError(
                    f"{folder}: the state is in epoch {one.deal.epoch + 1}, but this run has only {config.epochs};"
                    " resume with at least as many epochs as before"
                )
        if isinstance(state, dict):
            own = found[0]
            if differs := own.difference(self.state):
                raise FormatError(
                    f"{folder}: the state has {differs}; load the list of all ranks' states instead, so that the"
                    " remaining packs are distributed again"
                )
        else:
            own = RankState(
                dealt_anew(found, config.size, config.window),
                config.rank,
                found[0].generation + 1,
                config.micro_batch_size,
                config.step_rows,
            )
        self.state = own
        self._limits = None  # so that ``prepare`` looks up the generation again

    def commit(self, state: dict[str, Any] | None = None) -> None:
        """Acknowledge that a checkpoint is on disk, so that the shards that it includes need not be kept.

        One process of each data-parallel rank must call this. Repeated calls are harmless.

        Args:
            state: the result of ``state_dict`` for that checkpoint. None, before the first batch, for the position at
                which this run begins: it will read again what an earlier run of the same name acknowledged beyond that,
                so those shards must be kept. Without an earlier run, that writes nothing.

        Raises:
            OSError: the acknowledgement could not be written.
        """
        self.prepare()
        reached = self.state if state is None else RankState.from_json(state)
        is_first_begin = state is None and not reached.rows and not reached.generation
        if is_first_begin and not self.acks.newest():
            return
        if not self.may_acknowledge():
            return
        self.acks.write(reached)
        self.shards.committed()
        logger.info(
            f"rank {reached.rank}: committed epoch {reached.deal.epoch + 1}, {reached.items} items,"
            f" {reached.packs_of_items:,} packs of shards that are complete"
        )

    def may_acknowledge(self) -> bool:
        """Return whether acknowledgements can be written. SFTIndexError: they cannot, and the producer needs them."""
        is_first = self.acks.is_writable is None
        if self.acks.may_write():
            return True
        if self.needs_acks:
            raise SFTIndexError(
                f"{self.acks.folder}: acknowledgements cannot be written, but the producer needs them to continue or"
                " to delete shards; pass --ack-dir to both, with a folder that this user can write to"
            )
        if is_first:
            logger.info(f"rank {self.state.rank}: {self.acks.folder} is not writable; this has no effect on training")
        return False


def _holding_shards(walk: Walk, source: OpenShards) -> Iterator[Wanted]:
    """Yield the micro-batches of a walk, each with its shards open."""
    for wanted in walk:
        # The shards of the micro-batch and of the open group. All others may be closed, because the packs of one
        # micro-batch are read before the next one is requested.
        shards_of_rows = np.asarray(wanted.packs)[:, 0].tolist()
        source.hold([*shards_of_rows, *wanted.state.open_shards])
        yield wanted
