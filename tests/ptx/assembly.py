"""Single kernels in PTX, written by hand, for tests of the interpreter itself."""

import numpy as np

from ptx.decode import decode
from ptx.global_memory import GlobalMemory
from ptx.grid import Grid
from ptx.parse import parse

_HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel({parameters})
.reqntid {threads}
{{
    .reg .pred %p<64>;
    .reg .b16 %rs<64>;
    .reg .b32 %r<512>;
    .reg .b64 %rd<64>;
    mov.u32 %r0, %tid.x;
{loads}
"""


def run(body, *tensors, threads=32, ctas=1, shared=4096, maps=None, **how):
    """Runs ``body``; returns copies of ``tensors``, the arrays that it finds at %rd0, %rd1, ...

    %r0 is the thread's number. ``maps`` makes tensor maps, by handle, of the arrays' addresses.
    """
    names = [f"kernel_param_{i}" for i in range(len(tensors))]
    loads = "\n".join(f"    ld.param.b64 %rd{i}, [{name}];" for i, name in enumerate(names))
    text = _HEAD.format(
        parameters=", ".join(f".param .u64 {name}" for name in names), threads=threads, loads=loads
    )
    kernel = decode(parse(text + body + "\n    ret;\n}\n"))
    memory = GlobalMemory(GlobalMemory.room_for([t.nbytes for t in tensors]))
    raw = [np.ascontiguousarray(t).view(np.uint8).reshape(-1) for t in tensors]
    places = [memory.place(bits, [(0, bits.size)]) for bits in raw]
    grid = Grid(
        kernel, (ctas, 1, 1), dict(zip(names, places, strict=True)), memory,
        shared_bytes=shared, maps=(maps or (lambda places: {}))(places), **how,
    )  # fmt: skip
    grid.run()
    return [
        memory.read_back(place, bits.size).view(t.dtype).reshape(t.shape).copy()
        for place, bits, t in zip(places, raw, tensors, strict=True)
    ]
