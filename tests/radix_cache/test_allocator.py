import numpy as np
import pytest

from gapless.radix_cache.allocator import PageAllocator


def test_pages_are_handed_out_once_and_never_page_zero():
    allocator = PageAllocator(10)
    taken = np.concatenate([allocator.take(4), allocator.take(6)])
    assert sorted(taken.tolist()) == list(range(1, 11))
    assert allocator.free_pages == 0


@pytest.mark.parametrize("pages", [[3], [0], [11], [1, 1]])
def test_double_free_and_foreign_pages_are_refused(pages):
    allocator = PageAllocator(10)
    allocator.take(2)  # 1 and 2; page 3 is free
    with pytest.raises(ValueError, match=r"free already|named twice"):
        allocator.give_back(np.array(pages, np.int32))
    assert allocator.free_pages == 8


def test_the_newest_freed_pages_are_taken_first():
    allocator = PageAllocator(100)
    first = allocator.take(5)
    allocator.give_back(first)
    assert sorted(allocator.take(5).tolist()) == sorted(first.tolist())
