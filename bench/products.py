"""What a run would take if it were nothing but its matrix products."""

from __future__ import annotations

import statistics

from gapless.bench.profile import CHUNK, Profiler


class ProductTimes:
    """Times the packed products of a loaded model for a batch of `rows` and for a chunk of a prompt.

    Each call of `measure` adds a sample; calls between the runs of an engine see the machine as the runs do.
    """

    def __init__(self, profiler: Profiler, rows: int) -> None:
        self._profiler, self._rows = profiler, rows
        self._samples: dict[int, list[tuple[float, float]]] = {count: [] for count in sorted({rows, CHUNK})}

    def measure(self) -> None:
        for rows, samples in self._samples.items():
            samples.append(self._profiler.product_seconds(rows, repeats=5))

    def medians(self) -> dict[int, tuple[float, float]]:
        """By number of rows, seconds of the products of all layers and of the head."""
        return {
            rows: (statistics.median(b for b, _ in samples), statistics.median(h for _, h in samples))
            for rows, samples in self._samples.items()
        }

    def run_seconds(self, prompt_tokens: int, output_len: int) -> float:
        """Those of a run that computes `prompt_tokens` in chunks, and `output_len` steps of all rows with the head."""
        medians = self.medians()
        return output_len * sum(medians[self._rows]) + prompt_tokens / CHUNK * medians[CHUNK][0]
