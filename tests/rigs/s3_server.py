"""A real S3 server (SeaweedFS) on free loopback ports with random keys, one per test session, ended by its own process id."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import obstore
from obstore.store import S3Store

from unbroken.core.os import die_with_parent

READY_S = 60.0
BUCKET = "runs"
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")
_numbers = itertools.count()


def weed() -> str | None:
    """The server's program, of this environment first; None when it is not installed."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass
class S3Server:
    """Where it is, and the keys of one who may do all and of one who may only read."""

    endpoint: str
    filer: str
    pid: int
    key: str = field(default_factory=lambda: "AK" + secrets.token_hex(8), repr=False)
    secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)
    reader_key: str = field(default_factory=lambda: "RO" + secrets.token_hex(8), repr=False)
    reader_secret: str = field(default_factory=lambda: secrets.token_hex(20), repr=False)

    def make_bucket(self) -> None:
        """One for all: each costs the server several volumes."""
        urllib.request.urlopen(urllib.request.Request(f"{self.filer}/buckets/{BUCKET}/", method="POST"), timeout=10).close()

    def warm_up(self) -> None:
        """The first write makes the volumes and takes seconds: no test shall pay for that."""
        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=self.key,
            secret_access_key=self.secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        obstore.put(store, "warm", b"x")

    def place(self) -> str:
        """URL of a place that nobody has used."""
        return f"s3://{BUCKET}/{os.getpid()}-{next(_numbers)}"

    def environment(self, reader: bool = False) -> dict[str, str]:
        """What a user would export."""
        key, secret = (self.reader_key, self.reader_secret) if reader else (self.key, self.secret)
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within the block the server takes connections and says nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


@contextmanager
def s3_server(program: str) -> Iterator[S3Server]:
    """Start it, wait until it answers, end it. Its data go with it."""
    ports = dict(zip([*PORTS, *(f"{name}.grpc" for name in PORTS)], free_ports(2 * len(PORTS)), strict=True))
    at = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    with tempfile.TemporaryDirectory(prefix="weed") as folder:
        server = S3Server(at["s3.port"], at["filer.port"], pid=0)
        Path(folder, "s3.json").write_text(json.dumps({"identities": _identities(server)}))
        arguments = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}", "-master.volumeSizeLimitMB=256", "-volume.max=20"]
        arguments += ["-master.telemetry=false", "-filer", "-s3", f"-s3.config={folder}/s3.json", f"-s3.localSocket={folder}/s3.sock"]
        arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", *(f"-{name}={port}" for name, port in ports.items())]
        environment = {**os.environ, "GOMEMLIMIT": "300MiB", "GOMAXPROCS": "1"}
        with open(f"{folder}/out", "wb") as out:
            process = subprocess.Popen(
                [program, f"-logdir={folder}", "server", *arguments],
                stdout=out,
                stderr=out,
                env=environment,
                cwd=folder,
                preexec_fn=die_with_parent,
            )
        server.pid = process.pid
        try:
            _wait(process, server, lambda: Path(folder, "out").read_text(errors="replace"))
            server.warm_up()
            yield server
        finally:
            process.kill()
            process.wait()


def _identities(server: S3Server) -> list[dict[str, object]]:
    def identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}

    return [
        identity("admin", server.key, server.secret, ["Admin", "Read", "Write", "List", "Tagging"]),
        identity("reader", server.reader_key, server.reader_secret, ["Read", "List"]),
    ]


def _wait(process: subprocess.Popen[bytes], server: S3Server, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {said()[-2000:]}")
        try:
            socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2])), timeout=1).close()
            server.make_bucket()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not come up in {READY_S:g} s: {said()[-2000:]}")
