"""`python -m unbroken` and the `unbroken` command."""

from __future__ import annotations

from unbroken.cli.app import main

if __name__ == "__main__":
    main()
