"""`python -m toolkit` is `toolkit`."""

import sys

from toolkit.commands import main

sys.exit(main())
