"""The files of OpenStack Swift: installation, configuration and rings, for one machine and one copy of the data."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The versions with which the tests were written; newer ones may work too.
PACKAGES = ["swift==2.38.3", "pyeclib==1.8.0", "eventlet==0.41.3"]
STORAGE = ("account", "container", "object")

_STORAGE_CONF = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
workers = 0
fallocate_reserve = 0
log_level = WARNING
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
# The proxy soon retries the object server after a failure, because there is only one. s3api lets tempauth check the
# signature of a request; slo joins the parts of multipart uploads.
_PROXY_CONF = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
workers = 0
log_level = WARNING
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache listing_formats bulk s3api tempauth copy slo symlink proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
node_timeout = 5
# After ten failures the proxy leaves a server alone, for a minute where nothing is said; tests start theirs sooner.
error_suppression_interval = 0.5
[filter:tempauth]
use = egg:swift#tempauth
user_{account}_{name} = {secret} .admin
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
max_upload_part_num = 10000
[filter:cache]
paste.filter_factory = swift_memory_cache:filter_factory
"""
# The same as nine calls of swift-ring-builder.
_MAKE_RINGS = """\
import sys
from swift.common.ring import RingBuilder
for ring in sys.argv[1:]:
    path, port = ring.rsplit(":", 1)
    at = {"ip": "127.0.0.1", "port": int(port), "replication_ip": "127.0.0.1", "replication_port": int(port)}
    builder = RingBuilder(part_power=4, replicas=1, min_part_hours=0)
    builder.add_dev({"id": 0, "region": 1, "zone": 1, "device": "d1", "weight": 1.0, "meta": "", **at})
    builder.rebalance()
    builder.get_ring().save(path)
"""
_EGG_FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "bulk", "copy", "slo", "symlink")


@dataclass(frozen=True)
class Credentials:
    """The only user of the server, made up for tests. These are not real secrets."""

    account: str = "test"
    name: str = "tester"
    secret: str = "not-a-secret-0123456789"

    @property
    def access_key(self) -> str:
        return f"{self.account}:{self.name}"


def install(venv: Path = ROOT / ".venv-swift") -> Path:
    """Return the ``bin`` folder of Swift's own environment. Create it if it is missing; a lock serializes processes."""
    venv = Path(os.environ.get("SFT_IDX_SWIFT_VENV", venv))
    done = venv / "installed"
    venv.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != " ".join(PACKAGES):
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
            command = [str(venv / "bin/python"), "-m", "pip", "-q", "--disable-pip-version-check", "install", *PACKAGES]
            subprocess.run(command, check=True, timeout=600)
            done.write_text(" ".join(PACKAGES))
    return venv / "bin"


def require_attributes(folder: Path) -> None:
    """Skip if Swift cannot store anything here: it keeps names and sizes in extended attributes."""
    try:
        os.setxattr(folder, "user.swift.probe", b"1")
        os.removexattr(folder, "user.swift.probe")
    except OSError as error:
        pytest.skip(f"{folder}: no extended attributes here ({error.strerror}), which Swift needs")


def configure(folder: Path, ports: dict[str, int], bin_folder: Path, credentials: Credentials) -> None:
    """Write the configuration of the four servers into ``folder``, and make rings of one device."""
    (folder / "devices/d1").mkdir(parents=True)
    require_attributes(folder / "devices/d1")
    shutil.copy(Path(__file__).with_name("swift_memory_cache.py"), folder)
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_prefix = tests\nswift_hash_path_suffix = tests\n"
        "[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    fill = {"folder": folder, "user": getpass.getuser()}
    for name in STORAGE:
        (folder / f"{name}.conf").write_text(_STORAGE_CONF.format(name=name, port=ports[name], **fill))
    rings = [f"{folder / name}.ring.gz:{ports[name]}" for name in STORAGE]
    subprocess.run([str(bin_folder / "python"), "-c", _MAKE_RINGS, *rings], check=True, timeout=120)
    text = _PROXY_CONF.format(
        port=ports["proxy"], account=credentials.account, name=credentials.name, secret=credentials.secret, **fill
    )
    text += "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in _EGG_FILTERS)
    (folder / "proxy.conf").write_text(text)
