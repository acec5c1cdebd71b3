"""Makes `python -m datamat` run the command `datamat`, for when its script is not on the path."""

import sys

from datamat.cli import main

if __name__ == "__main__":
    sys.exit(main())
