"""`python -m datamat` is the command `datamat`, where its script is not on the path."""

import sys

from datamat.cli import main

if __name__ == "__main__":
    sys.exit(main())
