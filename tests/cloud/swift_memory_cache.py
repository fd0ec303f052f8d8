"""A replacement for memcached in the memory of Swift's single proxy process. The proxy loads it, not the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class MemoryCache:
    """The part of ``swift.common.memcached.MemcacheRing`` that the proxy's middleware calls."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[float, Any]] = {}

    def set(self, key: str, value: Any, serialize: bool = True, time: float = 0, **_: Any) -> None:
        self._values[key] = (_now() + time if time else float("inf"), value)

    def get(self, key: str, raise_on_error: bool = False) -> Any:
        until, value = self._values.get(key, (0.0, None))
        return value if _now() < until else None

    def incr(self, key: str, delta: int = 1, time: float = 0) -> int:
        value = int(self.get(key) or 0) + delta
        self.set(key, value, time=time)
        return value

    def decr(self, key: str, delta: int = 1, time: float = 0) -> int:
        return self.incr(key, -delta, time)

    def delete(self, key: str, server_key: str | None = None) -> None:
        self._values.pop(key, None)


def _now() -> float:
    return time.monotonic()


def filter_factory(global_conf: dict[str, str], **conf: str) -> Callable[[Any], Any]:
    """The entry point for PasteDeploy."""
    cache = MemoryCache()

    def with_cache(app: Any) -> Any:
        def call(env: dict[str, Any], start_response: Any) -> Any:
            env["swift.cache"] = cache
            return app(env, start_response)

        return call

    return with_cache
