"""Messages between trainers, launcher and the node daemon: one tagged record per datagram on a local socket.

Life of a connection: `Hello` -> `Welcome`; a trainer then asks `Begin` (rank 0) and every rank loads what the `Plan` says; rank 0
reports `Bad` (-> another `Plan`) or `Opened` (-> `Opened` echoed to it). `NeedSlots` -> `Slots` with descriptors,
`Watch` -> `Watched` with one. `Ready` has no answer: its fate arrives as `Committed` or `Failed` to all trainers. `Refused` -> `Verdict`
once all members have spoken.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from unbroken.core.limits import KEEP_NEWEST
from unbroken.core.records import Generation, Keep, ManifestRef, Record


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """First message. `role` "worker" has a rank; "launcher" keeps the daemon alive over restarts; "observer" only asks `Status`.

    `keeper_pid` (0: none) is a process whose life keeps the daemon alive too: the elastic agent that will restart this worker.
    """

    role: Literal["worker", "launcher", "observer"]
    pid: int
    rank: int = 0
    world_size: int = 1
    keeper_pid: int = 0


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """The daemon's pid and the folder it writes."""

    pid: int
    directory: str


class Rules(Struct, frozen=True, kw_only=True):
    """How the daemon keeps a run. `allow_nonfinite`: snapshots that hold NaN may become checkpoints. `keep`: which of them stay (None: as
    said at the run's birth). With `full_steps` or `full_s` checkpoints are stored as differences from the one before, and whole when one
    that is has become so many steps or seconds old. `scrub_s`: so often all that is stored is read again.

    `copy_to`: the URL of a second tier ("" for none) that checkpoints are copied to, after so many steps or seconds (with neither: all of
    them, as far as it keeps up); `copy_keep` of them stay there besides milestones.
    """

    allow_nonfinite: bool = False
    keep: Keep | None = None
    full_steps: int | None = None
    full_s: float | None = None
    scrub_s: float | None = None
    copy_to: str = ""
    copy_steps: int | None = None
    copy_s: float | None = None
    copy_keep: int = KEEP_NEWEST


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """Rank 0: choose where to start. `options` are birth facts, written to run.json if the run is new, else returned as stored.

    `at_most`: no step beyond this one will do. `from_copy`: look into the copy, too, for a newer checkpoint than the folder has.
    """

    world_size: int
    resume: Literal["auto", "must", "never"]
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    restart_count: int = 0
    at_most: int | None = None
    from_copy: bool = False
    rules: Rules = Rules()


class SlotSource(Struct, frozen=True, kw_only=True):
    """A READY slot: the rank that froze it and its number among that rank's slots."""

    rank: int
    slot: int


class Plan(Struct, frozen=True, kw_only=True, tag="plan"):
    """Where every rank loads from. `source` "fresh" means nothing to load; "memory" uses `slots`, "disk" uses `manifests`.

    `last_step` is the newest step that the parent generation's journal holds: the one after it was lost in flight.
    """

    generation: int
    step: int
    source: Literal["fresh", "memory", "disk"]
    stored_generation: int = 0
    state_root: str = ""
    slots: tuple[SlotSource, ...] = ()
    manifests: tuple[ManifestRef, ...] = ()
    stored_world_size: int = 0
    last_step: int = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    run_id: str = ""
    notes: tuple[str, ...] = ()


class Wait(Struct, frozen=True, kw_only=True, tag="wait"):
    """The answer takes longer; it comes by itself. `text` says what is being done."""

    text: str


class Bad(Struct, frozen=True, kw_only=True, tag="bad"):
    """Rank 0: the planned source did not verify; condemn `objects` and plan again."""

    step: int
    stored_generation: int
    objects: tuple[str, ...]
    reason: str


class Opened(Struct, frozen=True, kw_only=True, tag="opened"):
    """Rank 0: every rank stands at the plan's step with `loaded_root`. The daemon writes the generation entry, then echoes this.

    `origin`: of a fresh run, where its first state came from (`start_from`), {} for nowhere; a fact of birth.
    """

    generation: int
    step: int
    loaded_root: str
    differences: tuple[str, ...] = ()
    origin: dict[str, Any] = msgspec.field(default_factory=dict)
    entry: Generation | None = None


class NeedSlots(Struct, frozen=True, kw_only=True, tag="need_slots"):
    """This rank wants `num` slots of at least `size_bytes` each (header, index and data)."""

    size_bytes: int
    num: int


class OldSlots(Struct, frozen=True, kw_only=True, tag="old_slots"):
    """This rank wants to read the named slots (descriptors follow in a `Slots`, same order)."""

    slots: tuple[SlotSource, ...]


class Slots(Struct, frozen=True, kw_only=True, tag="slots"):
    """Descriptors of memory slots travel beside this message, `sizes` in the same order."""

    sizes: tuple[int, ...]


class Watch(Struct, frozen=True, kw_only=True, tag="watch"):
    """This rank's loop wants to be watched. `timeout_s` None: a hang is known by what the run's own steps took.

    `aloud`: no launcher of ours will tell the user, so a hang is also written to this process's standard error.
    """

    timeout_s: float | None = None
    aloud: bool = False


class Watched(Struct, frozen=True, kw_only=True, tag="watched"):
    """The descriptor of the rank's page travels beside this message."""


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """This rank's slot is whole."""

    generation: int
    step: int
    rank: int
    slot: int
    milestone: bool = False


class Journal(Struct, frozen=True, kw_only=True, tag="journal"):
    """Rank 0: append these records, in order. Made durable before the next commit."""

    generation: int
    records: tuple[Record, ...]


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """This rank's attempt at `step` failed and nothing of it was applied here."""

    generation: int
    step: int
    attempt: int
    rank: int
    reason: str


class Verdict(Struct, frozen=True, kw_only=True, tag="verdict"):
    """`retry`: every member refused this attempt, do it again as `attempt`; else leave the process, the launcher restarts all."""

    retry: bool
    attempt: int
    reason: str


class Leaving(Struct, frozen=True, kw_only=True, tag="leaving"):
    """This rank ends because of an error, which the others are told when they miss it."""

    text: str


class Committed(Struct, frozen=True, kw_only=True, tag="committed"):
    """The checkpoint (step, generation) is visible and durable."""

    step: int
    generation: int
    state_root: str
    seconds: float
    milestone: bool = False


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """A snapshot will not become a checkpoint; training goes on. `text` keeps the cause's type and words.

    `superseded`: nothing went wrong, a newer snapshot overtook it while it was in memory only. `poisoned`: it holds NaN or infinities.
    """

    step: int
    generation: int
    text: str
    milestone: bool = False
    superseded: bool = False
    poisoned: bool = False


class DamageFound(Struct, frozen=True, kw_only=True, tag="damage_found"):
    """Something that stored checkpoints need is damaged; training goes on."""

    text: str


class Status(Struct, frozen=True, kw_only=True, tag="status"):
    """Ask for a picture of the daemon. `ends`: a worker's run has ended, so that its newest checkpoint is to be copied now."""

    ends: bool = False


class StatusReply(Struct, frozen=True, kw_only=True, tag="status_reply"):
    """`phase` is "idle" or "draining"; `facts` are for people and tests."""

    phase: str
    facts: dict[str, Any]


class Note(Struct, frozen=True, kw_only=True, tag="note"):
    """Launcher or trainer: an event with moments on the monotonic clock, to be merged into the journal of the next generation."""

    name: str
    at: dict[str, float]
    facts: dict[str, Any] = msgspec.field(default_factory=dict)


class Error(Struct, frozen=True, kw_only=True, tag="error"):
    """The daemon refuses; `code` is an exit code, `kind` the error class's name."""

    kind: str
    text: str
    code: int


class Bye(Struct, frozen=True, kw_only=True, tag="bye"):
    """This client ends on purpose."""


Message = (
    Hello
    | Welcome
    | Begin
    | Plan
    | Wait
    | Bad
    | Opened
    | NeedSlots
    | OldSlots
    | Slots
    | Watch
    | Watched
    | Ready
    | Journal
    | Refuse
    | Verdict
    | Leaving
    | Committed
    | Failed
    | DamageFound
    | Status
    | StatusReply
    | Note
    | Error
    | Bye
)
