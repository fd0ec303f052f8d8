"""The parts between a reader of objects and a disk: a server of byte ranges, and a link with latency.

OpenStack Swift on the machine that also trains takes some 10 ms of processor time a request, so with it a bench of many
requests measures Swift. ``range_server`` is the least that S3 clients read from, HEAD and ranges of files in a folder
without authentication, and takes well under one: it shows the speed of the readers themselves. ``slow_link`` is a TCP
proxy that holds every request back, and counts requests and bytes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ASKED = re.compile(rb"(GET|HEAD) /([^ ?]+)\S* HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)
_PIECE_NBYTES = 1 << 18

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextmanager
def _served(serve: Callable[..., None], *arguments: Any) -> Iterator[int]:
    """Start a server in a separate process, which reports the port that it listens on. Return the port."""
    context = multiprocessing.get_context("spawn")
    listening = context.Queue()
    process = context.Process(target=serve, args=(*arguments, listening), daemon=True)
    process.start()
    try:
        yield listening.get(timeout=60)
    finally:
        process.terminate()
        process.join()


def _listen(connected: Connected, listening: Any) -> None:
    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=256)
        listening.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# ---- ranges ----


@contextmanager
def range_server(folder: str) -> Iterator[int]:
    """Serves ``folder/BUCKET/KEY``; its port."""
    with _served(_serve_ranges, folder) as port:
        yield port


def _serve_ranges(folder: str, listening: Any) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(_answer(folder, await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    _listen(connected, listening)


def _answer(folder: str, request: bytes) -> bytes:
    asked, found = _ASKED.match(request), _RANGE.search(request)
    path = os.path.join(folder, asked[2].decode()) if asked else folder
    if not asked or not os.path.isfile(path):
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
    size = os.path.getsize(path)
    begin, end = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
    head = (
        f'HTTP/1.1 {206 if found else 200} OK\r\nContent-Length: {end - begin}\r\nETag: "{size}"\r\n'
        "Last-Modified: Sat, 01 Jan 2000 00:00:00 GMT\r\n"
    )
    if found:
        head += f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n"
    body = b""
    if asked[1] == b"GET":
        with open(path, "rb", buffering=0) as file:
            file.seek(begin)
            body = file.read(end - begin)
    return head.encode() + b"\r\n" + body


# ---- time ----


@dataclass(frozen=True)
class Link:
    """A proxy at work."""

    port: int  # where it listens, on loopback
    counts: Any  # requests, and bytes of answers; shared with the process that counts them

    def take(self) -> tuple[int, int]:
        """Return requests and bytes since the last call."""
        requests, nbytes = self.counts[:]
        self.counts[0] = self.counts[1] = 0
        return requests, nbytes


@contextmanager
def slow_link(target: int, milliseconds: float) -> Iterator[Link]:
    """Run a proxy to a port of this machine that delays every request."""
    counts = multiprocessing.get_context("spawn").Array("q", 2, lock=False)
    with _served(_forward, target, milliseconds / 1000, counts) as port:
        yield Link(port, counts)


def _forward(target: int, seconds: float, counts: Any, listening: Any) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)

        async def up() -> None:
            while piece := await reader.read(_PIECE_NBYTES):
                counts[0] += piece.count(b" HTTP/1.1\r\n")
                # Each request is one small piece, so this happens once per request.
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

    _listen(connected, listening)
