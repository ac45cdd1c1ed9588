"""Freed blocks of an allocator model: their order, against a sorted list."""

import random

from lightning_unified.hardware.allocators.pools import Block, Freed, Home


def by_order(block: Block) -> tuple[int, int]:
    return block.size, block.at


def test_freed_blocks_keep_the_order_of_a_sorted_list() -> None:
    draws, freed, expected = random.Random(0), Freed(), list[Block]()
    home = Home(1 << 20, small=True)
    for at in range(2000):
        size = draws.choice((512, 1024, 4096, draws.randrange(1, 9000)))
        if draws.random() < 0.6:
            block = Block(size, home, draws.randrange(1 << 30) * 2000 + at)
            freed.add(block)
            expected = sorted([*expected, block], key=by_order)
        else:
            fitting = [one for one in expected if size <= one.size <= size + 2048]
            assert freed.pop(size, most=size + 2048) is (fitting[0] if fitting else None)
            expected = [one for one in expected if one is not (fitting or [None])[0]]
        assert freed.blocks == expected
        assert list(freed.from_size(size)) == [one for one in expected if one.size >= size]
        assert freed.smallest(size) is next((one for one in expected if one.size >= size), None)


def test_a_discarded_block_is_the_one_given() -> None:
    home, freed = Home(1 << 20, small=True), Freed()
    first, second = Block(512, home, 64), Block(512, home, 64)
    freed.add(first)
    freed.add(second)
    freed.discard(second)
    assert freed.blocks == [first]
    freed.discard(first)
    assert freed.blocks == []
    assert freed.smallest(1) is None
