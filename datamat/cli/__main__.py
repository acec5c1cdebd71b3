"""`python -m datamat.cli`: the command, where its script is not on the path."""

import sys

from datamat.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
