"""Makes this folder importable: trained.py is shared by these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
