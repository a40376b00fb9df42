"""Which tier a URL or path means: a folder, or a place in an object store. What might hold a secret is refused, and never repeated."""

from __future__ import annotations

import os
import urllib.parse

from unbroken.core.ports import Tier
from unbroken.store.tiers.disk import DiskTier, local_path
from unbroken.store.tiers.retry import RetryTier

OBJECT_SCHEMES = ("s3", "gs", "az")
RETRY_S = 30.0
"""Calls of an object store that fail for a while are made again for so long, beyond what its client does by itself."""


def scheme_of(url: str | os.PathLike[str]) -> str:
    """The scheme of a URL, "" for a path."""
    scheme, separator, _ = os.fspath(url).partition("://")
    return scheme.lower() if separator else ""


def is_object(url: str | os.PathLike[str]) -> bool:
    """Does it name a place in an object store?"""
    return scheme_of(url) in OBJECT_SCHEMES


def shown(url: object) -> str:
    """A URL as it may be shown: without user, password, query and fragment. Text that cannot be taken apart is not shown at all."""
    try:
        text = os.fspath(url)  # type: ignore[call-overload]
        scheme, separator, rest = text.partition("://")
    except (TypeError, AttributeError):
        return repr(url)[:100]
    if not separator:
        return repr(text)
    bare = rest.partition("?")[0].partition("#")[0]
    host, slash, path = bare.partition("/")
    kept = f"***@{host.rpartition('@')[2]}" if "@" in host else host
    return repr(f"{scheme}://{kept}{slash}{path}{'?***' if bare != rest else ''}")


def check_place(value: object) -> str:
    """The URL of a copy as it is used: s3://bucket/prefix and the like, or file:///folder. ValueError with the remedy alone."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError('give a URL such as "s3://bucket/run" or "file:///other/disk/run"')
    url = os.fspath(value)
    if not isinstance(url, str):
        raise ValueError("give a URL as text, not as bytes")
    scheme = scheme_of(url)
    if scheme in OBJECT_SCHEMES:
        parts = urllib.parse.urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment or "?" in url or "#" in url:
            raise ValueError("it holds a key, a token or a query, which would be seen in logs: give credentials by the environment")
        if not parts.netloc or not parts.path.strip("/"):
            raise ValueError(f"name bucket and prefix: {scheme}://bucket/run")
        return url.rstrip("/")
    if scheme not in ("", "file"):
        raise ValueError(
            'only s3://, gs://, az:// and file:///folder exist: give one such as "s3://bucket/run" or "file:///other/disk/run"'
        )
    path = _folder(url)
    if not os.path.isabs(path):
        raise ValueError("a relative path means another folder in each working directory: give file:///folder")
    return "file://" + urllib.parse.quote(os.path.normpath(path))


def tier_at(url: str | os.PathLike[str], retry_s: float = RETRY_S) -> Tier:
    """The tier of a path, file:// URL, or place in an object store, which is tried again for `retry_s`. Nothing is made or asked yet.

    ValueError for a URL that is none, and for secrets in it; MissingExtra where an object store needs what is not installed.
    """
    if not is_object(url):
        if scheme_of(url) not in ("", "file"):
            raise ValueError(f"{shown(url)}: a folder's path, file:///path, s3://, gs:// or az://")
        return DiskTier(_folder(url))
    from unbroken.store.tiers.object import ObjectTier

    return RetryTier(ObjectTier(check_place(url)), total_s=retry_s)


def _folder(url: str | os.PathLike[str]) -> str:
    if scheme_of(url) == "file" and "@" in urllib.parse.urlsplit(os.fspath(url)).netloc:
        raise ValueError("file:///folder takes neither a user nor a password")
    return local_path(url)


def name_of(tier: Tier) -> str:
    """How a person calls the place: a folder's path, or a URL."""
    return str(getattr(tier, "root", None) or getattr(tier, "url", None) or tier)
