"""Runs PTX that Triton compiles for sm_80 and sm_90, in numpy, and looks for hazards on the way.

In the order of reading: `parse` (text to instructions), `decode` (instructions to steps), `cta`
(who runs next), `arithmetic`, `data`, `matrices`, `copies`, `wgmma` (what the steps do),
`shared_memory` and `global_memory` with `races` (who touched what), `tensor_map` (where a tile's
bytes are), `grid` (one launch), `device` (under Triton's own launcher). By hand: `assembly`; broken
on purpose: `breakages`.

A :class:`~ptx.cta.Fault` ends the run for

- an access out of bounds, misaligned, or to shared memory that was never written;
- a race: of warps between two barriers, in shared or global memory; of the threads of one
  instruction, which write different values to one place; of CTAs that no atomic orders;
- an asynchronous copy or a product of wgmma that is used or overwritten before its wait, or that
  nobody waits for;
- a phase of an mbarrier missed, begun too early or never ended, and an mbarrier left behind;
- ordinary and asynchronous accesses without the fence between their proxies;
- a register of wgmma touched while the product is under way, or written after the last fence;
- a part of a warp at an instruction for whole warps.

An instruction, modifier or operand that is not known is a
:class:`~ptx.parse.NotUnderstood`, with its line. docs/kernels.md lists what is not covered.
"""
