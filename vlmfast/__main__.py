"""``python -m vlmfast``."""

import sys

from vlmfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
