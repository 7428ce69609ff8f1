"""How many pages to keep in reserve for the growth of running requests, so that preemption is rare.

The reserve is a share of what they could still generate (SGLang's new_token_ratio): it falls while all goes well, and
each preemption raises it. At 1 a request that is admitted can always run to its limit, so preemptions end.
"""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.plan import I32
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.rows import Rows

START, LEAST, RAISE, DECAY = 0.4, 0.1, 0.3, 0.999
MAX_PREEMPTIONS = 3  # after these a request comes back only with room for all of its output


class Reserve:
    def __init__(self) -> None:
        self.ratio = START

    def pages_for(self, request: Request, running: I32, rows: Rows, page_size: int) -> int:
        """Pages to leave free when `request` joins the running rows."""
        if not running.size:
            return 0  # alone it fits, whatever it generates: its max_output is clamped to the pool
        own = request.max_output - (int(rows.output_len[request.slot]) if request.slot else 0)
        left = rows.max_output[running] - rows.launched_out[running]
        if request.preemptions >= MAX_PREEMPTIONS:
            return int(np.sum(-(-left // page_size))) + running.size - (-own // page_size)
        return int(self.ratio * (int(left.sum()) + own)) // page_size

    def preempted(self) -> None:
        self.ratio = min(1.0, self.ratio + RAISE)

    def stepped(self) -> None:
        self.ratio = max(LEAST, self.ratio * DECAY)
