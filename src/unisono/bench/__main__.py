"""`python -m unisono.bench`, the same as `unisono bench`."""

import sys

from .command import main

sys.exit(main())
