"""The prefix index: which block holds which piece of which prefix, found by a chain of digests.

A full block is known by ``SHA-256(digest of the block before it, its token ids)``; the chain starts from a digest of
the adapter version and the cache salt. A digest therefore stands for everything that determines the keys and values in
the block: every token up to its end, hence also their positions, the adapter and the salt. Equal digests mean equal
content (a collision of SHA-256 is not to be had), so nothing else is stored or compared, and two prefixes under
different salts never meet.
"""

from __future__ import annotations

from hashlib import sha256

__all__ = ["PrefixIndex", "extend_chain", "root_digest"]

_DOMAIN = b"octavo prefix 1"


def root_digest(adapter: str | None, cache_salt: str | None) -> bytes:
    """Where the chain of a request starts: absent and empty differ, and no pair of values reads as another pair."""
    parts = [_DOMAIN]
    for value in (adapter, cache_salt):
        if value is None:
            parts.append(b"-")
        else:
            encoded = value.encode("utf-8", "surrogatepass")
            parts.append(b"+%d:%b" % (len(encoded), encoded))
    return sha256(b"".join(parts)).digest()


def extend_chain(digests: list[bytes], root: bytes, tokens: bytes, block_bytes: int) -> None:
    """Append the digests of the full blocks in ``tokens`` (int32 ids as bytes) that follow those already there."""
    parent = digests[-1] if digests else root
    for offset in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = sha256(parent + tokens[offset : offset + block_bytes]).digest()
        digests.append(parent)


class PrefixIndex:
    """Digest to block and back, one block per digest. A block is here only with every block before it in its chain.

    Whoever holds a block holds those before it, and a chain is given up end first, so the pool always evicts a block
    before its parent.
    """

    __slots__ = ("block_of", "digest_of", "parent_of")

    def __init__(self, num_blocks: int) -> None:
        self.block_of: dict[bytes, int] = {}
        self.digest_of: list[bytes | None] = [None] * num_blocks
        self.parent_of: list[bytes | None] = [None] * num_blocks

    def __len__(self) -> int:
        return len(self.block_of)

    def match(self, digests: list[bytes], limit: int, hint: int = 0) -> int:
        """How many of the first ``limit`` blocks of the chain are here; ``hint`` is an earlier answer to start from."""
        known = self.block_of
        count = min(hint, limit)
        while count and digests[count - 1] not in known:
            count -= 1
        while count < limit and digests[count] in known:
            count += 1
        return count

    def add(self, digest: bytes, parent: bytes | None, block: int) -> None:
        """Record that ``block`` holds the content of ``digest``; ``parent`` is None at the start of a chain."""
        self.block_of[digest] = block
        self.digest_of[block] = digest
        self.parent_of[block] = parent

    def remove(self, block: int) -> None:
        """Forget what ``block`` holds."""
        digest = self.digest_of[block]
        if digest is not None:
            del self.block_of[digest]
            self.digest_of[block] = None
            self.parent_of[block] = None
