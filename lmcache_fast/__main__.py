"""``python -m lmcache_fast``: the same as the command ``lmcache-fast``."""

import sys

from lmcache_fast.cli import main

if __name__ == "__main__":
    sys.exit(main())
