"""Which bucket a URL names, and with whose credentials: options, environment, a provider, or the role of the instance. Secrets stay here.

s3://bucket/prefix, gs://bucket/prefix, az://container/prefix; for tests file:///folder (nothing is fsynced) and memory://name.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from unbroken.core.ports import environment
from unbroken.store.tiers.answers import Secrets

Credentials = Callable[[], Mapping[str, Any]]
"""Gives what obstore's providers give: for S3 access_key_id, secret_access_key, token, expires_at (with a time zone, None for never)."""

SCHEMES = ("s3", "gs", "az", "file", "memory")
REFRESH_S = 60.0
"""Credentials are asked for again so long before they expire: the longest call must end with those it began with."""

_SECRET_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
)
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_memories: dict[str, MemoryStore] = {}


@dataclass(frozen=True)
class Place:
    """A place in an object store. Nothing of it that is shown holds a secret."""

    url: str
    scheme: str
    prefix: str
    endpoint: str | None = None
    credentials: Credentials | None = field(default=None, repr=False)
    secrets: Secrets = field(default_factory=Secrets, repr=False, compare=False)

    def opened(self, *, timeout_s: float, retry_s: float) -> Any:
        """A store of obstore that waits `timeout_s` for an answer, and asks again for up to `retry_s` (0: never). Any: obstore's union."""
        if self.scheme == "memory":
            return _memories.setdefault(self.url, MemoryStore())
        if self.scheme == "file":
            return LocalStore(urllib.parse.unquote(urllib.parse.urlsplit(self.url).path), mkdir=True)
        options = {
            "client_options": {
                "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
                "read_timeout": timedelta(seconds=timeout_s),
                "timeout": timedelta(hours=1),  # of a whole transfer: one that goes on is not given up, one that stands still is
                "allow_http": self.endpoint is not None and self.endpoint.startswith("http://"),
            },
            "retry_config": {
                "max_retries": 10 if retry_s else 0,
                "retry_timeout": timedelta(seconds=retry_s),
                "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
            },
        }
        if self.credentials is not None:
            options["credential_provider"] = self.credentials
        if self.endpoint is not None:
            options["endpoint"] = self.endpoint
        kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[self.scheme]
        return kind.from_url(self.url, **options)


def place_of(url: str, endpoint: str | None = None, credentials: Credentials | None = None) -> Place:
    """The place that a URL names. ValueError, with what to do, for what is none and for secrets in a URL; they are not repeated."""
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ValueError(f"not the URL of an object store: it starts with one of {', '.join(f'{name}://' for name in SCHEMES)}")
    parts = _without_secrets(url, "the URL")
    if scheme in ("s3", "gs", "az") and not parts.netloc:
        raise ValueError(f"{url!r}: name the bucket: {scheme}://bucket/prefix")
    if scheme == "s3" and endpoint is None:
        endpoint = next(filter(None, map(environment, _ENDPOINT_VARIABLES)), None)
    if endpoint is not None:
        endpoint = _endpoint(endpoint, scheme)
    secrets = Secrets(map(environment, _SECRET_VARIABLES))
    if credentials is None and scheme == "s3":
        credentials = _profile()
    asked = None if credentials is None else _Provider(credentials, secrets)
    prefix = urllib.parse.unquote(parts.path).strip("/") if scheme in ("s3", "gs", "az") else ""
    return Place(url.rstrip("/"), scheme, prefix, endpoint, asked, secrets)


def _without_secrets(url: str, what: str) -> urllib.parse.SplitResult:
    parts = urllib.parse.urlsplit(url)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{what} holds a key, a token or a query, which would be seen in logs: give credentials by the environment")
    return parts


def _endpoint(endpoint: str, scheme: str) -> str:
    parts = _without_secrets(endpoint, "the endpoint")
    if scheme not in ("s3", "az"):
        raise ValueError("an endpoint is for s3:// and az:// only: leave it away")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{endpoint!r}: an endpoint is https://host, or http://host for one that has no encryption")
    return endpoint.rstrip("/")


def _profile() -> Credentials | None:
    """Credentials of AWS_PROFILE, unless keys in the environment come first, as everywhere."""
    if not environment("AWS_PROFILE") or environment("AWS_ACCESS_KEY_ID"):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ValueError(
            "AWS_PROFILE is set, and reading profiles needs boto3: pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ) from error
    provider: Credentials = Boto3CredentialProvider()
    return provider


class _Provider:
    """A user's source of credentials. obstore asks when the last ones have expired, so the time it is told is earlier than the real one."""

    def __init__(self, ask: Credentials, secrets: Secrets) -> None:
        self._ask = ask
        self._secrets = secrets
        self.config = getattr(ask, "config", {})  # obstore takes the region of a boto3 session from here

    def __call__(self) -> dict[str, Any]:
        failed = ""
        try:
            found = dict(self._ask())
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything, and its words may hold a secret: only the kind is told
            failed = type(error).__name__
        if failed:
            raise RuntimeError(f"the provider of credentials raised {failed}")
        self._secrets.add(value for value in found.values() if isinstance(value, str))
        expires_at = found.get("expires_at")
        if isinstance(expires_at, datetime):
            found["expires_at"] = expires_at - timedelta(seconds=REFRESH_S)
        return found
