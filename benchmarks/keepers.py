"""Keepers that are other than everstep's: slower, say, as if they were on another machine."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

_PROGRAM = """#!{python}
import sys
from everstep.keeper import __main__ as keeper
{changes}
keeper.main(sys.argv[sys.argv.index("everstep.keeper") + 1 :])
"""


@contextlib.contextmanager
def changed(program: Path, changes: str) -> Iterator[None]:
    """Within, keepers that are started run these lines first; `program`: a file for that."""
    plain = sys.executable
    program.write_text(_PROGRAM.format(python=plain, changes=changes))
    program.chmod(0o700)
    sys.executable = str(program)
    try:
        yield
    finally:
        sys.executable = plain
