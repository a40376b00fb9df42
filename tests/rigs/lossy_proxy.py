"""A door before a server that can lose answers: the request arrives and is done, the one who asked never learns it; and worse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_WAIT_S = 20.0
LATE_S = 1.5
SLOW_S = 0.5
REFUSAL = b"""HTTP/1.1 503 Slow Down\r
Content-Type: application/xml\r
Content-Length: 42\r
Connection: close\r
\r
<Error><Code>SlowDown</Code></Error>      """


class LossyProxy:
    """Passes one request per connection on. `lose` answers to requests that begin with `method` are dropped, after the server gave them.

    `plan` says of a request's first line what happens to it: "" nothing; "503": refused; "drop": not passed on, the connection ends;
    "lose": done, without an answer; "slow": done after SLOW_S; "late": done after LATE_S, no answer; "half": half of the answer comes.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition("/")[2].partition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.method = b"PUT"
        self.lose = 0
        self.plan: Callable[[bytes], str] = lambda line: ""
        self.lost: list[bytes] = []
        self.requests: list[bytes] = []
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Until the listener is closed."""
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Takes no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pass_on(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(self._target, timeout=_WAIT_S) as server:
            client.settimeout(_WAIT_S)
            request = _message(client)
            line = request.partition(b"\r\n")[0]
            with self._lock:
                fault = self.plan(line)
            if fault == "503":
                client.sendall(REFUSAL)
            if fault in ("503", "drop"):
                return
            time.sleep({"late": LATE_S, "slow": SLOW_S}.get(fault, 0))
            head, _, body = request.partition(b"\r\n\r\n")
            server.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
            answer = b"".join(iter(lambda: server.recv(1 << 20), b""))
            with self._lock:
                self.requests.append(line)
                is_lost = self.lose > 0 and line.startswith(self.method)
                if is_lost:
                    self.lose -= 1
                    self.lost.append(line)
            if fault == "half":
                answer = answer[: len(answer) // 2]
            if not is_lost and fault not in ("lose", "late"):
                client.sendall(answer)


def _message(client: socket.socket) -> bytes:
    """One whole request with a known length."""
    data = b""
    while b"\r\n\r\n" not in data:
        block = client.recv(1 << 20)
        if not block:
            raise OSError("closed")
        data += block
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    blocks = [body]
    missing = (lengths[0] if lengths else 0) - len(body)
    while missing > 0:
        block = client.recv(1 << 20)
        if not block:
            raise OSError("closed")
        blocks.append(block)
        missing -= len(block)
    return head + b"\r\n\r\n" + b"".join(blocks)


@contextmanager
def lossy_proxy(target: str) -> Iterator[LossyProxy]:
    """One in a thread, closed at the end."""
    proxy = LossyProxy(target)
    thread = threading.Thread(target=proxy.serve, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.close()
        thread.join(5)
