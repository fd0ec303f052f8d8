"""``.completed`` markers beside chunks that every consumer is done with, for producers that delete by them."""

from __future__ import annotations

import logging
import os

from megatron_sft_idx.catalog import completed, read_acks
from megatron_sft_idx.formats.jsonl_chunks import COMPLETED, chunk_name, chunk_numbers
from megatron_sft_idx.storage import OutputFile

__all__ = ["Markers"]

logger = logging.getLogger("megatron_sft_idx.streaming")


class Markers:
    """Marks chunks in a folder; every rank may, at any time: what comes out is the same.

    Args:
        folder: of the chunks.
        acks: folder of the acknowledgements that say what is done.
        consumers: training runs that read the chunks; nothing is marked before all of them have acknowledged.
    """

    def __init__(self, folder: str, acks: str, *, consumers: int = 1) -> None:
        self.folder, self.acks, self.consumers = folder, acks, consumers
        self._may_write = True

    def __call__(self) -> None:
        """Mark every chunk that is there and done, but not marked.

        Raises:
            FormatError: an acknowledgement is damaged.
        """
        if not self._may_write:
            return
        for number in completed(read_acks(self.acks), self.consumers, chunk_numbers(self.folder)):
            marker = os.path.join(self.folder, chunk_name(number) + COMPLETED)
            if os.path.exists(marker):
                continue
            try:
                OutputFile(marker, durable=False).close()
            except FileExistsError:
                continue  # another rank's
            except OSError as error:
                self._may_write = False
                logger.warning(
                    "%s: completed chunks cannot be marked here (%s), so their producer will not delete them",
                    self.folder,
                    error.strerror,
                )
                return
            logger.info("%s is completed", chunk_name(number))
