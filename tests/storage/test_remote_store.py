"""Paths, retries, and a store's reaction to a misbehaving server: a real server over TCP."""

from __future__ import annotations

import http.server
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from chats import ROOT
from hypothesis import given
from hypothesis import strategies as st

from megatron_sft_idx.errors import FormatError, SFTIndexError, StorageError
from megatron_sft_idx.storage import is_remote
from megatron_sft_idx.storage.remote import ObjectInfo, RemotePath, RemoteStore, RetryPolicy, forget_stores, open_store
from megatron_sft_idx.storage.remote.s3 import S3
from megatron_sft_idx.storage.remote.transport import NoSuchObject, TemporaryFailure

BODY = bytes(range(256)) * 40
SECRET = "not-a-secret-but-must-not-be-seen"
LIBRARIES = ("boto3", "obstore")


# ---- paths ----


@given(
    st.sampled_from(["s3", "msc"]),
    st.text("abc-.", min_size=1),
    st.lists(st.text("ab_-. %#?+*[é", min_size=1).filter(lambda name: name not in {".", ".."})),
    st.sampled_from(["", "/"]),
)
def test_a_path_is_taken_apart_and_put_together(scheme: str, bucket: str, names: list[str], end: str) -> None:
    key = "/".join(names) + (end if names else "")
    path = f"{scheme}://{bucket}/{key}"
    assert is_remote(path)
    assert RemotePath.of(path) == RemotePath(scheme, bucket, key)
    assert str(RemotePath.of(path)) == path


@pytest.mark.parametrize("path", ["data/x", "/data/s3://x", "s3:/b/x", "s3", ""])
def test_other_paths_are_local(path: str) -> None:
    assert not is_remote(path)
    with pytest.raises(FormatError, match="s3:// or msc://"):
        RemotePath.of(path)


@pytest.mark.parametrize("path", ["gs://b/x", "S3://b/x", "https://b/x", "abfs+s://b/x"])
def test_stores_of_another_kind_are_no_local_folders(path: str) -> None:
    with pytest.raises(FormatError, match="msc://PROFILE"):
        is_remote(path)


@pytest.mark.parametrize("key", ["a//b", "/a", "//", "a/./b", "a/../b", "..", "a/.", "a\nb", "a\0b"])
def test_a_key_that_libraries_change_is_refused(key: str) -> None:
    with pytest.raises(FormatError, match="use a key without them"):
        open_store(f"s3://bucket/{key}")


def test_a_path_without_a_bucket_is_refused() -> None:
    with pytest.raises(FormatError, match="the bucket is missing"):
        open_store("s3:///x")
    with pytest.raises(FormatError, match="the profile is missing"):
        open_store("msc://")


def test_a_store_pickles_as_its_address() -> None:
    store, key = open_store("s3://bucket/a/b")
    assert key == "a/b"
    assert open_store("s3://bucket/c")[0] is store
    again = pickle.loads(pickle.dumps(store))
    assert (again.scheme, again.bucket, again.policy) == (store.scheme, store.bucket, store.policy)


# ---- retries ----


def failing(times: int) -> Callable[[], int]:
    left = iter([True] * times)

    def attempt() -> int:
        if next(left, False):
            raise TemporaryFailure("HTTP 503")
        return 7

    return attempt


def test_what_passes_is_tried_again() -> None:
    assert RetryPolicy(total_seconds=60, first_delay=0.001).retry(failing(5)) == 7


def test_the_bound_is_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(
        "megatron_sft_idx.storage.remote.transport.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep)
    )
    with pytest.raises(TemporaryFailure, match=r"[2-9] attempts in 0\.\d s, the last one failed with: HTTP 503"):
        RetryPolicy(total_seconds=0.3, first_delay=0.1).retry(failing(10**6))
    assert now <= 0.3
    with pytest.raises(TemporaryFailure, match="1 attempts"):
        RetryPolicy(total_seconds=0).retry(failing(1))


def test_what_does_not_pass_is_not_tried_again() -> None:
    calls = []

    def attempt() -> None:
        calls.append(1)
        raise NoSuchObject("HTTP 404")

    with pytest.raises(NoSuchObject):
        RetryPolicy().retry(attempt)
    assert len(calls) == 1


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_bound_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_IDX_STORAGE_SECONDS", text)
    with pytest.raises(FormatError, match="SFT_IDX_STORAGE_SECONDS"):
        RetryPolicy.from_environment()


# ---- a server that misbehaves ----


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers requests for ranges of BODY. Each of the server's ``moods`` first spoils one answer."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked += 1
        mood = self.server.moods.pop(0) if self.server.moods else "good"
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end = (int(found[1]), int(found[2]) + 1) if found else (0, len(BODY))
        body = BODY[begin:end]
        if mood == "expired":
            self.answer(400, b"<Error><Code>ExpiredToken</Code><Message>%s</Message></Error>" % SECRET.encode())
        elif isinstance(mood, int):
            self.answer(mood, b"<Error><Code>Code%d</Code><Message>%s</Message></Error>" % (mood, SECRET.encode()))
        elif mood == "hang up":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif mood == "half":
            self.head(206, len(body), begin, end)
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif mood == "nothing":
            self.answer(206, b"", begin, end)
        elif mood == "less":
            self.answer(206, body[:-1], begin, end - 1)
        elif mood == "all":
            self.answer(200, BODY)
        else:
            self.answer(206, body, begin, end)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: bytes, begin: int = 0, end: int = 0) -> None:
        self.head(status, len(body) if self.command == "GET" else len(BODY), begin, end)
        if self.command == "GET":
            self.wfile.write(body)

    def head(self, status: int, nbytes: int, begin: int, end: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(nbytes))
        self.send_header("ETag", '"an-etag"')
        self.send_header("Last-Modified", "Sat, 01 Jan 2000 00:00:00 GMT")
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{max(end - 1, begin)}/{len(BODY)}")
        self.end_headers()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[Any, pytest.MonkeyPatch]]:
    """Provide the server, and an environment in which boto3 finds it and no settings of the user."""
    made: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    made.daemon_threads = True
    threading.Thread(target=made.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("AWS_") or name.lower().endswith("_proxy"):
                patch.delenv(name)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            patch.setenv(name, value)
        yield made, patch
    made.shutdown()
    made.server_close()
    forget_stores()


@pytest.fixture
def server(address: tuple[Any, pytest.MonkeyPatch]) -> Any:
    made, _ = address
    made.moods, made.asked = [], 0
    forget_stores()
    return made


PATIENT, IMPATIENT = (RetryPolicy(total_seconds=seconds, first_delay=0.01) for seconds in (60, 0.7))


def open_through(library: str) -> RemoteStore:
    """Return a store that uses boto3 or obstore and gives up soon."""
    made = RemoteStore("s3", "bucket", IMPATIENT)
    made._transport = os.getpid(), S3("bucket", fast=library != "boto3")
    return made


@pytest.fixture(scope="module", params=LIBRARIES)
def shared_store(request: pytest.FixtureRequest, address: Any) -> RemoteStore:
    for library in {"boto3", request.param}:
        pytest.importorskip(library, reason="pip install 'megatron-sft-idx[cloud]'")
    return open_through(request.param)


@pytest.fixture
def store(shared_store: RemoteStore, server: Any) -> RemoteStore:
    shared_store.policy = IMPATIENT
    return shared_store


@pytest.mark.parametrize("mood", ["hang up", "half", "nothing", "less", 500, 503, 429])
def test_an_answer_that_is_none_is_asked_for_again(store: RemoteStore, server: Any, mood: Any) -> None:
    store.policy = PATIENT
    server.moods = [mood, mood]
    assert bytes(store.read("x", 1000, 300)) == BODY[1000:1300]
    assert server.asked == 3


@pytest.mark.parametrize("mood", ["hang up", "half", "nothing", "less", 503])
def test_a_server_that_never_answers_is_an_error_in_time(store: RemoteStore, server: Any, mood: Any) -> None:
    server.moods = [mood] * 10**5
    with pytest.raises(StorageError, match=r"s3://bucket/x: no complete answer \(\d+ attempts in [\d.]+ s") as caught:
        store.read("x", 1000, 300)
    assert not caught.value.missing
    assert not isinstance(caught.value, OSError)  # an OSError would mean a local disk


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, StorageError, "access denied"),
        (401, StorageError, "access denied"),
        (404, StorageError, "no such object"),
        (412, FormatError, "replaced after it was opened"),
        (416, FormatError, "ends before"),
        (400, StorageError, "rejects the request"),
        ("expired", StorageError, r"access denied \(HTTP 400 ExpiredToken\); check the credentials"),
    ],
)
def test_an_answer_that_will_not_change_is_an_error_at_once(
    store: RemoteStore, server: Any, status: Any, kind: type[SFTIndexError], words: str
) -> None:
    server.moods = [status]
    with pytest.raises(kind, match=words) as caught:
        store.read("x", 1000, 300, etag="an-etag")
    assert server.asked == 1
    shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__
    assert SECRET not in shown
    assert "somebody" not in shown


def test_a_head_that_is_refused_without_a_word_is_about_credentials(store: RemoteStore, server: Any) -> None:
    server.moods = ["expired"]
    with pytest.raises(StorageError, match=r"access denied \(HTTP 400\)"):
        store.head("x")


def test_threads_that_come_first_share_a_connection(server: Any) -> None:
    pytest.importorskip("boto3", reason="pip install 'megatron-sft-idx[cloud]'")
    store = RemoteStore("s3", "bucket")
    together = threading.Barrier(16)

    def connect(_: int) -> int:
        together.wait(300)
        return id(store.transport)

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(connect, range(16)))) == 1


_LEAVING = """
from megatron_sft_idx.storage.remote import open_store
from megatron_sft_idx.storage.remote.transport import request_pool
store, key = open_store("s3://bucket/x")
asked = [request_pool().submit(store.read, key, 0, 9) for _ in range(500)]
while not any(each.running() for each in asked):
    pass
print("leaving")
"""


def test_a_process_does_not_wait_for_a_store_that_does_not_answer(server: Any) -> None:
    pytest.importorskip("boto3", reason="pip install 'megatron-sft-idx[cloud]'")
    server.moods = [503] * 10**6
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SFT_IDX_STORAGE_SECONDS": "3600"}
    done = subprocess.run(
        [sys.executable, "-c", _LEAVING], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done


def test_a_server_without_ranges_is_not_read_to_the_end(store: RemoteStore, server: Any) -> None:
    server.moods = ["all"] * 10**5
    with pytest.raises(StorageError, match="s3://bucket/x"):
        store.read("x", 1000, 300)


def test_head_and_many_ranges(store: RemoteStore, server: Any) -> None:
    store.policy = PATIENT
    assert store.head("x") == ObjectInfo("x", len(BODY), "an-etag")
    server.moods = ["hang up", "half", 503]
    ranges = [(i * 100, i) for i in range(50)]
    found = store.read_many("x", ranges, etag="an-etag")
    assert [bytes(each) for each in found] == [BODY[at : at + n] for at, n in ranges]
    server.moods = [404]
    assert store.head("x") is None


def test_nobody_at_the_endpoint(store: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    alone = open_through("obstore" if store.transport.fast else "boto3")
    for request in (lambda: alone.head("x"), lambda: alone.read("x", 0, 9)):
        with pytest.raises(StorageError, match="check that the store is running"):
            request()


def test_no_credentials_at_all(server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("boto3", reason="pip install 'megatron-sft-idx[cloud]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store, key = open_store("s3://bucket/x")
    with pytest.raises(StorageError, match=r"access denied \(NoCredentialsError\); check the credentials"):
        store.head(key)
