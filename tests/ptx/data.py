"""Instructions that move data: between registers, between lanes of a warp, from and to memory."""

import struct

import numpy as np

from ptx.decode import TYPES, form
from ptx.parse import Address

# ---- registers --------------------------------------------------------------------------------


@form(r"mov\.([bsuf](?:16|32|64)|pred)")
def _move(d, kind):
    """Or packs ``{a, b}`` into a register, the first in the lowest bits, or unpacks one."""
    d.count(2)
    to, of = d.operands
    t = TYPES[kind]
    if not isinstance(to, tuple) and not isinstance(of, tuple):
        return d.elementwise(lambda a: a, t, t)
    d.need(not (isinstance(to, tuple) and isinstance(of, tuple)), "packs and unpacks at once")
    names = d.names(to if isinstance(to, tuple) else of)
    size, rest = divmod(np.dtype(t).itemsize, len(names))
    d.need(rest == 0 and size in (2, 4), f"{len(names)} registers of {kind}")
    part = TYPES[f"u{8 * size}"]
    if isinstance(of, tuple):
        reads, put = [d.value(name, part) for name in names], d.put(to, t)
        return lambda cta: put(cta, np.stack([r(cta) for r in reads], 1).view(t).reshape(-1))
    read, puts = d.value(of, t), [d.put(name, part) for name in names]

    def unpack(cta):
        parts = np.ascontiguousarray(read(cta)).view(part).reshape(-1, len(names))
        for put, values in zip(puts, parts.T, strict=True):
            put(cta, np.ascontiguousarray(values))

    return unpack


@form(r"ld\.param\.([bsuf](?:8|16|32|64))")
def _parameter(d, kind):
    d.count(2)
    name, t = d.operands[1].base, TYPES[kind]
    d.need(name in d.program.parameters and d.operands[1].offset == 0, "no such parameter")
    of, size = d.program.parameters[name], 8 * np.dtype(t).itemsize
    d.need(of[1:] == str(size), f"a parameter of type {of}")
    held = d.width_of(d.operands[0])
    wide = TYPES[f"{kind[0] if kind[0] in 'su' else 'u'}{8 * np.dtype(held).itemsize}"]
    put = d.put(d.operands[0], held)

    def step(cta):
        number = cta.grid.arguments[name]
        if of[0] == "f":
            number = int.from_bytes(struct.pack("<f" if size == 32 else "<d", number), "little")
        bits = np.array(number & ((1 << size) - 1), TYPES[f"u{size}"]).view(t)
        put(cta, np.full(cta.threads, bits.astype(wide)).view(held))

    return step


@form(r"cvta\.(?:param|to\.global)\.u64")
def _generic(d):
    """Addresses of all spaces are told apart by their numbers here."""
    return d.elementwise(lambda a: a, np.uint64, np.uint64)


# ---- lanes of a warp --------------------------------------------------------------------------


@form(r"shfl\.sync\.(bfly|idx|up)\.b32")
def _shuffle(d, how):
    d.count(5)
    d.need("|" not in d.operands[0], "whether there was such a lane")
    put, read = d.put(d.operands[0], np.uint32), d.value(d.operands[1], np.uint32)
    other = d.value(d.operands[2], np.uint32)
    edge = d.integer(d.operands[3])  # the last lane of a segment, and which bits choose one
    d.need(edge == (0 if how == "up" else 31), "segments of a warp")
    d.need(d.integer(d.operands[4]) in (-1, 0xFFFFFFFF), "some lanes of a warp")

    def step(cta):
        cta.active_warps()
        lane, n = cta.lane, other(cta).astype(np.int64)
        inside = lane % 32
        source = {"bfly": inside ^ n, "idx": n, "up": inside - n}[how]
        source = np.where((source < 0) | (source > 31), inside, source)
        put(cta, read(cta)[lane - inside + source])

    return step


@form(r"redux\.sync\.(add|min|max)\.([su]32)")
def _reduce(d, operation, kind):
    d.count(3)
    reduced = {"add": np.add, "min": np.minimum, "max": np.maximum}[operation].reduce
    t = TYPES[kind]
    put, read = d.put(d.operands[0], t), d.value(d.operands[1], t)

    def step(cta):
        cta.active_warps()
        of_warps = reduced(read(cta).reshape(-1, 32), 1, t)
        put(cta, np.repeat(of_warps, 32))

    return step


@form(r"elect\.sync")
def _elect(d):
    """One lane of each warp."""
    d.count(2)
    leader, chosen = d.operands[0].split("|")
    put_leader, put = d.put(leader, np.uint32), d.put(chosen, np.bool_)

    def step(cta):
        cta.active_warps()
        put_leader(cta, np.zeros(cta.threads, np.uint32))
        put(cta, cta.lane % 32 == 0)

    return step


# ---- memory -----------------------------------------------------------------------------------


def _vector(d, count: str | None, kind: str, operand: object):
    """``(type, its bits, registers, what they hold)`` of an access of elements."""
    t, names = TYPES[kind], d.names(operand)
    d.need(len(names) == int(count or 1), f"{len(names)} registers")
    held = {d.wider(name, t) for name in names if name != "_"}
    d.need(len(held) == 1, "registers of several widths")
    return t, TYPES[f"u{8 * np.dtype(t).itemsize}"], names, held.pop()


@form(r"ld\.(global|shared)(?:::cta)?(\.cg)?(?:\.v([24]))?\.([bsuf](?:8|16|32|64))")
def _load(d, space, cached, count, kind):
    """Into registers that may be wider: with zeros, or with the sign of a signed type."""
    d.count(2)
    d.need(not cached or space == "global", "a cache of shared memory")
    t, bits, names, held = _vector(d, count, kind, d.operands[0])
    extended = np.dtype(f"{np.dtype(t).kind}{np.dtype(held).itemsize}") if t is not held else held
    d.need(kind[0] != "f" or bits is held, "a wider register of a float")
    puts = [d.put(name, held) for name in names]
    address = d.address(d.operands[1], wide=space == "global")

    def step(cta):
        at = address(cta)[cta.active]
        memory = cta.memory if space == "global" else cta.shared
        found = memory.load(cta, at, cta.warp[cta.active], bits, len(names))
        for i, put in enumerate(puts):
            value = np.zeros(cta.threads, held)
            part = found[:, i]
            value[cta.active] = part if bits is held else part.view(t).astype(extended).view(held)
            put(cta, value)

    return step


@form(r"st\.(global|shared)(?:::cta)?(?:\.v([24]))?\.([bsuf](?:8|16|32|64))")
def _store(d, space, count, kind):
    d.count(2)
    _, bits, names, held = _vector(d, count, kind, d.operands[1])
    reads = [d.value(name, held) for name in names]
    address = d.address(d.operands[0], wide=space == "global")

    def step(cta):
        at = address(cta)[cta.active]
        memory = cta.memory if space == "global" else cta.shared
        values = np.stack([read(cta)[cta.active].astype(bits) for read in reads], 1)
        memory.store(cta, at, cta.warp[cta.active], values)

    return step


@form(r"atom\.global\.gpu\.(acq_rel|relaxed)\.add\.u32")
def _atomic_add(d, order):
    d.count(3)
    put, more = d.put(d.operands[0], np.uint32), d.value(d.operands[2], np.uint32)
    d.need(isinstance(d.operands[1], Address), "no address")
    address = d.address(d.operands[1], wide=True)

    def step(cta):
        at, added, old = address(cta), more(cta), np.zeros(cta.threads, np.uint32)
        for lane in np.flatnonzero(cta.active):
            old[lane] = cta.memory.add(
                cta, int(at[lane]), int(lane) // 32, added[lane], orders=order == "acq_rel"
            )
        put(cta, old)

    return step
