"""Record a command in a terminal of its own: an asciicast, and a GIF of it for the site.

    python bench/recording.py           # `fusedce audit` to docs/audit.cast and docs/audit.gif

What is shown, and when, is what the command wrote; pauses of more than two seconds are cut to two.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

from lib.results import ROOT
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

COMMAND = "fusedce audit"
COLUMNS, ROWS = 84, 24
LONGEST_PAUSE = 2.0
Event = tuple[float, str]  # seconds since the command was typed, and what it wrote


def record() -> list[Event]:
    """Run the command, and return what it wrote to its terminal."""
    began, events = time.monotonic(), [(0.0, f"$ {COMMAND}\r\n")]
    decode = codecs.getincrementaldecoder("utf-8")().decode
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "dumb", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
        os.execv(sys.executable, [sys.executable, "-m", *COMMAND.split()])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    while True:
        try:
            text = decode(os.read(terminal, 4096))
        except OSError:  # Linux: the command has ended
            break
        if not text:
            break
        events.append((time.monotonic() - began, text))
    os.waitpid(child, 0)
    return events


def without_pauses(events: list[Event]) -> list[Event]:
    shown, at, last = [], 0.0, 0.0
    for seconds, text in events:
        at += min(seconds - last, LONGEST_PAUSE)
        last = seconds
        shown.append((round(at, 3), text))
    return shown


def cast(events: list[Event]) -> str:
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": COMMAND}
    return "\n".join(map(json.dumps, [header, *([at, "o", text] for at, text in events)])) + "\n"


def gif(events: list[Event], path: Path) -> None:
    """A frame for each moment at which something was written; the last one stays."""
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", 14)
    width, height = round(font.getlength("m") * COLUMNS) + 20, 18 * ROWS + 20
    frames, screen = [], ""
    for _, text in events:
        screen += text
        image = Image.new("P", (width, height), 0)
        image.putpalette([30, 30, 30, 230, 230, 230, *([0] * 762)])
        rows = [row[:COLUMNS] for row in screen.replace("\r", "").rstrip("\n").split("\n")]
        ImageDraw.Draw(image).multiline_text((10, 8), "\n".join(rows[-ROWS:]), 1, font, spacing=4)
        frames.append(image)
    ends = [at for at, _ in events[1:]] + [events[-1][0] + 6]
    durations = [max(round(1000 * (b - a)), 40) for (a, _), b in zip(events, ends, strict=True)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


def main() -> int:
    events = without_pauses(record())
    (ROOT / "docs" / "audit.cast").write_text(cast(events))
    gif(events, ROOT / "docs" / "audit.gif")
    return 0


if __name__ == "__main__":
    sys.exit(main())
