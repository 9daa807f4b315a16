"""Write a golden store: once for each version of the format, then never again.

python tests/golden/make.py    writes tests/golden/version-N, which must not exist

The archives hold runs of the code of before (9fc7cd0), whose options are gone: make.py of commit
7db1f74 wrote them. Each has a store, and expected.safetensors: what the run had after each step, as
STEP/TENSOR, or STEP-EPOCH/TENSOR of a branch that was left.
"""

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from everstep.format.document import FORMAT_VERSION
from stores import SMALL, go_on, make_store

if __name__ == "__main__":
    path = Path(__file__).parent / f"version-{FORMAT_VERSION}"
    assert not path.exists(), f"{path} is there: old versions stay as they were written"
    socket.gethostname = lambda: "golden"
    go_on(make_store(path, {1: "best", 2: None, 3: None}, specs=SMALL), 2, [3])
