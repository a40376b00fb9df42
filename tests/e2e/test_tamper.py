"""One byte changed anywhere in what counts of a real run is found and named; what does not count may change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import unbroken
from tests.rigs import tiny_run
from tests.rigs.tiny_run import commits, damage_newest, end_daemon, own_pack, packs_of, train
from unbroken.cli.app import app
from unbroken.core.errors import Damaged
from unbroken.recover.journal_client import JournalClient
from unbroken.step.update import Applied
from unbroken.store.repository import Repository
from unbroken.store.tiers.disk import DiskTier

KINDS = ("pack", "manifest", "log", "journal", "run.json")
TRAILER = (-64, -56, -48, -17, -12, -1)
"""In each field of a pack's end: footer offset and length, digest first and last, zeros, magic."""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four generations; steps 3 and 6 were condemned, and of step 6 everything still lies on disk, for nothing was saved after it."""
    directory = tmp_path_factory.mktemp("tamper") / "run"
    for steps in (3, 5, 6):
        train(directory, steps)
        end_daemon(directory)
        if steps != 5:
            damage_newest(directory)
    train(directory, 5)
    end_daemon(directory)
    certificate = unbroken.open(directory).certify()
    assert certificate.certified and certificate.generations == 4 and certificate.fell_back
    assert [one.step for one in certificate.condemned] == [3, 6]
    return directory


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tamper") / "reference"
    train(directory, 5)
    end_daemon(directory)
    return directory


@contextmanager
def changed(path: Path, offset: int) -> Iterator[None]:
    """One bit of one byte of a file is another one for a while."""
    before = tiny_run.flip(path, offset, bit=offset % 8)
    try:
        yield
    finally:
        path.write_bytes(before)


def objects(directory: Path, kind: str) -> list[str]:
    """Paths of everything of a kind that uncondemned checkpoints and the log stand on."""
    if kind == "pack":
        return sorted({pack for commit in commits(directory) for pack in packs_of(directory, commit)})
    if kind == "manifest":
        return [ref.path for commit in commits(directory) for ref in commit.manifests]
    pattern = {"log": "runs/main/log/*.json", "journal": "runs/main/journal/*.jsonl", "run.json": "run.json"}[kind]
    return sorted(str(path.relative_to(directory)) for path in directory.glob(pattern))


def offsets(raw: bytes, kind: str) -> list[int]:
    """Where to change a file: in each part of it, and evenly over all of it."""
    size = len(raw)
    if kind == "pack":
        footer = int.from_bytes(raw[-64:-56], "little")
        assert not any(raw[64:4096]), "padding"
        data_end = len(raw[:footer].rstrip(b"\0"))
        return [0, 16, 20, 24, 32, 47, 63, 64, 4095, 4096, data_end // 2, data_end - 1, footer, size - 65, *(size + at for at in TRAILER)]
    if kind == "journal":
        starts = [0, *(i + 1 for i, byte in enumerate(raw) if byte == ord("\n"))]
        lines = pairwise(starts)
        found = [at for first, end in lines for at in (first + 12, (first + end) // 2, end - 1)]
        return [at for at in found if at != size - 1]  # without its newline the last line is a torn one
    return [0, 12, 30, *range(40, size - 1, max(1, size // 4)), size - 1]


def problems(directory: Path) -> tuple[list[str], list[str]]:
    """What verify and certify find wrong; each must say so in its verdict as well."""
    found: list[list[str]] = []
    for check in ("verify", "certify"):
        try:
            report = getattr(unbroken.open(directory), check)()
        except Damaged as error:
            found.append([str(error)])
            continue
        bad = [": ".join(one) for one in report.bad] if check == "verify" else report.problems
        assert (report.ok if check == "verify" else report.certified) is (not bad)
        found.append(bad)
    return found[0], found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_I3_any_changed_byte_that_counts_is_found_and_the_object_named(interrupted: Path, kind: str) -> None:
    paths = objects(interrupted, kind)
    assert paths
    for path in paths:
        for offset in offsets((interrupted / path).read_bytes(), kind):
            with changed(interrupted / path, offset):
                verified, certified = problems(interrupted)
            where = f"{path} at {offset}"
            assert any(path in text for text in verified), f"{where}: verify says {verified}"
            assert any(path in text for text in certified), f"{where}: certify says {certified}"
    assert problems(interrupted) == ([], [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["verify", "certify"])
def test_I3_the_commands_name_the_object_and_exit_1(interrupted: Path, kind: str, command: str) -> None:
    assert CliRunner().invoke(app, [command, str(interrupted)]).exit_code == 0
    path = objects(interrupted, kind)[0]
    with changed(interrupted / path, 40):
        spoken = CliRunner().invoke(app, [command, str(interrupted)])
        written = CliRunner().invoke(app, [command, str(interrupted), "--json"])
    assert (spoken.exit_code, written.exit_code) == (1, 1)
    assert path in spoken.output
    report = json.loads(written.stdout)
    assert path in json.dumps(report)
    assert "error" in report or report["ok" if command == "verify" else "certified"] is False


@pytest.mark.parametrize("torn", [b'{"chain":"', b"\0" * 40, b"not JSON at all"])
def test_a_torn_last_line_is_no_tampering(interrupted: Path, torn: bytes) -> None:
    for path in objects(interrupted, "journal"):
        before = (interrupted / path).read_bytes()
        (interrupted / path).write_bytes(before + torn)
        assert problems(interrupted) == ([], []), path
        (interrupted / path).write_bytes(before + torn + b"\n")
        if b"\0" in torn:
            assert problems(interrupted) == ([], []), "a power loss leaves holes of zeros, and whole lines after them"
        else:
            assert all(path in found[0] for found in problems(interrupted)), "but a whole line of that kind is"
        (interrupted / path).write_bytes(before)


def test_a_last_line_that_no_checkpoint_counts_may_be_cut_anywhere(interrupted: Path) -> None:
    """The last generation has saved nothing: the end of its journal may have been lost with the process."""
    path = interrupted / objects(interrupted, "journal")[-1]
    before = path.read_bytes()
    start = before.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(before), 17):
        path.write_bytes(before[:end])
        assert problems(interrupted) == ([], [])
    path.write_bytes(before)


def test_what_only_condemned_checkpoints_need_may_change_or_go(interrupted: Path, tmp_path: Path) -> None:
    state = Repository.open(DiskTier(str(interrupted))).log.state
    (condemned,) = [commit for commit in state.commits if commit.step == 6]
    manifest = condemned.manifests[0].path
    counting = {pack for commit in commits(interrupted) for pack in packs_of(interrupted, commit)}
    (pack,) = packs_of(interrupted, condemned) - counting
    for path in (pack, manifest):
        size = (interrupted / path).stat().st_size
        for offset in (0, 40, 5000, size - 50, size - 1):
            with changed(interrupted / path, offset):
                assert problems(interrupted) == ([], []), f"{path} at {offset}"
    copy = tmp_path / "copy"
    shutil.copytree(interrupted, copy)
    (copy / pack).unlink()
    (copy / manifest).unlink()
    assert problems(copy) == ([], [])
    assert unbroken.open(copy).load()["counters"]["step"] == 5


def test_a_reference_with_the_same_bits_certifies(interrupted: Path, reference: Path) -> None:
    certificate = unbroken.open(interrupted).certify(reference)
    assert (certificate.certified, certificate.grade, certificate.final_step) == (True, "exact", 5), certificate.problems
    assert certificate.losses_equal and certificate.state_root_equal and certificate.superseded_equal


def refused(interrupted: Path, other: Path) -> dict[str, Any]:
    """The command's answer to a reference that differs."""
    result = CliRunner().invoke(app, ["certify", str(interrupted), "--against", str(other), "--json"])
    assert result.exit_code == 1, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["certified"] is False and report["grade"] != "exact"
    return report


def test_one_bit_of_one_loss_denies_the_certificate(interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = JournalClient.step

    def lie(self: JournalClient, step: int, attempt: int, applied: Applied, now_s: float) -> None:
        if step == 2:
            applied = replace(applied, loss_bits=f"{int(applied.loss_bits, 16) ^ 1:016x}")
        genuine(self, step, attempt, applied, now_s)

    monkeypatch.setattr(JournalClient, "step", lie)
    train(tmp_path / "other", 5)
    report = refused(interrupted, tmp_path / "other")
    assert (report["losses_equal"], report["state_root_equal"]) == (False, True)
    assert report["problems"] == ["step 2: the loss's bits differ from the reference's (1 such steps)"]


def test_one_bit_of_one_weight_denies_the_certificate(interrupted: Path, tmp_path: Path) -> None:
    """In a weight that no loss depends on: only the roots can tell."""
    torch.manual_seed(3)
    model = tiny_run.Tiny()
    torch.manual_seed(3)
    model.frozen.data[7, 7] = torch.nextafter(model.frozen.data[7, 7], torch.tensor(9.0))
    run = tiny_run.open_run(tmp_path / "other", model=model, total_steps=5)
    torch.manual_seed(3)
    for batch in run:
        for micro in batch:
            micro.backward(tiny_run.loss_of(model, micro))
        run.step(clip_grad_norm=1.0)
    report = refused(interrupted, tmp_path / "other")
    assert (report["losses_equal"], report["state_root_equal"]) == (True, False)
    assert all("/model/parameters/frozen" in text for text in report["problems"]), report["problems"]


def test_a_reference_that_is_damaged_itself_proves_nothing(interrupted: Path, reference: Path) -> None:
    pack = own_pack(reference, commits(reference)[-1])
    with changed(reference / pack, 4096):
        report = refused(interrupted, reference)
    assert any(text.startswith("reference: ") and pack in text for text in report["problems"])


@pytest.mark.parametrize("lost", ["every entry", "all but the first", "the folder", "what is in each"])
def test_I10_a_log_that_has_lost_its_checkpoints_is_named_and_nothing_starts_afresh(interrupted: Path, tmp_path: Path, lost: str) -> None:
    directory = tmp_path / "run"
    shutil.copytree(interrupted, directory)
    log = directory / "runs" / "main" / "log"
    for path in sorted(log.iterdir())[lost == "all but the first" :]:
        path.write_bytes(b"") if lost == "what is in each" else path.unlink()
    if lost == "the folder":
        shutil.rmtree(directory / "runs")
    before = {path: raw for path, raw in tiny_run.files_of(directory).items() if path != "writer.json"}
    assert not unbroken.open(directory).verify().ok
    with pytest.raises(
        unbroken.NoCheckpoint, match=r"has made checkpoints such as manifests/.*, but its log has lost their entries: restore"
    ):
        train(directory, 6)
    end_daemon(directory)
    assert {path: raw for path, raw in tiny_run.files_of(directory).items() if path != "writer.json"} == before
