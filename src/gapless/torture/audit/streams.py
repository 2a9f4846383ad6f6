"""A session's events stream by stream, for clients that were sent them so (section 7)."""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

from gapless.log.base import SessionKey
from gapless.protocol.cursor import MAX_SEQ
from gapless.torture.audit.auditor import Source
from gapless.torture.audit.chain import BLOCK

__all__ = ["event_ids"]

_PAGE = 256 * 1024


async def event_ids(source: Source, token: str) -> dict[int, list[str]]:
    """The IDs of all events that a log holds of the session a token names, in order, by stream."""
    key = SessionKey(sha256(token.encode()).digest())
    found: defaultdict[int, list[str]] = defaultdict(list)
    after = 0
    while True:
        page, upto = await source.read(key, after, MAX_SEQ, _PAGE)
        if upto <= after:
            return found
        for block in BLOCK.finditer(page):
            if int(block[1]) > after:
                found[int(block[2])].append(b".".join(block.groups()[:3]).decode())
        after = upto
