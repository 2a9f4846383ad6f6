/**
 * The official TypeScript SDK, with the event store of its examples.
 *
 * "Resume a dropped stream" in
 * https://github.com/modelcontextprotocol/typescript-sdk/blob/main/docs/serving/sessions-state-scaling.md
 * says to pass an `eventStore`, and names `InMemoryEventStore` of its examples as "a complete
 * `EventStore` reference implementation". The packages of version 2 do not have it; that of version 1
 * does, with the same code, and is installed for that one file. A store for each session is how that
 * version's example server, `simpleStreamableHttp`, has it.
 *
 *     node server.mjs PORT DIRECTORY
 */

import { InMemoryEventStore } from '@modelcontextprotocol/sdk/examples/shared/inMemoryEventStore.js';

import { serve } from './ladder.mjs';

serve(Number(process.argv[2]), () => new InMemoryEventStore());
