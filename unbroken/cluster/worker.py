"""`python -m unbroken.cluster.worker [-m | --exec] program args`: what the launcher starts in place of `python program args`.

The program dies with the launcher, whatever ends that. Cost before its first line: about 10 ms besides starting python.
"""

from __future__ import annotations

import sys

from unbroken.cluster.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
