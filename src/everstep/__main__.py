"""`python -m everstep`: the command `everstep`."""

import sys

from everstep.cli.main import main

sys.exit(main())
