"""Breakages of compiled code, one place each, which a run must show as a fault or in numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Breakage(NamedTuple):
    name: str
    kind: str
    text: str  # the whole PTX


def _without(found: re.Match[str]) -> str:
    return ""


def _one_more(found: re.Match[str]) -> str:
    return f"{found[1]}{int(found[2]) + 1};"


# (kind, what stands in the PTX, what is put there, the most of them)
_KINDS: tuple[tuple[str, str, Callable[[re.Match[str]], str], int], ...] = (
    ("bar.sync left out", r"\tbar\.sync \t0;", _without, 99),
    ("cp.async.wait_group left out", r"cp\.async\.wait_group \t\d+;", _without, 99),
    ("cp.async.wait_group of one more", r"(cp\.async\.wait_group \t)(\d+);", _one_more, 99),
    ("cp.async.commit_group left out", r"cp\.async\.commit_group;", _without, 99),
    ("wgmma.wait_group left out", r"wgmma\.wait_group\.sync\.aligned \d+;", _without, 99),
    ("wgmma.wait_group of one more", r"(wgmma\.wait_group\.sync\.aligned )(\d+);", _one_more, 99),
    ("wgmma.commit_group left out", r"wgmma\.commit_group\.sync\.aligned;", _without, 99),
    ("wgmma.fence left out", r"wgmma\.fence\.sync\.aligned;", _without, 99),
    ("fence.proxy.async left out", r"fence\.proxy\.async\.shared::cta;", _without, 99),
    ("nobody waits for the mbarrier", r"@!complete bra\.uni waitLoop;", _without, 99),
    ("the other phase is waited for",
     r"(try_wait\.parity\.shared(?:::cta)?\.b64 complete, \[%r\d+\], )%r\d+;",
     lambda found: f"{found[1]}1;", 99),
    ("mbarrier not initialised",
     r"@%p\d+ mbarrier\.init\.shared(?:::cta)?\.b64 \[%r\d+\], 1;", _without, 2),
    ("mbarrier for two arrivals",
     r"(@%p\d+ mbarrier\.init\.shared(?:::cta)?\.b64 \[%r\d+\], )1;",
     lambda found: f"{found[1]}2;", 2),
    ("mbarrier not invalidated",
     r"@%p\d+ mbarrier\.inval\.shared(?:::cta)?\.b64 \[%r\d+\];", _without, 2),
    ("half of the bytes are expected",
     r"(expect_tx\.shared(?:::cta)?\.b64 _, \[%r\d+\], )(\d+);",
     lambda found: f"{found[1]}{int(found[2]) // 2};", 99),
    ("twice the bytes are expected",
     r"(expect_tx\.shared(?:::cta)?\.b64 _, \[%r\d+\], )(\d+);",
     lambda found: f"{found[1]}{2 * int(found[2])};", 2),
    ("coordinates of a tile exchanged", r"\{(%r\d+), (%r\d+)\}\]",
     lambda found: f"{{{found[2]}, {found[1]}}}]", 99),
    ("every lane of a warp is elected", r"elect\.sync \t(%r\d+)\|(%p\d+), -1;",
     lambda found: f"mov.pred {found[2]}, -1;", 3),
    ("the ticket orders nothing", r"atom\.global\.gpu\.acq_rel",
     lambda found: "atom.global.gpu.relaxed", 99),
    ("a load without its mask", r"@%p\d+ (ld\.global)", lambda found: found[1], 6),
    ("a store without its mask", r"@%p\d+ (st\.global)", lambda found: found[1], 4),
    ("a copy of rows that are not there", r"(cp\.async\.cg\.shared\.global [^;]*, 0x10), %r\d+;",
     lambda found: f"{found[1]};", 4),
    ("a matrix descriptor of another swizzle", r"(or\.b64 \t%rd\d+, %rd\d+, )4611686293305294848;",
     lambda found: f"{found[1]}{4611686293305294848 ^ 3 << 62};", 2),
    ("a later step of K reads the one before", r"4611686293305294850", lambda found:
     "4611686293305294848", 1),
    ("ldmatrix reads the next row", r"(ldmatrix[^;]*\[%r\d+)\];",
     lambda found: f"{found[1]}+128];", 1),
)  # fmt: skip


def breakages(text: str) -> Iterator[Breakage]:
    """All of one PTX text, in an order that does not change."""
    for kind, pattern, change, most in _KINDS:
        for i, found in enumerate(re.finditer(pattern, text)):
            if i == most:
                break
            broken = text[: found.start()] + change(found) + text[found.end() :]
            if broken != text:
                yield Breakage(f"{kind}, {i}", kind, broken)
