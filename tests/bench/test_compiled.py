"""The compiler report: figures read from machine code, and faults."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import compiler_report
import pytest
from lib import compiled

ROOT = Path(__file__).parents[2]
SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R8, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.U16 R9, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0050*/             @!UP0 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0060*/               @P1 STG.E.64 desc[UR4][R2.64], R4 ;
        /*0070*/                   EXIT ;
        /*0080*/                   NOP;
.L_x_0:
        /*0090*/                   BRA `(.L_x_0) ;
"""


def test_machine_code_is_counted():
    assert compiled.machine_code(SASS) == {
        "instructions": 9,
        "barriers": 1,
        "loads": {"16": 2, "4": 1, "2": 1},
        "stores": {"8": 1},
    }


def test_amd_assembly_is_counted():
    asm = (
        "\tglobal_load_dwordx4 v[0:3], v0, s[0:1]\n\tbuffer_store_short v0, s[0:3]\n"
        "\ts_barrier\n\tv_mfma_f32_32x32x8_bf16_1k a[0:15]\n\ts_endpgm\n"
        "    .vgpr_count:     96\n    .vgpr_spill_count: 2\n"
    )
    assert compiled._amd(asm) == {
        "warnings": [], "registers": 96, "spill_bytes": 8, "instructions": 5, "barriers": 1,
        "loads": {"16": 1}, "stores": {"2": 1},
    }  # fmt: skip


def fake(folder, name, says, status):
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{name}: {says}' >&2\nexit {status}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)


def test_the_newer_assembler_is_asked_where_the_older_one_is_too_old(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_BIN", tmp_path)
    fake(tmp_path, "ptxas", "Unsupported .version 9.4; current version is 9.0", 255)
    fake(tmp_path, "ptxas-blackwell", "Used 7 registers", 0)
    said = compiled.assemble(tmp_path / "x.ptx", "sm_90a", tmp_path / "x.cubin")
    assert said == "ptxas-blackwell: Used 7 registers\n"
    fake(tmp_path, "ptxas", "Used 9 registers", 0)
    assert "Used 9" in compiled.assemble(tmp_path / "x.ptx", "sm_90a", tmp_path / "x.cubin")
    assert "Used 7" in compiled.assemble(tmp_path / "x.ptx", "sm_100a", tmp_path / "x.cubin")


def test_an_error_in_the_code_is_not_tried_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(compiled, "_BIN", tmp_path)
    fake(tmp_path, "ptxas", "syntax error", 255)
    fake(tmp_path, "ptxas-blackwell", "Used 7 registers", 0)
    with pytest.raises(RuntimeError, match="ptxas: syntax error"):
        compiled.assemble(tmp_path / "x.ptx", "sm_90a", tmp_path / "x.cubin")


ROW = {"kernel": "forward bf16", "arch": "sm_90", "registers": 200, "spill_bytes": 0, "async": 15,
       "instructions": 1000, "barriers": 4, "shared": 1024}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, []),
        ({"spill_bytes": 8}, ["forward bf16 sm_90: 8 bytes of spills"]),
        ({"spill_bytes": 8, "kernel": "stats bf16 terms smoothed", "arch": "sm_86"}, []),
        ({"warnings": ["C7514"]}, ["forward bf16 sm_90: ptxas warns of C7514"]),
    ],
)  # fmt: skip
def test_spills_and_serialised_wgmma_are_faults(change, said):
    row = ROW | {"warnings": []} | change
    assert compiler_report.faults([row]) == said


def test_warnings_of_the_assembler_are_read(tmp_path, monkeypatch):
    said = "info : (C7514) Potential Performance Loss: wgmma.mma_async ... are serialized\n"
    monkeypatch.setattr(compiled, "assemble", lambda *_: f"{said}{said}Used 9 registers")
    monkeypatch.setattr(compiled, "_BIN", tmp_path)
    fake(tmp_path, "nvdisasm", "", 0)
    assert compiled._nvidia("", "sm_90a")["warnings"] == ["C7514"]


def test_launches_are_those_of_the_host_code():
    """Found without a device: kernels of both ways of training, blocks of the row, alignment."""
    code = (
        "import sys; sys.path.insert(0, 'bench'); from lib.launches import recorded, inputs, archs;"
        "import torch, fusedce; from fusedce.backends.triton.launch import TMA\n"
        "with recorded(archs.BY_NAME['sm_90']) as found:\n"
        "    loss = fusedce.fused_ce(*inputs(torch.bfloat16, 64, 1000), backend='triton')\n"
        "    loss.loss_sum.backward()\n"
        "gemm = next(x for x in found if x.name == 'exp_gemm')\n"
        "tiles = 'tensordesc<bf16[128, 64]>' if TMA else None\n"
        "print(gemm.constants['BLOCK_V'], gemm.types.get('weight_tiles') == tiles,\n"
        "      'H' in gemm.aligned, 'V' in gemm.aligned, [x.name for x in found])"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.stdout.startswith("128 True True False ['compact'"), done
    assert all(f"'{name}'" in done.stdout for name in ("softmax_rows", "hidden_grad", "label_grad"))
