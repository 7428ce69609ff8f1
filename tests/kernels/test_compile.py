"""Compiling the kernels: without a compiler, with a broken one; and torch's threads stay the only ones."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from gapless.kernels import cpu_linear
from gapless.kernels.compile import CompileError, compile_kernels
from gapless.kernels.cpu import load_kernels, native_ops
from gapless.kernels.ops import choose_ops
from gapless.runtime.core.errors import ConfigError


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("cc", ["", "/nonexistent"])
def test_without_a_compiler_plain_torch_serves(
    cc: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", cc)
    with caplog.at_level(logging.WARNING, "gapless.kernels"):
        assert choose_ops("auto", torch.device("cpu")).name == "torch"
    assert len(caplog.records) == 1
    assert "no C compiler found" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_native_backend_demands_a_compiler() -> None:
    with pytest.raises(ConfigError, match="native: no C compiler found"):
        choose_ops("native", torch.device("cpu"))


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such flag >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("GAPLESS_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(CompileError, match="no such flag"):
        compile_kernels()


def test_a_library_that_does_not_load_is_one_clear_error(tmp_path: Path) -> None:
    """As on a home directory from which nothing may be executed."""
    (tmp_path / "native.so").write_bytes(b"not a library")
    with pytest.raises(CompileError, match="cannot load"):
        load_kernels(tmp_path / "native.so")


def test_the_process_has_one_openmp_runtime() -> None:
    """Loading the kernels maps no runtime beside the ones that torch and numpy brought."""

    def runtimes() -> set[str]:
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {
            line.split()[-1]
            for line in maps
            if any(name in line for name in ("libgomp", "libomp", "libiomp"))
        }

    before = runtimes()
    if native_ops(required=False) is None:
        pytest.skip("no compiler")
    assert runtimes() == before


def test_packed_onednn_product_computes_what_linear_does() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    flags = Path("/proc/cpuinfo").read_text().split()
    if not {"avx512bw", "avx_ne_convert"}.intersection(flags):
        pytest.skip("oneDNN has no bfloat16 products for this CPU")
    assert cpu_linear.mkldnn_works()


def test_missing_private_operation_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_: object) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(cpu_linear, "MkldnnLinear", gone)
    with caplog.at_level(logging.WARNING, "gapless.kernels"):
        assert not cpu_linear.mkldnn_works.__wrapped__()
    assert "no such operator" in caplog.text
