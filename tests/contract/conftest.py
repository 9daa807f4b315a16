"""Makes this folder importable: runs.py and keepers.py are shared by these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
