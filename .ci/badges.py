"""Write `docs/badges.svg`: the versions that the tests run with, and the licence.

    python .ci/badges.py

They are read from `pyproject.toml` and the constraint files, so that they hold without a network;
a test compares the picture with them.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHARACTER, MARGIN = 6.6, 10  # pixels


def badges() -> list[tuple[str, str]]:
    """Name and text of each badge."""
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r"Python :: (\d\.\d+)", project)
    torch = [
        re.search(
            r"^torch==(\d+\.\d+)", (ROOT / f"constraints-{end}.txt").read_text(), re.MULTILINE
        )
        for end in ("oldest", "newest")
    ]
    licence = re.search(r'^license = "(.+)"', project, re.MULTILINE)
    assert licence
    return [
        ("python", " | ".join(pythons)),
        ("torch", " to ".join(found[1] for found in torch if found)),
        ("license", licence[1]),
    ]


def svg() -> str:
    parts, x = [], 0.0
    for name, text in badges():
        for words, colour in ((name, "#444"), (text, "#0072b2")):
            width = round(CHARACTER * len(words) + 2 * MARGIN, 1)
            parts += [
                f'<rect x="{x:.1f}" width="{width}" height="20" fill="{colour}"/>',
                f'<text x="{x + width / 2:.1f}" y="14" text-anchor="middle">{words}</text>',
            ]
            x += width
        x += 6
    title = ", ".join(f"{name} {text}" for name, text in badges())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x - 6:.1f}" height="20" role="img">'
    group = '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
    return "\n".join([head, f"<title>{title}</title>", group, *parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs" / "badges.svg").write_text(svg())
