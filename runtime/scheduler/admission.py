"""How many pages to keep in reserve for the growth of running requests, so that preemption is rare.

The reserve is a share of what they could still generate (SGLang's new_token_ratio): it falls while all goes well, and
each preemption raises it. At 1 a request that is admitted can always run to its limit, so preemptions end.
"""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.plan import I32
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.rows import LAUNCHED_LEN, LAUNCHED_OUT, MAX_OUTPUT, PAGE_END, Rows

START, LEAST, RAISE, DECAY = 0.4, 0.1, 0.3, 0.999
MAX_PREEMPTIONS = 3  # after these a request comes back only with room for all of its output


class Reserve:
    def __init__(self) -> None:
        self.ratio = START

    def pages_for(self, request: Request, running: I32, rows: Rows) -> int:
        """Pages to leave free when `request` joins the running rows, beside those of its known tokens."""
        if not running.size:
            return 0  # alone it fits, whatever it generates: its max_output is clamped to the pool
        state, size = rows.state.take(running, axis=1), rows.page_size
        # What the pages that a row has already can still take costs nothing.
        growth = state[MAX_OUTPUT] - state[LAUNCHED_OUT] - (state[PAGE_END] - state[LAUNCHED_LEN])
        known = int(rows.known_len[request.slot]) if request.slot else len(request.prompt)
        produced = int(rows.output_len[request.slot]) if request.slot else 0
        own = request.max_output - produced - -known % size
        pages = int(np.sum(-(-np.maximum(growth, 0) // size))) + -(-max(own, 0) // size)
        return pages if request.preemptions >= MAX_PREEMPTIONS else int(self.ratio * pages)

    def preempted(self) -> None:
        self.ratio = min(1.0, self.ratio + RAISE)

    def stepped(self) -> None:
        self.ratio = max(LEAST, self.ratio * DECAY)
