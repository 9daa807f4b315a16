"""python -m everstep.keeper STORE: what the trainer starts; nobody needs to do it by hand."""

import sys

from everstep.keeper.process import main

if __name__ == "__main__":
    sys.exit(main())
