"""Any nested state into pieces and back.

    flatten(state) -> [Item]    write_item(item, buffer)    rebuild(pieces) -> state    load_into(pieces, live state) -> LoadReport

| value | piece |
|---|---|
| dict, OrderedDict, Counter | container, bytes = JSON list of tokens in order; children at pointer/token |
| list, tuple, deque | container, bytes = JSON length ([length, maxlen] for a deque); children at pointer/0, pointer/1, ... |
| set, frozenset | bytes = sorted JSON list of tokens, no children |
| object with state_dict() and load_state_dict() | "py:state_dict", like a dict |
| random.Random, numpy Generator and RandomState, torch.Generator | named container of their state |
| None bool int float complex str bytes bytearray, numpy scalars and arrays | typed leaf ("py:int", "np:int64", "np.array:float32") |
| torch tensor | its dtype and shape; the second appearance of the same view is an "alias" of the first |
| torch.dtype, torch.device, torch.Size | their names |

Types are kept exactly, keys included; anything else is refused by a TypeError that names its path. What is *not* kept: strides and
device of a tensor, requires_grad and Parameter (the object that holds the tensor keeps them), the `_metadata` of a module's
state_dict, object identity of containers (one dict in two places becomes two equal dicts). Views that overlap without being the
same view (x[:10] and x[5:15], a complex tensor and its real part) are stored by value each and no longer share memory.
"""

from __future__ import annotations

from unbroken.capture.flatten import Item, flatten, view, write_item
from unbroken.capture.rebuild import Pieces, rebuild
from unbroken.capture.restore import LoadReport, load_into

__all__ = ["Item", "LoadReport", "Pieces", "flatten", "load_into", "rebuild", "view", "write_item"]
