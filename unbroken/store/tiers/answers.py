"""What an object store's answers mean: absence, presence, Permanent with a remedy, or Transient. No secret is repeated."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from unbroken.core.errors import Permanent, Transient

ANSWERS = (BaseError, OSError, NotImplementedError, ValueError, RuntimeError)
"""Everything that a call of obstore raises."""

_MAX_CHARS = 600
_MIN_SECRET_CHARS = 4
_PASSING = frozenset({"408", "429", "500", "502", "503", "504", "RequestTimeout", "SlowDown", "InternalError", "IncompleteBody"})
_METADATA_HOST = "169.254.169.254"
"""Where the client asks for the role of an instance when it has no keys."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"\(code: (\w+)\)|<Code>(\w+)</Code>")
_SIGNED = re.compile(r"(?i)((?:signature|sig|x-amz-security-token|x-amz-credential|authorization)[=:]\s?)[^&\s<>\"']+")
_TAGGED = re.compile(r"(?s)<(AWSAccessKeyId|StringToSign\w*|SignatureProvided|CanonicalRequest\w*)>.*?(</\1>|$)")

_REMEDIES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"404", "NoSuchBucket"}), "the bucket does not exist: make it, or correct the URL"),
    (
        frozenset({"401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}),
        "the credentials are not valid there: check the keys or the role, the endpoint and the clock of this host",
    ),
    (
        frozenset({"403", "AccessDenied"}),
        "the credentials may not do this: allow reading, writing, listing and deleting of objects in this bucket",
    ),
    (frozenset({"301", "307", "PermanentRedirect"}), "the bucket lies in another region: set AWS_REGION"),
    (frozenset({"400", "405", "501"}), "the server does not take this request: check endpoint and region, or use another server"),
)


class Secrets:
    """What must not be said. Values are only added."""

    def __init__(self, values: Iterable[str | None] = ()) -> None:
        self._values: set[str] = set()
        self.add(values)

    def add(self, values: Iterable[str | None]) -> None:
        """Remember; what is too short to be a secret would only garble words."""
        self._values |= {value for value in values if value and len(value) >= _MIN_SECRET_CHARS}

    def without(self, text: str) -> str:
        """The text, with every secret and signature replaced, and cut to what a person reads."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, "***")
        text = _TAGGED.sub(r"<\1>***</\1>", _SIGNED.sub(r"\1***", text.partition("\n\nDebug source")[0]))
        return " ".join(text.split())[:_MAX_CHARS]


def explained(path: str, error: BaseException, secrets: Secrets) -> Exception:
    """What to raise instead of `error`, with a copy of it that names no secret as its cause."""
    text = secrets.without(str(error))
    result = _meaning(path, error, str(error), text)
    result.__cause__ = _copy(error, text)
    return result


def _meaning(path: str, error: BaseException, raw: str, text: str) -> Exception:
    codes = _codes(raw)
    if isinstance(error, (AlreadyExistsError, PreconditionError)):
        return FileExistsError(errno.EEXIST, "already there", path)
    if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in codes:
        return FileNotFoundError(errno.ENOENT, "not there", path)
    remedy = _remedy(error, codes, raw)
    return Permanent(f"{path or 'the store'}: {remedy} ({text})") if remedy else Transient(f"{path or 'the store'}: {text}")


def _codes(raw: str) -> set[str]:
    """Status and code in the words of a refusal: obstore has no fields for them, and LIST and bulk DELETE no types of error."""
    return {*_STATUS.findall(raw), *(code for pair in _CODE.findall(raw) for code in pair if code)}


def _remedy(error: BaseException, codes: set[str], raw: str) -> str:
    if isinstance(error, UnauthenticatedError) or (_METADATA_HOST in raw and codes & {"400", "401", "403", "404"}):
        return "no valid credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give a role or a provider of credentials"
    for known, remedy in _REMEDIES:
        if codes & known and not codes & _PASSING:
            return remedy
    if isinstance(error, PermissionDeniedError):
        return "the credentials may not do this: allow reading, writing, listing and deleting of objects in this bucket"
    if isinstance(error, (NotSupportedError, NotImplementedError)):
        return "this kind of store cannot do that: use another one"
    if isinstance(error, (InvalidPathError, UnknownConfigurationKeyError, ValueError)):
        return "not accepted: correct the name or the setting"
    if "builder error" in raw:
        return "the endpoint cannot be asked like this: http:// is used only where the endpoint itself says http://"
    return ""


def _copy(error: BaseException, text: str) -> BaseException:
    if isinstance(error, OSError):
        return type(error)(error.errno, text) if error.errno else type(error)(text)
    return type(error)(text) if isinstance(error, BaseError) else RuntimeError(f"{type(error).__name__}: {text}")
