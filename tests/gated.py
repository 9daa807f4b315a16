"""A keeper whose disk hangs while a file is there."""

import sys

_PROGRAM = """#!{python}
import os, sys, time
from everstep.keeper import __main__ as keeper
from everstep.tiers.system import System

plain = System.fsync

def fsync(system, fd):
    while os.path.exists({gate!r}):
        time.sleep(0.002)
    plain(system, fd)

System.fsync = fsync
keeper.main(sys.argv[sys.argv.index("everstep.keeper") + 1 :])
"""


def write(program, gate):
    """What `sys.executable` has to be for keepers that sync nothing while `gate` is there."""
    program.write_text(_PROGRAM.format(python=sys.executable, gate=str(gate)))
    program.chmod(0o700)
    return str(program)
