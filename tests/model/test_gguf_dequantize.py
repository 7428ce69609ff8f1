from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from gapless.runtime.core.gguf import GGML_TYPES
from gapless.runtime.model.gguf_dequantize import dequantize


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # gguf's own, on random scales
@pytest.mark.parametrize("type_name", [name for name, _, _ in GGML_TYPES.values()])
def test_agrees_with_the_gguf_package_to_the_bit(type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 256, (16, 1024 // weights * block_bytes), np.uint8)
    got = dequantize(torch.from_numpy(raw.reshape(-1)), type_name, (16, 1024)).numpy()
    want = gguf.dequantize(raw, kind)
    number = ~np.isnan(want)  # random scales may be NaN, of any payload
    assert number.mean() > 0.9
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))
    assert np.isnan(got[~number]).all()
