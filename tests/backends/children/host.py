"""What a server of ours does: opens a session on the command it is given. It says nothing of it."""

import asyncio
import sys

from gapless.backends.stdio import StdioBackends
from gapless.protocol.jsonrpc import Envelope, RequestId


class Nowhere:
    async def emit(
        self, data: bytes, envelope: Envelope, related: RequestId | None, more: tuple[bytes, ...] = ()
    ) -> None:
        pass

    async def lost(self, message: str, untaken: frozenset[RequestId] = frozenset()) -> None:
        pass


async def main() -> None:
    await StdioBackends(sys.argv[1:]).open(Nowhere())
    await asyncio.Event().wait()


asyncio.run(main())
