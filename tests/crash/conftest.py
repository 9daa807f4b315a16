"""Makes this folder importable: trainer.py is run and imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
