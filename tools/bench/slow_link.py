"""A link that takes its time: a TCP proxy that holds every request back, and counts requests and bytes."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Link", "slow_link"]

_PIECE_NBYTES = 1 << 18


@dataclass(frozen=True)
class Link:
    """A proxy at work.

    Attributes:
        port: where it listens, on loopback.
        counts: requests, and bytes of answers; shared with the process that counts them.
    """

    port: int
    counts: Any

    def take(self) -> tuple[int, int]:
        """Requests and bytes since they were last taken."""
        requests, nbytes = self.counts[:]
        self.counts[0] = self.counts[1] = 0
        return requests, nbytes


@contextmanager
def slow_link(target: int, milliseconds: float) -> Iterator[Link]:
    """A proxy to a port of this machine, in a process of its own, that adds so much to every request."""
    context = multiprocessing.get_context("spawn")
    counts, listening = context.Array("q", 2, lock=False), context.Queue()
    process = context.Process(target=_serve, args=(target, milliseconds / 1000, counts, listening), daemon=True)
    process.start()
    try:
        yield Link(listening.get(timeout=60), counts)
    finally:
        process.terminate()
        process.join()


def _serve(target: int, seconds: float, counts: Any, listening: Any) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)

        async def up() -> None:
            while piece := await reader.read(_PIECE_NBYTES):
                counts[0] += piece.count(b" HTTP/1.1\r\n")
                # Reading asks in one small piece each, so this is once a request.
                await asyncio.sleep(seconds)
                far_writer.write(piece)
                await far_writer.drain()
            far_writer.close()

        async def down() -> None:
            while piece := await far_reader.read(_PIECE_NBYTES):
                counts[1] += len(piece)
                writer.write(piece)
                await writer.drain()
            writer.close()

        await asyncio.gather(up(), down(), return_exceptions=True)

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=256)
        listening.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
