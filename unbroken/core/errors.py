"""Every error a user can meet, in one tree, with its exit code.

    UnbrokenError                    exit 1
    ├── CheckFailed                  exit 1   a verification found a problem; the object is named
    │   └── Damaged                  exit 1   bytes that do not match their checksum, or are cut short
    ├── NoCheckpoint                 exit 3   a checkpoint had to be there and none is usable
    ├── Refused                      exit 4   going on would do harm
    │   ├── Fenced                   exit 4   a newer generation exists, or another writer holds the run
    │   ├── NewerFormat              exit 4   written by a newer version
    │   ├── ForeignFolder            exit 4   not a folder of ours
    │   └── LayoutMismatch           exit 4   stored state cannot be mapped onto the live one
    ├── GaveUp                       exit 5   restart budget, same-step rule, or anomalies without end
    ├── SaveFailed                   exit 1   a save did not become durable (also an OSError when the disk said so)
    └── StoreError                            what a tier says
        ├── Permanent                         trying again cannot help
        └── Transient                         trying again may help

    warnings (UserWarning): training goes on, and the claim or what is kept is less than one may think
    ├── SaveWarning                           an automatic save failed or could not start
    ├── AnomalyWarning                        a step was not applied, or the run went back, because of its numbers
    ├── EnvironmentChanged                    a compared fact is not as it was at the checkpoint
    └── CheckpointWarning                     stored checkpoints were passed over, or a folder was taken over

    StepLost (RuntimeError)                   this process must end; the launcher starts all ranks again

A user's mistake is a ValueError or TypeError that carries its remedy; a bug of ours is an AssertionError.
"""

from __future__ import annotations

from unbroken.core.limits import MAX_DESCRIPTION_CHARS


class UnbrokenError(Exception):
    """Root of the tree. `exit_code` is what a command returns when this error ends it."""

    exit_code = 1


class CheckFailed(UnbrokenError):
    """A verification found a problem."""


class Unsound(CheckFailed):
    """A state that must not become a checkpoint; `faults` says why, by piece."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults

    def __reduce__(self) -> tuple[type[Unsound], tuple[list[str]]]:
        return type(self), (self.faults,)


class Damaged(CheckFailed):
    """Stored bytes do not match what was written. `path` names the object, `reason` what is wrong with it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[Damaged], tuple[str, str]]:
        return type(self), (self.path, self.reason)  # other libraries send errors from rank to rank


class NoCheckpoint(UnbrokenError):
    """No usable checkpoint where one must be. Lists the candidates and why each was passed over."""

    exit_code = 3


class Refused(UnbrokenError):
    """Going on would do harm; the text says what to do instead."""

    exit_code = 4


class Fenced(Refused):
    """Another writer holds the run, or a newer generation has been opened."""


class NewerFormat(Refused):
    """The file was written by a newer version of unbroken than this one can read."""


class ForeignFolder(Refused):
    """The folder holds files, but not a run of ours."""


class LayoutMismatch(Refused):
    """Stored state and live state do not fit. `missing`, `unexpected` and `mismatched` list every difference."""

    def __init__(
        self,
        text: str,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.missing = missing
        self.unexpected = unexpected
        self.mismatched = mismatched


class GaveUp(UnbrokenError):
    """The restart budget is used up, the same step failed too often, or too many steps in a row were not finite."""

    exit_code = 5


class SaveFailed(UnbrokenError):
    """A save did not become durable. The cause is chained; older checkpoints are untouched."""


class StoreError(UnbrokenError):
    """A tier could not do what it was asked."""


class Permanent(StoreError):
    """Trying again cannot help."""


class Transient(StoreError):
    """Trying again may help."""


class MissingExtra(ImportError):
    """An optional dependency is not installed; the text names the extra."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"this needs {package}: pip install 'unbroken[{extra}]'")
        self._names = package, extra

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), self._names


class StepLost(RuntimeError):
    """A collective failed and not every rank is still at the step's beginning: this process must end, the launcher restarts all."""


class SaveWarning(UserWarning):
    """An automatic save failed or could not start; training went on and older checkpoints are untouched."""


class AnomalyWarning(UserWarning):
    """A step was not applied, or the run went back to an earlier checkpoint, because numbers were not finite or the loss a spike."""


class EnvironmentChanged(UserWarning):
    """A compared fact (version, thread count, kernel setting, structure) is not what it was when the checkpoint was written."""


class CheckpointWarning(UserWarning):
    """Something about stored checkpoints that did not stop the call but should be known."""


def describe(error: BaseException) -> str:
    """Type and words of an error and of what caused it, as far as they fit."""
    text = f"{type(error).__name__}: {error}"[:MAX_DESCRIPTION_CHARS]
    cause = error.__cause__
    known = cause is None or str(cause)[:MAX_DESCRIPTION_CHARS] in text
    return text if known else f"{text} (caused by {type(cause).__name__}: {str(cause)[:MAX_DESCRIPTION_CHARS]})"
