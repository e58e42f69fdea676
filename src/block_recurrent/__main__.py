"""`python -m block_recurrent` is `brt`; torchrun needs a module to start."""

import sys

from block_recurrent.cli.main import main

sys.exit(main())
