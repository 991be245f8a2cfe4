"""The page for contributors names files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_file_it_names_is_there():
    named = [x for x in re.findall(r"`([\w*./]+)`", PAGE) if "/" in x or x.endswith(".py")]
    assert len(named) > 30
    places = (ROOT, ROOT / "fusedce", ROOT / "fusedce" / "backends", ROOT / "fusedce" / "autograd")
    bare = {file.name for file in (ROOT / "fusedce").rglob("*.py")}
    missing = [x for x in named if x not in bare and not any(list(p.glob(x)) for p in places)]
    assert missing == []


def test_it_stays_short():
    assert len(PAGE.splitlines()) <= 100
