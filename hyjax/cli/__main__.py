"""`python -m hyjax.cli`, for where the `hyjax` script is not on the path."""

import sys

from hyjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
