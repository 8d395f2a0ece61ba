"""The memory of keys and values, lent in blocks of a few tokens.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, section 4: the
blocks of a request may be anywhere, so that no memory is lost between requests of different length.
"""

from __future__ import annotations

BLOCK_SIZE = 16
"""Number of tokens whose keys and values are in one block."""


class BlockPool:
    """The pool of free blocks. Block 0 is never lent: padding rows of a batch write there.

    Args:
        num_blocks: number of blocks that can be lent.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"there must be at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, count: int) -> list[int] | None:
        """Return `count` blocks, or None if fewer are free."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        """Take blocks back and empty the list, so that they cannot be given back twice."""
        self._free += reversed(blocks)
        blocks.clear()


def blocks_for(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK_SIZE)
