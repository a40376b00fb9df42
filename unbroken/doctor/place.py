"""Is a place in an object store fit for a run's copy or a Store: found out by trying, under a name of its own that is removed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from unbroken.codec.digest import digest
from unbroken.core.errors import MissingExtra, StoreError, describe
from unbroken.core.ports import Clock, Nonces, SystemNonces, Tier
from unbroken.doctor.examine import Report
from unbroken.doctor.findings import Finding, judged, size
from unbroken.store.tiers.careful import LOWER_LEVEL
from unbroken.store.tiers.choose import tier_at
from unbroken.store.tiers.probe import Probe, probe

LARGE_BYTES = 17 << 20
"""Above what is put in one request, so that an upload in parts is tried, too."""

BLOCK_BYTES = 1 << 20
RETRY_S = 5.0


def examine_place(url: str, clock: Clock, nonces: Nonces | None = None) -> Report:
    """Try what a run needs of the store: some 40 requests, 17 MiB up and 2 MiB down. ValueError for a URL that is none."""
    try:
        tier = tier_at(url, RETRY_S)
    except MissingExtra as error:
        return Report(ok=False, directory=url, findings=(judged("client", str(error), problem="install it"),))
    return examine_tier(url, tier, clock, nonces or SystemNonces())


def examine_tier(url: str, tier: Tier, clock: Clock, nonces: Nonces) -> Report:
    """The same for an open tier."""
    findings: list[Finding] = []
    try:
        began_s = clock.monotonic()
        found = probe(tier, nonces)
        findings += _promises(found, clock.monotonic() - began_s)
        findings.append(_large(tier, f".probe-{nonces.nonce()}/large", clock))
    except StoreError as error:
        findings.append(judged("access", describe(error), problem="allow reading, writing, listing and deleting there, and try again"))
    level = _level(findings)
    return Report(ok=all(one.status != "problem" for one in findings), directory=url, findings=(*findings, level))


def _promises(found: Probe, seconds: float) -> Iterator[Finding]:
    yield judged("access", f"written, read, listed and deleted in {seconds:.1f} s")
    yield judged(
        "put if absent",
        "of writers that race for a name one wins" if found.conditional_put else "; ".join(f for f in found.faults if "put-if-absent" in f),
        warning="" if found.conditional_put else LOWER_LEVEL,
    )
    others = [fault for fault in found.faults if "put-if-absent" not in fault]
    yield judged(
        "reading and listing", "; ".join(others) or "as written", problem="no run may be kept there: use another store" if others else ""
    )


def _large(tier: Tier, path: str, clock: Clock) -> Finding:
    """An upload in parts, read back at two places."""
    block = bytes(range(256)) * (BLOCK_BYTES // 256)
    blocks = [block[n:] + block[:n] for n in range(LARGE_BYTES // BLOCK_BYTES)]
    began_s = clock.monotonic()
    try:
        tier.create(path, iter(blocks))
        seconds = max(clock.monotonic() - began_s, 1e-6)
        same = all(digest(tier.read(path, n * BLOCK_BYTES, BLOCK_BYTES)) == digest(blocks[n]) for n in (0, len(blocks) - 1))
        is_whole = same and tier.size(path) == LARGE_BYTES
    finally:
        with suppress(StoreError):  # what cannot be removed is said by the probe
            tier.delete(path)
    seen = f"{size(LARGE_BYTES)} written at {size(LARGE_BYTES / seconds)}/s and read back"
    return judged("large objects", seen, problem="" if is_whole else "an upload in parts does not come back as it was: use another store")


def _level(findings: list[Finding]) -> Finding:
    if any(one.status == "problem" for one in findings):
        return judged("level", "unfit: no run may be kept there", problem="see above")
    if any(one.status == "warning" for one in findings):
        return judged("level", "one writer: checkpoints are safe while only one process writes at a time", warning="see above")
    return judged("level", "full: any number of writers may meet, the newest one wins")
