"""What the torch worker chooses for the CPU that it finds."""

from pathlib import Path

import pytest
import torch

from gapless.overlap import torch_worker


@pytest.mark.parametrize(
    ("flags", "asked", "dtype", "why"),
    [
        ("fpu avx2 avx512_bf16 amx_bf16", "auto", torch.bfloat16, "bfloat16 (amx_bf16)"),
        ("fpu avx2 avx512_bf16", "auto", torch.bfloat16, "bfloat16 (avx512_bf16)"),
        ("fp asimd bf16", "auto", torch.bfloat16, "bfloat16 (bf16)"),
        ("fpu avx2 avx512f", "auto", torch.float32, "float32 (no bfloat16 instructions)"),
        (None, "auto", torch.float32, "float32 (no bfloat16 instructions)"),
        ("fpu", "bfloat16", torch.bfloat16, "bfloat16 as asked"),
        ("avx512_bf16", "float32", torch.float32, "float32 as asked"),
    ],
)
def test_bfloat16_only_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: str | None,
    asked: str,
    dtype: torch.dtype,
    why: str,
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(torch_worker, "Path", lambda _: cpuinfo)
    assert torch_worker._choose_dtype(asked) == (dtype, why)
