"""`python -m datamat.cli`: the command, where its script is not on the path."""

import sys

from datamat.cli import main

sys.exit(main())
