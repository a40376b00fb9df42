"""Keys of what was done once: in rank 0's pieces, nowhere else, and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from unbroken.capture.tree import Item, write_item
from unbroken.codec.digest import state_root
from unbroken.core.limits import MAX_ONCE_KEYS
from unbroken.recover.once import Once, check_key


def stored(items: list[Item]) -> dict[str, Any]:
    out = {}
    for item in items:
        data = bytearray(item.nbytes)
        write_item(item, memoryview(data))
        out[item.piece.pointer] = (item.piece, bytes(data))
    return out


def test_a_key_is_new_once_and_stays_known_in_a_checkpoint() -> None:
    once = Once()
    assert [once.first("a"), once.first("a"), once.first("b/ä")] == [True, False, True]
    again = Once()
    again.restore(stored(once.pieces()))
    assert [again.first("a"), again.first("b/ä"), again.first("c")] == [False, False, True]


def test_an_older_checkpoint_forgets_what_was_done_after_it() -> None:
    once = Once()
    once.first("a")
    before = stored(once.pieces())
    once.first("b")
    once.restore(before)
    assert [once.first("a"), once.first("b")] == [False, True]
    once.restore({})
    assert once.first("a")


def test_there_is_no_piece_without_a_key_and_none_that_enters_a_state_root() -> None:
    once = Once()
    assert once.pieces() == []
    once.first("a")
    assert {item.piece.scope for item in once.pieces()} == {"rank"}
    assert state_root((piece, "0" * 64) for piece, _ in stored(once.pieces()).values() if piece.scope == "logical") == state_root(())


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [("", ValueError, "1 to 200"), ("a\nb", ValueError, "printable"), ("x" * 201, ValueError, "1 to 200"), (3, TypeError, "got a int")],
)
def test_what_is_no_key_is_refused(key: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_key(key)


def test_I11_keys_are_bounded() -> None:
    once = Once()
    for i in range(MAX_ONCE_KEYS):
        once.first(str(i))
    with pytest.raises(ValueError, match=f"there are {MAX_ONCE_KEYS} keys already"):
        once.first("one more")
    assert not once.first("0"), "known ones are answered"
