"""What the torch worker chooses for the CPU that it finds."""

from pathlib import Path

import pytest
import torch

from gapless.bench.in_process import InProcess
from gapless.bench.random_model import TINY, write_random_model
from gapless.overlap import torch_worker
from gapless.overlap.device import CPUDevice
from gapless.overlap.torch_worker import TorchWorker
from gapless.runtime.core.config import ServerConfig
from gapless.runtime.core.errors import ModelLoadError


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


def test_other_weights_are_taken_where_they_fit(tmp_path: Path) -> None:
    """The ids after a reload are those of the new weights alone; weights of another shape change nothing."""
    shapes = {"a": (TINY, 1), "b": (TINY, 2), "deep": (TINY | {"num_hidden_layers": 3}, 1)}
    for name, (shape, seed) in shapes.items():
        write_random_model(tmp_path / name, shape, torch.float32, seed=seed)

    def ids(model: str, *reloads: str) -> list[list[int]]:
        config = ServerConfig(model_path=str(tmp_path / model), dtype="float32", max_total_tokens=1024)
        device = CPUDevice(lambda: TorchWorker(config))
        with InProcess(config, device) as runner:
            for path in reloads:
                reload = device.reload(str(tmp_path / path))
                assert reload.wait(60)
                if reload.error is not None:
                    raise reload.error
            return runner.generate([[1, 2, 3]], [{"max_new_tokens": 16, "temperature": 0}])

    assert ids("a", "b") == ids("b") != ids("a") == ids("a", "b", "a")
    with pytest.raises(ModelLoadError, match="another num_layers: 3, and the running model 2"):
        ids("a", "deep")
