"""The test server works as the other tests here need it, and its processes can be killed separately."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swift_server import SwiftServer

pytestmark = pytest.mark.cloud


def test_ranges_parts_and_conditional_creation(s3: Any, bucket: str) -> None:
    body = os.urandom(11 << 20)
    upload = s3.create_multipart_upload(Bucket=bucket, Key="x/big")["UploadId"]
    parts = []
    for number, offset in enumerate(range(0, len(body), 6 << 20), 1):
        part = s3.upload_part(
            Bucket=bucket, Key="x/big", UploadId=upload, PartNumber=number, Body=body[offset : offset + (6 << 20)]
        )
        parts.append({"PartNumber": number, "ETag": part["ETag"]})
    assert [each["Key"] for each in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["x/big"]
    s3.complete_multipart_upload(Bucket=bucket, Key="x/big", UploadId=upload, MultipartUpload={"Parts": parts})
    got = s3.get_object(Bucket=bucket, Key="x/big", Range=f"bytes={(6 << 20) - 5}-{(6 << 20) + 4}")
    assert got["Body"].read() == body[(6 << 20) - 5 : (6 << 20) + 5]

    s3.put_object(Bucket=bucket, Key="x/once", Body=b"first", IfNoneMatch="*")
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket=bucket, Key="x/once", Body=b"second", IfNoneMatch="*")
    assert s3.get_object(Bucket=bucket, Key="x/once")["Body"].read() == b"first"


@pytest.mark.parametrize("name", ["account", "container", "object", "proxy"])
def test_each_server_can_be_killed_and_comes_back(swift: SwiftServer, s3: Any, bucket: str, name: str) -> None:
    s3.put_object(Bucket=bucket, Key="x", Body=b"kept")
    swift.kill(name)
    assert not swift.is_running(name)
    swift.start(name)
    assert s3.get_object(Bucket=bucket, Key="x")["Body"].read() == b"kept"


def test_a_wrong_key_is_refused(swift: SwiftServer, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(s3.exceptions.ClientError, match="SignatureDoesNotMatch"):
        boto3.session.Session().client("s3").list_objects_v2(Bucket=bucket)


def test_as_a_script_it_prints_its_address_and_ends_with_all_its_processes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("swift_server.py")
    served = subprocess.Popen([sys.executable, str(script), str(tmp_path / "s")], stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        assert served.stdout.readline().startswith("export AWS_ENDPOINT_URL=http://127.0.0.1:")
        served.terminate()
        served.wait(60)
    finally:
        served.kill()
        served.wait()
    commands = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not any(os.fsencode(tmp_path) in command for command in commands)
