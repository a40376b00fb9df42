"""The object tier beyond the common contract, on a real S3 server: lost answers, dead servers, large objects, secrets, refusals."""

from __future__ import annotations

import hashlib
import logging
import random
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from tests.rigs.lossy_proxy import LossyProxy, lossy_proxy
from unbroken.core.errors import MissingExtra, Permanent, StoreError, Transient
from unbroken.core.ports import SystemNonces
from unbroken.store.tiers.traits import traits_of

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'unbroken[object]'")

import obstore

from tests.rigs.s3_server import S3Server
from unbroken.store.tiers import object as object_tier
from unbroken.store.tiers.object import ObjectTier
from unbroken.store.tiers.places import place_of

ROOT = Path(__file__).resolve().parents[3]
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture
def url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """An unused place, with the keys in the environment."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3.place()


@pytest.fixture
def proxy(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyProxy]:
    with lossy_proxy(s3.endpoint) as found:
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.endpoint)
        yield found


def in_memory() -> ObjectTier:
    return ObjectTier(f"memory://{SystemNonces().nonce()}")


def whole_text(error: BaseException | None) -> str:
    """Everything that a traceback, a log or a debugger would show of an error."""
    if error is None:
        return ""
    shown = "".join(traceback.format_exception(error)) + repr(error) + str(vars(error))
    return shown + whole_text(error.__cause__) + whole_text(error.__context__)


# -- answers that are lost ----------------------------------------------------------------------------------------------------


def test_a_create_whose_answer_is_lost_is_found_to_be_ours(url: str, proxy: LossyProxy) -> None:
    tier = ObjectTier(url)
    proxy.lose = 1
    assert tier.create("log/1", [b"mine"]) == 4
    assert len(proxy.lost) == 1
    assert tier.read("log/1") == b"mine"


def test_B12_after_a_lost_answer_an_equal_object_of_another_is_not_taken_for_ours(s3: S3Server, url: str, proxy: LossyProxy) -> None:
    ObjectTier(url, endpoint=s3.endpoint).create("log/1", [b"equal"])
    proxy.lose = 1
    with pytest.raises(FileExistsError):
        ObjectTier(url).create("log/1", [b"equal"])
    assert len(proxy.lost) == 1


def test_an_append_whose_answer_is_lost_is_there_once(url: str, proxy: LossyProxy) -> None:
    tier = ObjectTier(url)
    tier.append("j", b"one\n")
    proxy.lose = 1
    tier.append("j", b"two\n")
    tier.append("j", b"three\n")
    assert len(proxy.lost) == 1
    assert tier.read("j") == b"one\ntwo\nthree\n"


def test_an_append_that_was_given_up_and_arrived_later_is_not_there_twice(url: str, proxy: LossyProxy) -> None:
    tier = ObjectTier(url, timeout_s=3)
    tier.append("j", b"one\n")
    proxy.lose = 1000
    with pytest.raises(Transient):
        tier.append("j", b"two\n")
    proxy.lose = 0
    tier._sizes["j"] = (4,)  # as it was looked up before the lost request arrived
    known = tier._part_sizes
    tier._part_sizes = lambda path: (4,)  # type: ignore[method-assign]
    tier.append("j", b"two\n")
    tier._part_sizes = known  # type: ignore[method-assign]
    assert ObjectTier(url).read("j") == b"one\ntwo\n"


def test_a_large_upload_whose_last_answer_is_lost_is_found_to_be_ours(url: str, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_tier, "CONDITIONAL_BYTES", 1 << 20)
    data = random.Random(1).randbytes(20 << 20)
    proxy.method, proxy.lose = b"POST", 0
    tier = ObjectTier(url, timeout_s=6)
    real = tier._bucket._mark_of
    asked = []
    monkeypatch.setattr(tier._bucket, "_mark_of", lambda path: asked.append(path) or real(path))

    def parts() -> Iterator[bytes]:
        yield data[: 12 << 20]
        proxy.lose = 1000  # the upload has begun: the only POST to come is the one that completes it
        yield data[12 << 20 :]

    uploaded = []
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(lambda: uploaded.append(tier.create("packs/a", parts())))
        done.result(timeout=100)
    assert uploaded == [len(data)]
    assert proxy.lost
    assert tier.read("packs/a") == data


# -- servers that do not answer -----------------------------------------------------------------------------------------------


def test_I11_a_server_that_says_nothing_is_transient_in_bounded_time(s3: S3Server, url: str) -> None:
    tier = ObjectTier(url, timeout_s=3)
    tier.create("a", [b"x"])
    calls: list[Callable[[], object]] = [
        lambda: tier.create("b", [b"x"]),
        lambda: tier.read("a"),
        lambda: tier.read("a", 0, 1),
        lambda: tier.list(""),
        lambda: tier.create("c", [b"x" * (1 << 20)] * 20),
    ]
    with s3.stopped():
        for call in calls:
            start = time.monotonic()
            with pytest.raises(Transient):
                call()
            assert time.monotonic() - start < 6
    assert tier.read("a") == b"x"


def test_I11_a_server_that_is_not_there_is_transient_in_bounded_time(url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    tier = ObjectTier(url, endpoint=f"http://127.0.0.1:{port}", timeout_s=3)
    for call in (lambda: tier.create("b", [b"x"]), lambda: tier.read("a"), lambda: tier.append("j", b"x")):
        start = time.monotonic()
        with pytest.raises(Transient):
            call()
        assert time.monotonic() - start < 6


# -- large objects ------------------------------------------------------------------------------------------------------------

UPLOAD = """
import hashlib, re, sys
from unbroken.store.tiers.object import ObjectTier
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10
tier, seen = ObjectTier(sys.argv[1]), hashlib.sha256()
def parts():
    for i in range(48):
        block = bytes([i]) * (4 << 20) + b"odd"
        seen.update(block)
        yield memoryview(block)
tier.create("warm", [b"x" * 1000])
before = status("VmRSS")
size = tier.create("packs/large", parts())
print(size, seen.hexdigest(), status("VmHWM") - before)
"""


def test_a_large_object_is_streamed_in_bounded_memory_and_whole(url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", UPLOAD, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    size, digest, grown_mb = done.stdout.split()
    tier = ObjectTier(url)
    assert tier.size("packs/large") == int(size) == 48 * ((4 << 20) + 3)
    seen = hashlib.sha256()
    for offset in range(0, int(size), 16 << 20):
        seen.update(tier.read("packs/large", offset, 16 << 20))
    assert seen.hexdigest() == digest
    assert int(grown_mb) < 110, f"{grown_mb} MB more for an upload of {int(size) >> 20} MB"


def test_a_large_object_is_not_put_over_one_that_is_there(url: str) -> None:
    tier = ObjectTier(url)
    tier.create("packs/a", [b"first"])
    with pytest.raises(FileExistsError):
        tier.create("packs/a", [bytes(1 << 20)] * 20)
    assert tier.read("packs/a") == b"first"


def test_I1_a_large_create_that_fails_on_the_way_leaves_nothing(url: str) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(30):
            yield bytes(1 << 20)
        raise KeyError("the source broke")

    tier = ObjectTier(url)
    with pytest.raises(KeyError, match="the source broke"):
        tier.create("packs/a", parts())
    assert tier.list("") == []


def test_more_objects_than_a_page_are_listed(url: str) -> None:
    tier = ObjectTier(url)
    paths = [f"p/{i % 7}/{i:05d}" for i in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda path: tier.create(path, [b""]), paths))
    assert tier.list("p") == sorted(paths)
    assert tier.folders("p") == [str(i) for i in range(7)]


# -- appended objects ---------------------------------------------------------------------------------------------------------


def test_parts_that_a_lagging_listing_does_not_name_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = in_memory()
    for i in range(10):
        tier.append("j", b"%d" % i)
    reader = ObjectTier(tier.url)
    real = reader._bucket.list
    monkeypatch.setattr(reader._bucket, "list", lambda prefix: [entry for entry in real(prefix) if entry[0][-1] in "0125"])
    assert reader.read("j") == b"0123456789"
    assert reader.size("j") == 10
    reader.append("j", b"x")
    assert ObjectTier(tier.url).read("j") == b"0123456789x"
    reader.delete("j")
    assert list(real("")) == []


def test_I6_a_second_writer_gets_an_error_and_replaces_nothing() -> None:
    first = in_memory()
    first.append("j", b"one\n")
    second = ObjectTier(first.url)
    second.append("j", b"two\n")
    sizes = first._part_sizes
    first._part_sizes = lambda path: first._sizes.get(path, (4,))  # type: ignore[method-assign] # its look came before the other's part
    with pytest.raises(Permanent, match="another writer adds to it"):
        first.append("j", b"TWO\n")
    first._part_sizes = sizes  # type: ignore[method-assign]
    assert second.read("j") == b"one\ntwo\n"
    first.append("j", b"three\n")
    assert second.read("j") == b"one\ntwo\nthree\n"


def test_I3_a_missing_part_is_said_and_not_passed_over() -> None:
    tier = in_memory()
    for data in (b"one\n", b"two\n", b"three\n"):
        tier.append("runs/j", data)
    tier._bucket.delete("runs/.parts-j/00000001")
    for act in (lambda: ObjectTier(tier.url).read("runs/j"), lambda: ObjectTier(tier.url).size("runs/j")):
        with pytest.raises(Permanent, match="part 1 is missing"):
            act()
    ObjectTier(tier.url).delete("runs/j")
    assert list(tier._bucket.list("")) == []


def test_a_long_append_is_all_or_nothing_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_tier, "CONDITIONAL_BYTES", 10)
    tier = in_memory()
    tier.append("j", bytes(range(35)))
    assert tier.read("j", 5, 20) == bytes(range(5, 25))
    real = tier._bucket.put_new

    def put_new(path: str, data: bytes, mark: str) -> None:
        if path.endswith("6"):
            raise Transient("no")
        real(path, data, mark)

    monkeypatch.setattr(tier._bucket, "put_new", put_new)
    with pytest.raises(Transient):
        tier.append("j", bytes(35))
    assert ObjectTier(tier.url).read("j") == bytes(range(35))


def test_what_was_made_whole_is_not_added_to() -> None:
    tier = in_memory()
    tier.create("a", [b"whole"])
    with pytest.raises(Permanent, match="made whole"):
        tier.append("a", b"more")
    assert tier.read("a") == b"whole"


@pytest.mark.parametrize("path", [".parts-j/00000000", "runs/.parts-j/00000000", "runs/.parts-j"])
def test_parts_are_nobody_elses_names(path: str) -> None:
    tier = in_memory()
    tier.append("runs/j", b"x")
    for act in (lambda: tier.read(path), lambda: tier.create(path, [b"x"]), lambda: tier.delete(path), lambda: tier.list(path)):
        with pytest.raises(Permanent, match="not a path inside"):
            act()


def test_a_name_too_long_for_an_object_store_is_refused_before_it_is_sent() -> None:
    with pytest.raises(Permanent, match="1024 bytes"):
        in_memory().create("n" * 1020, [b"x"])


# -- refusals in words --------------------------------------------------------------------------------------------------------


def refusals(tier: ObjectTier) -> list[StoreError]:
    """What every call says; those that succeed or find nothing are passed over."""
    found: list[StoreError] = []
    calls: list[Callable[[], object]] = [
        lambda: tier.create("a", [b"x"]),
        lambda: tier.create("b", [bytes(1 << 20)] * 17),
        lambda: tier.append("j", b"x"),
        lambda: tier.read("there"),
        lambda: tier.read("there", 1, 1),
        lambda: tier.list("p"),
        lambda: tier.folders("p"),
        lambda: tier.delete("there"),
    ]
    for call in calls:
        try:
            call()
        except FileNotFoundError:
            pass
        except StoreError as error:
            found.append(error)
    return found


def test_who_may_only_read_gets_a_permanent_error_with_the_remedy(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ObjectTier(url).create("there", [b"x"])
    for name, value in s3.environment(reader=True).items():
        monkeypatch.setenv(name, value)
    tier = ObjectTier(url)
    assert tier.read("there") == b"x"
    found = refusals(tier)
    assert [type(error) for error in found] == [Permanent] * 4
    assert all("the credentials may not do this: allow" in str(error) for error in found)


def test_wrong_keys_are_permanent_and_no_secret_is_told(
    s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "FwoGZXIvYXdzEXAMPLETOKEN")
    with caplog.at_level(logging.DEBUG):
        tier = ObjectTier(url)
        found = refusals(tier)
    assert len(found) >= 6
    assert all(isinstance(error, Permanent) for error in found)
    output = capfd.readouterr()
    shown = "".join(map(whole_text, found)) + "".join(map(repr, (tier, tier._bucket, tier._bucket.place)))
    shown += caplog.text + output.out + output.err + Path("/proc/self/cmdline").read_text(errors="replace")
    for secret in (SECRET, "FwoGZXIvYXdzEXAMPLETOKEN", s3.key):
        assert secret not in shown
    assert "Signature=" not in shown.replace("Signature=***", "")


def test_what_a_server_repeats_of_a_request_is_not_told() -> None:
    from obstore.exceptions import GenericError

    from unbroken.store.tiers.answers import Secrets, explained

    words = (
        f"403 <AWSAccessKeyId>AKIAEXAMPLE</AWSAccessKeyId><StringToSign>GET {SECRET}</StringToSign> https://h/c?sig=abc%2Fdef&se=1 "
        f"Authorization: AWS4-HMAC x-amz-security-token=tok123456 {SECRET}\n\nDebug source: {SECRET}"
    )
    error = explained("a", GenericError(words), Secrets([SECRET]))
    shown = whole_text(error)
    for secret in ("AKIAEXAMPLE", SECRET, "abc%2Fdef", "AWS4-HMAC", "tok123456"):
        assert secret not in shown
    assert isinstance(error.__cause__, GenericError)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("status code: 503 Service Unavailable: <Code>SlowDown</Code>", Transient),
        ("status code: 400 Bad Request: <Code>RequestTimeout</Code>", Transient),
        ("status code: 429 Too Many Requests", Transient),
        ("error sending request: connection reset", Transient),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", Permanent),
        ("status code: 403 Forbidden: <Code>AccessDenied</Code>", Permanent),
        ("DeleteObjects request failed for key x (code: AccessDenied)", Permanent),
        ("status code: 501 Not Implemented: <Code>NotImplemented</Code>", Permanent),
        ("status code: 301: <Code>PermanentRedirect</Code>", Permanent),
    ],
)
def test_what_passes_is_transient_and_what_stays_is_permanent(words: str, kind: type[StoreError]) -> None:
    from obstore.exceptions import GenericError

    from unbroken.store.tiers.answers import Secrets, explained

    assert type(explained("a", GenericError(f"Generic S3 error: {words}"), Secrets())) is kind


def test_no_context_of_an_error_holds_what_the_client_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import GenericError

    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    tier = in_memory()

    def said(*_: object, **__: object) -> None:
        raise GenericError(f"refused: {SECRET}")

    for name in ("get", "put", "head", "delete", "list", "list_with_delimiter"):
        monkeypatch.setattr(obstore, name, said)
    monkeypatch.setattr(tier._bucket, "_timeout_s", 0.0)
    found = refusals(tier)
    assert len(found) == 8
    for error in found:
        assert "refused: ***" in str(error)
        assert SECRET not in whole_text(error)


def test_a_bucket_that_is_not_there_is_said_so(s3: S3Server, url: str) -> None:
    tier = ObjectTier("s3://no-such-bucket-here/run", endpoint=s3.endpoint)
    with pytest.raises(Permanent, match="the bucket does not exist: make it"):
        tier.list("runs")


def test_http_is_used_only_where_the_endpoint_says_so(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place_of(url).endpoint == s3.endpoint
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    tier = ObjectTier(url, endpoint=s3.endpoint.replace("http://", "https://"), timeout_s=2)
    with pytest.raises(StoreError):
        tier.read("a")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert place_of(url).endpoint is None


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("s3://AKIAKEY:hushhush@bucket/run", {}, "the environment"),
        ("az://container/run?sig=hushhush", {}, "the environment"),
        ("s3://bucket/run", {"endpoint": "https://me:hushhush@host"}, "the environment"),
        ("s3://bucket/run", {"endpoint": "ftp://host"}, "https://host"),
        ("gs://bucket/run", {"endpoint": "https://host"}, "leave it away"),
        ("ftp://hushhush/run", {}, "it starts with one of"),
        ("s3:///run", {}, "name the bucket"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_remedy(url: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        ObjectTier(url, **options)  # type: ignore[arg-type]
    assert "hushhush" not in whole_text(caught.value)


# -- credentials --------------------------------------------------------------------------------------------------------------


def without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def test_a_provider_is_asked_again_before_its_credentials_expire(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)
    asked: list[float] = []
    lives_s = 3600.0

    def provider() -> dict[str, object]:
        asked.append(lives_s)
        until = datetime.now(timezone.utc) + timedelta(seconds=lives_s)
        return {"access_key_id": s3.key, "secret_access_key": s3.secret, "token": None, "expires_at": until}

    tier = ObjectTier(url, credentials=provider)
    for i in range(3):
        tier.create(f"a/{i}", [b"x"])
        tier.read(f"a/{i}")
    long_lived = len(asked)
    assert long_lived <= 3, "one for each setting of the client"
    lives_s = 59.0  # less than the margin: never used without asking anew
    tier = ObjectTier(url, credentials=provider)
    asked.clear()
    for _ in range(4):
        tier.read("a/0")
    assert len(asked) == 4


def test_a_provider_that_fails_is_named_without_its_words(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)

    def provider() -> dict[str, object]:
        raise KeyError(SECRET)

    with pytest.raises(StoreError) as caught:
        ObjectTier(url, credentials=provider, timeout_s=2).read("a")
    assert isinstance(caught.value, Permanent)
    assert SECRET not in whole_text(caught.value)
    assert "KeyError" in str(caught.value)


def test_what_a_provider_gave_is_not_told_either(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)
    tier = ObjectTier(url, credentials=lambda: {"access_key_id": "AKIAOFPROVIDER", "secret_access_key": SECRET, "token": "tok-of-provider"})
    found = refusals(tier)
    assert found
    shown = "".join(map(whole_text, found)) + repr(tier) + repr(tier._bucket.place)
    for secret in (SECRET, "AKIAOFPROVIDER", "tok-of-provider"):
        assert secret not in shown


def test_a_profile_needs_boto3_and_comes_after_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    without_keys(monkeypatch)
    monkeypatch.setenv("AWS_PROFILE", "work")
    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", None)
    with pytest.raises(ValueError, match="pip install boto3"):
        place_of("s3://bucket/run")

    class Fake:
        class Boto3CredentialProvider:
            def __call__(self) -> dict[str, object]:
                return {"access_key_id": "AKIAPROFILE", "secret_access_key": SECRET, "expires_at": None}

    monkeypatch.setitem(sys.modules, "obstore.auth.boto3", Fake)  # type: ignore[arg-type]
    found = place_of("s3://bucket/run").credentials
    assert found is not None
    assert found()["access_key_id"] == "AKIAPROFILE"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    assert place_of("s3://bucket/run").credentials is None


# -- the rest -----------------------------------------------------------------------------------------------------------------


def test_without_obstore_the_extra_is_named() -> None:
    code = "import sys; sys.modules['obstore'] = None; sys.modules['obstore.store'] = None\nimport unbroken.store.tiers.object"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert "MissingExtra: this needs obstore: pip install 'unbroken[object]'" in done.stderr
    assert issubclass(MissingExtra, ImportError)


def test_a_strangers_key_that_is_no_path_of_ours_is_not_listed() -> None:
    tier = in_memory()
    tier.create("a/b", [b"x"])
    for key in ("a/c\\d", "e\\f/g"):
        obstore.put(tier._bucket._once, key, b"x")
    assert (tier.list(""), tier.folders("a")) == (["a/b"], [])


def test_a_folder_serves_as_an_object_store_that_promises_no_durability(tmp_path: Path) -> None:
    tier = ObjectTier(f"file://{tmp_path}/run")
    assert not traits_of(tier).durable
    tier.create("a/b", [b"x"])
    with pytest.raises(FileExistsError):
        tier.create("a/b", [b"y"])
    tier.append("j", b"1")
    tier.append("j", b"2")
    assert (tier.read("a/b"), tier.read("j"), tier.list("")) == (b"x", b"12", ["a/b", "j"])
    tier.delete("nothing")
    tier.delete("j")
    assert tier.list("") == ["a/b"]
