"""A real S3 store on loopback: OpenStack Swift with s3api, as four processes that tests can kill separately.

As a script, it prints its address and serves until interrupted::

    python tests/cloud/swift_server.py [FOLDER]
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from swift_files import STORAGE, Credentials, configure, install

READY_SECONDS = 60.0
STOP_SECONDS = 20.0


class SwiftServer:
    """Account, container, object and proxy server over one folder.

    Args:
        folder: an empty folder on a file system with extended attributes; it will contain everything, including logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.credentials = Credentials()
        self._bin = install()
        self._ports = dict(zip((*STORAGE, "proxy"), _free_ports(4), strict=True))
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        configure(folder, self._ports, self._bin, self.credentials)

    @property
    def endpoint(self) -> str:
        """The URL for S3 clients."""
        return f"http://127.0.0.1:{self._ports['proxy']}"

    def environment(self) -> dict[str, str]:
        """The variables that give boto3, obstore and multi-storage-client the address and the credentials."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": self.credentials.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self, *names: str) -> None:
        """Start the servers with these names (default: all four) and wait until they answer."""
        for name in names or (*STORAGE, "proxy"):
            if not self.is_running(name):
                self._running[name] = self._spawn(name)
        for name in names or (*STORAGE, "proxy"):
            self._wait_until_ready(name)

    def kill(self, name: str) -> None:
        """Kill a server with SIGKILL: nothing is flushed, connections break."""
        process = self._running.pop(name)
        _signal_group(process, signal.SIGKILL)
        process.wait(STOP_SECONDS)

    def restart(self, name: str) -> None:
        """Kill one server and start it again. Everything that it confirmed is on disk."""
        self.kill(name)
        self.start(name)

    def is_running(self, name: str) -> bool:
        """Return whether this server's process exists."""
        return name in self._running and self._running[name].poll() is None

    def stop(self) -> None:
        """Stop the started processes. The folder stays."""
        for process in self._running.values():
            _signal_group(process, signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                _signal_group(process, signal.SIGKILL)
                process.wait(STOP_SECONDS)
        self._running.clear()

    def log(self, name: str) -> str:
        """Return the output of a server."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _spawn(self, name: str) -> subprocess.Popen[bytes]:
        # Not the environment of the tests, with its PYTHONPATH and proxies.
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.folder), "LANG": "C.UTF-8"}
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [str(self._bin / f"swift-{name}-server"), str(self.folder / f"{name}.conf"), "--verbose"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _wait_until_ready(self, name: str) -> None:
        until = time.monotonic() + READY_SECONDS
        while not self._answers(name):
            if not self.is_running(name):
                raise RuntimeError(f"swift-{name}-server ended at once: {self.log(name)[-4000:]}")
            if time.monotonic() > until:
                raise RuntimeError(f"swift-{name}-server does not answer: {self.log(name)[-4000:]}")
            time.sleep(0.05)

    def _answers(self, name: str) -> bool:
        path = "/healthcheck" if name == "proxy" else "/recon/version"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._ports[name]}{path}", timeout=5):
                return True
        except urllib.error.HTTPError:
            return name != "proxy"  # a storage server answers that the object does not exist
        except OSError:
            return False


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # It has its own session, so its group has only its own children.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[SwiftServer]:
    """Run a server inside the ``with`` block."""
    server = SwiftServer(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def main() -> None:
    """Serve until interrupted or terminated."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        given = sys.argv[1:2]
        folder = Path(given[0]) if given else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(serving(folder.absolute()))
        print("\n".join(f"export {name}={value}" for name, value in server.environment().items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
