"""How many pages to keep in reserve for the growth of running requests, so that preemption is rare.

The reserve is a share of what they could still generate (SGLang's new_token_ratio): it falls while all goes well, and
each preemption raises it. At 1 a request that is admitted can always run to its limit, so preemptions end.
"""

from __future__ import annotations

import numpy as np

from gapless.runtime.core.plan import Slots
from gapless.runtime.scheduler.request import Request
from gapless.runtime.scheduler.rows import LAUNCHED_LEN, LAUNCHED_OUT, MAX_OUTPUT, PAGE_END, Rows

START, LEAST, RAISE, DECAY = 0.4, 0.1, 0.3, 0.999
MAX_PREEMPTIONS = 3  # after these a request comes back only with room for all of its output


class Reserve:
    def __init__(self) -> None:
        self.ratio = START

    def pages_for(self, request: Request, growth: int, rows: Rows) -> int:
        """Pages to leave free beside those of its known tokens when it joins rows that may take `growth` more."""
        pages = growth + self.own_growth(request, rows)
        return pages if request.preemptions >= MAX_PREEMPTIONS else int(self.ratio * pages)

    @staticmethod
    def growth(running: Slots, rows: Rows) -> int:
        """Pages that the running rows may still take."""
        state = rows.state.take(running, axis=1)
        # What the pages that a row has already can still hold costs nothing.
        tokens = state[MAX_OUTPUT] - state[LAUNCHED_OUT] - (state[PAGE_END] - state[LAUNCHED_LEN])
        return int(np.sum(-(-np.maximum(tokens, 0) // rows.page_size)))

    @staticmethod
    def own_growth(request: Request, rows: Rows) -> int:
        """Pages that the request may take after those of its known tokens."""
        known = int(rows.known_len[request.slot]) if request.slot else len(request.prompt)
        produced = int(rows.output_len[request.slot]) if request.slot else 0
        tokens = request.max_output - produced - -known % rows.page_size
        return -(-max(tokens, 0) // rows.page_size)

    def preempted(self) -> None:
        self.ratio = min(1.0, self.ratio + RAISE)

    def stepped(self) -> None:
        self.ratio = max(LEAST, self.ratio * DECAY)
