"""Prompts that are being computed, and the requests that wait for one of them instead of computing it twice.

SGLang calls it in-batch prefix caching: among requests with a common prefix that is not cached, the first one computes
it. The others are held until as much of it as they share is in the tree.
"""

from __future__ import annotations

import heapq

import numpy as np

from gapless.radix_cache.namespace import Namespace
from gapless.radix_cache.tree import Node, RadixTree
from gapless.runtime.core.plan import I32
from gapless.runtime.scheduler.request import Request

LEAST_SHARED = 32  # tokens: waiting a step or two for fewer costs more than computing them
ALL = 1 << 31  # more tokens than any prompt has: until the whole prompt is computed


class Sharing:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # An index of the prompts being computed: instead of pages it holds the slot of who inserted them first.
        self._coming = RadixTree(page_size)
        self._computing: dict[int, tuple[Request, Node]] = {}  # by slot
        # By arrival of whom they wait for, heaps of (tokens needed, arrival, request). One that was dropped stays
        # until it comes up.
        self._held: dict[int, list[tuple[int, int, Request]]] = {}

    def begin(self, request: Request, known: I32) -> None:
        """The request starts to compute `known`."""
        pages = np.full(len(known) // self._page_size, request.slot, np.int32)
        node, _ = self._coming.insert(known[: len(pages) * self._page_size], pages, request.space)
        self._coming.lock_node(node)
        self._computing[request.slot] = request, node

    def coming(self, ids: I32, namespace: Namespace) -> tuple[int, Request | None]:
        """How much of `ids`, in tokens, is being computed, and by whom."""
        if not self._computing:
            return 0, None
        match = self._coming.match(ids, namespace)
        if not match.length:
            return 0, None
        # Who inserted it may have left while another that shares it goes on: then nobody waits, or for whoever has the
        # slot now.
        request, _ = self._computing.get(int(match.pages[-1]), (None, None))
        return match.length * self._page_size, request

    def hold(self, request: Request, on: Request, tokens: int) -> None:
        """The request waits until the tree has so many tokens of the prompt of `on`."""
        request.held_on = on
        heapq.heappush(self._held.setdefault(on.arrival, []), (tokens, request.arrival, request))

    def drop(self, request: Request) -> None:
        """The request waits no more."""
        request.held_on = None

    def advanced(self, request: Request, tokens: int) -> list[Request]:
        """Who waits no more now that so many tokens of the request's prompt are in the tree."""
        waiting, free = self._held.get(request.arrival, []), []
        while waiting and waiting[0][0] <= tokens:
            held = heapq.heappop(waiting)[2]
            if held.held_on is request:
                held.held_on = None
                free.append(held)
        return free

    def ended(self, request: Request) -> list[Request]:
        """The request computes no prompt any more, because it is through or has left; who waits no more."""
        _, node = self._computing.pop(request.slot, (None, None))
        if node is not None:
            self._coming.unlock(node)
            self._coming.evict(self._coming.evictable)
        free = self.advanced(request, ALL)
        self._held.pop(request.arrival, None)
        return free
