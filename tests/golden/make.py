"""Write the golden store of the format's version: once for each version, then never again.

python tests/golden/make.py        writes tests/golden/version-N, which must not exist
"""

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from everstep.format.document import FORMAT_VERSION
from stores import SMALL, go_on, make_store

if __name__ == "__main__":
    path = Path(__file__).parent / f"version-{FORMAT_VERSION}"
    assert not path.exists(), f"{path} is there: old versions stay as they were written"
    socket.gethostname = lambda: "golden"
    go_on(make_store(path, {1: "best", 2: None, 3: None}, specs=SMALL), 2, [3])
