"""Instructions of one lane: integers, floating point, comparisons, conversions.

Rounding is to nearest even, as the instructions here say or imply. Approximate ones (``ex2``,
``div.full``, ``rcp.approx``) give the nearest number, where hardware may be off by an ulp or two.
"""

import numpy as np

from ptx.decode import TYPES, form

INTEGERS = r"[su](?:16|32|64)"
_SMALLEST = np.float32(2.0**-126)


def flushed(x: np.ndarray) -> np.ndarray:
    """``.ftz``: subnormal float32 as zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST, np.copysign(np.float32(0), x), x)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16; NaN becomes the canonical one."""
    bits = x.view(np.uint32)
    tie = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + tie) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


# ---- integers ---------------------------------------------------------------------------------


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded to zero; of a division by 0, which PTX leaves open, all bits set."""
    some = np.where(b == 0, 1, b).astype(a.dtype)
    q = a // some
    q = q + ((q < 0) & (q * some != a)).astype(a.dtype)
    return np.where(b == 0, np.array(-1).astype(a.dtype), q)


_TWO = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum,
        "div": _quotient, "mul.lo": np.multiply}  # fmt: skip


@form(rf"(add|sub|min|max|div|mul\.lo)\.({INTEGERS})")
def _integers(d, operation, kind):
    t = TYPES[kind]
    return d.elementwise(_TWO[operation], t, t, t)


@form(rf"mad\.lo\.({INTEGERS})")
def _multiply_add(d, kind):
    t = TYPES[kind]
    return d.elementwise(lambda a, b, c: a * b + c, t, t, t, t)


@form(r"(mul|mad)\.wide\.([su])(16|32)")
def _wide(d, operation, sign, bits):
    t, wide = TYPES[sign + bits], TYPES[f"{sign}{2 * int(bits)}"]
    if operation == "mul":
        return d.elementwise(lambda a, b: a.astype(wide) * b.astype(wide), wide, t, t)
    return d.elementwise(lambda a, b, c: a.astype(wide) * b.astype(wide) + c, wide, t, t, wide)


@form(r"neg\.(s(?:16|32|64))")
def _sign(d, kind):
    return d.elementwise(np.negative, TYPES[kind], TYPES[kind])


@form(r"(and|or|xor)\.(pred|b16|b32|b64)")
def _logic(d, operation, kind):
    t = TYPES[kind]
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
    return d.elementwise(function, t, t, t)


@form(r"not\.(pred|b16|b32|b64)")
def _not(d, kind):
    return d.elementwise(np.invert, TYPES[kind], TYPES[kind])


@form(r"shl\.(b16|b32|b64)")
def _left(d, kind):
    t = TYPES[kind]
    bits = np.uint32(8 * np.dtype(t).itemsize)

    def shift(a, n):
        return np.where(n >= bits, t(0), a << np.minimum(n, bits - np.uint32(1)).astype(t))

    return d.elementwise(shift, t, t, np.uint32)


@form(r"shr\.([bus])(16|32|64)")
def _right(d, sign, width):
    t = TYPES[sign + width]
    last = np.uint32(int(width) - 1)

    def shift(a, n):
        shifted = a >> np.minimum(n, last).astype(t)
        return shifted if sign == "s" else np.where(n > last, t(0), shifted)

    return d.elementwise(shift, t, t, np.uint32)


@form(r"bfe\.([us])32")
def _extract(d, sign):
    """``length`` bits from ``begin`` on, the last of them the sign."""
    d.count(4)
    begin, length = (d.integer(x) for x in d.operands[2:])
    d.need(begin >= 0 and length > 0 and begin + length <= 32, "bits outside of the register")
    d.operands = d.operands[:2]
    t = TYPES[f"{sign}32"]
    left, right = t(32 - begin - length), t(32 - length)
    return d.elementwise(lambda a: (a << left) >> right, t, t)


@form(r"popc\.b32")
def _ones(d):
    def count(a):
        bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1)
        return bits.sum(1).astype(np.uint32)

    return d.elementwise(count, np.uint32, np.uint32)


@form(r"prmt\.b32")
def _permute_bytes(d):
    """Byte i of the result is that byte of b and a that the i-th nibble of the constant names."""
    d.count(4)
    selector = d.integer(d.operands[3])
    d.need(selector & ~0x7777 == 0, "signs of bytes")
    d.operands, some = d.operands[:3], [selector >> shift & 7 for shift in (0, 4, 8, 12)]

    def permute(a, b):
        return np.stack([a, b], 1).view(np.uint8)[:, some].reshape(-1).view(np.uint32)

    return d.elementwise(permute, *[np.uint32] * 3)


# ---- floating point ---------------------------------------------------------------------------


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` in the next longer format, where float32's product is exact, then rounded.

    (The sum is rounded twice, which shows once in 2^29. Of float64 the CPU's longest format has at
    least 11 bits more than the product's result; its own product is not exact there.)
    """
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b + c).astype(a.dtype)


_FLOAT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
          "min": np.fmin, "max": np.fmax, "max.NaN": np.maximum}  # fmt: skip


@form(r"(add|sub|mul|div|max\.NaN|min|max)(?:\.rn|\.full)?(\.ftz)?\.(f32|f64)")
def _floats(d, operation, ftz, kind):
    t, function = TYPES[kind], _FLOAT[operation]

    def of_flushed(a, b):
        return flushed(function(flushed(a), flushed(b)))

    return d.elementwise(of_flushed if ftz else function, t, t, t)


@form(r"fma\.rn(\.ftz)?\.(f32|f64)")
def _fma(d, ftz, kind):
    def of_flushed(a, b, c):
        return flushed(fma(flushed(a), flushed(b), flushed(c)))

    return d.elementwise(of_flushed if ftz else fma, *[TYPES[kind]] * 4)


@form(r"(neg|abs)(\.ftz)?\.(f32|f64)")
def _float_sign(d, operation, ftz, kind):
    t, function = TYPES[kind], np.negative if operation == "neg" else np.abs
    return d.elementwise((lambda a: function(flushed(a))) if ftz else function, t, t)


@form(r"ex2\.approx\.ftz\.f32")
def _exp2(d):
    def exp2(a):
        return flushed(np.exp2(flushed(a).astype(np.float64)).astype(np.float32))

    return d.elementwise(exp2, np.float32, np.float32)


@form(r"rcp\.approx\.ftz\.f64")
def _rough_reciprocal(d):
    """Reciprocal of the upper 32 bits alone, which Newton's steps begin with."""
    mask = np.uint64(0xFFFFFFFF00000000)

    def rough(a):
        a = (a.view(np.uint64) & mask).view(np.float64)
        return ((1.0 / a).view(np.uint64) & mask).view(np.float64)

    return d.elementwise(rough, np.float64, np.float64)


# ---- comparisons ------------------------------------------------------------------------------

_ORDER = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
          "gt": np.greater, "ge": np.greater_equal}  # fmt: skip


@form(r"setp\.(eq|ne|lt|le|gt|ge)\.([bsu](?:16|32|64))")
def _compare(d, relation, kind):
    d.need(kind[0] != "b" or relation in ("eq", "ne"), "order of bits")
    t = TYPES[kind]
    return d.elementwise(_ORDER[relation], np.bool_, t, t)


@form(r"setp\.(eq|ne|lt|le|gt|ge|num|nan)(u?)\.(f32|f64)")
def _compare_floats(d, relation, unordered, kind):
    """``u``: true where one of the two is NaN, where all the others are false."""
    t = TYPES[kind]
    d.need(not (unordered and relation in ("num", "nan")), relation)

    def compare(a, b):
        nan = np.isnan(a) | np.isnan(b)
        if relation in ("num", "nan"):
            return nan if relation == "nan" else ~nan
        found = _ORDER[relation](a, b)
        return found | nan if unordered else found & ~nan

    return d.elementwise(compare, np.bool_, t, t)


@form(r"selp\.([bsuf](?:16|32|64))")
def _select(d, kind):
    t = TYPES[kind]
    return d.elementwise(lambda a, b, p: np.where(p, a, b), t, t, t, np.bool_)


# ---- conversions ------------------------------------------------------------------------------


@form(r"cvt\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))")
def _integer_to_integer(d, to, of):
    """Registers may be wider: of the source the lowest bits count."""
    d.count(2)
    source, result = d.wider(d.operands[1], TYPES[of]), d.wider(d.operands[0], TYPES[to])
    read, put = d.value(d.operands[1], source), d.put(d.operands[0], result)
    narrow, wide = (
        TYPES[f"u{of[1:]}"],
        np.dtype(f"{'i' if to[0] == 's' else 'u'}{result(0).nbytes}"),
    )

    def step(cta):
        value = read(cta).astype(narrow).view(TYPES[of]).astype(TYPES[to])
        put(cta, value.astype(wide).view(result))

    return step


@form(r"cvt\.(rmi|rpi)\.ftz\.f32\.f32")
def _to_whole(d, rounding):
    function = np.floor if rounding == "rmi" else np.ceil
    return d.elementwise(lambda a: function(flushed(a)), np.float32, np.float32)


@form(r"cvt\.rn\.(f32|f64)\.([us](?:16|32|64))")
def _integer_to_float(d, to, of):
    return d.elementwise(lambda a: a.astype(TYPES[to]), TYPES[to], TYPES[of])


@form(r"cvt(?:\.rn)?\.(f32|f64)\.(f32|f64)")
def _float_to_float(d, to, of):
    return d.elementwise(lambda a: a.astype(TYPES[to]), TYPES[to], TYPES[of])


@form(r"cvt\.f32\.(bf16|f16)")
def _widen(d, of):
    if of == "bf16":
        return d.elementwise(from_bf16, np.float32, np.uint16)
    return d.elementwise(lambda a: a.astype(np.float32), np.float32, np.float16)


@form(r"cvt\.rn\.(bf16|f16)\.f32")
def _narrow(d, to):
    if to == "bf16":
        return d.elementwise(to_bf16, np.uint16, np.float32)
    return d.elementwise(lambda a: a.astype(np.float16), np.float16, np.float32)


@form(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _narrow_two(d, to):
    """The first source goes to the upper half."""
    half = to_bf16 if to == "bf16" else lambda a: a.astype(np.float16).view(np.uint16)

    def pack(high, low):
        return np.stack([half(low), half(high)], 1).view(np.uint32).reshape(-1)

    return d.elementwise(pack, np.uint32, np.float32, np.float32)
