"""What the client itself adds to the figures, with 2,000 streams at once on this machine beside the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scripted_server import scripted_server

from .serving import bench_serve, requests_of

STREAMS, TOKENS = 2000, 50
TARGET_MS = 10.0


@pytest.mark.slow
@pytest.mark.parametrize("rate", ["inf", "1000"])
def test_the_client_distorts_no_first_token(tmp_path: Path, rate: str) -> None:
    """TTFT as it is reported, beside the server's own time from reading a request to writing its first chunk."""
    script = {"chunks": [[2.0 + 0.1 * i, 1] for i in range(TOKENS)]}
    options = ("--num-prompts", str(STREAMS), "--random-input-len", "16", "--random-output-len", str(TOKENS))
    with scripted_server(script) as url:
        code, report = bench_serve(url, tmp_path, *options, "--request-rate", rate)
        log = requests_of(url, report)
    assert (code, report["completed"], len(log)) == (0, STREAMS, STREAMS)
    running = sorted([(r["received"], 1) for r in log] + [(r["writes"][-1][0], -1) for r in log])
    assert max(np.cumsum([step for _, step in running])) == STREAMS
    served = 1000 * np.array([request["writes"][0][0] - request["received"] for request in log])
    added = report["median_ttft_ms"] - float(np.median(served))
    print(
        f"TTFT p50 {report['median_ttft_ms']:.1f} ms, the server's {np.median(served):.1f}: {added:.1f} added; "
        f"p99 {report['p99_ttft_ms']:.1f} and {np.percentile(served, 99):.1f}; "
        f"client {report['client_cpu_cores']:.2f} cores, its loop {report['client_lag_p99_ms']:.1f} ms late (p99)"
    )
    assert added <= TARGET_MS
