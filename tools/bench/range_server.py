"""The least that S3 clients read from: HEAD and ranges of files in a folder, for whoever asks and signs or not.

Swift on the machine that also trains takes some 10 ms of processor time a request, so with it a bench of many requests
measures Swift. This one takes well under one, and shows what the readers themselves can do.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["range_server"]

_ASKED = re.compile(rb"(GET|HEAD) /([^ ?]+)\S* HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)", re.IGNORECASE)


@contextmanager
def range_server(folder: str) -> Iterator[int]:
    """Serves ``folder/BUCKET/KEY`` from a process of its own; its port."""
    context = multiprocessing.get_context("spawn")
    listening = context.Queue()
    process = context.Process(target=_serve, args=(folder, listening), daemon=True)
    process.start()
    try:
        yield listening.get(timeout=60)
    finally:
        process.terminate()
        process.join()


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


def _serve(folder: str, listening: Any) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write(_answer(folder, await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=256)
        listening.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
