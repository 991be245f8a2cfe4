"""The scripts' folder is no package: they run as files, and so are imported as such."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
