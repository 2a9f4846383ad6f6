/**
 * The official TypeScript SDK, with an event store that numbers its events.
 *
 * The SDK's documentation leaves a real store to the user: "`EventStore` is a two-method contract"
 * ("Resume a dropped stream" in
 * https://github.com/modelcontextprotocol/typescript-sdk/blob/main/docs/serving/sessions-state-scaling.md).
 * This keeps the contract in the plainest way, to tell what the transport loses from what the example's
 * store does: that one gives events of one millisecond a random order, and cannot resume the
 * standalone stream, for it reads the stream's name only up to the first `_`.
 *
 *     node numbered.mjs PORT DIRECTORY
 */

import { randomUUID } from 'node:crypto';

import { serve } from './ladder.mjs';

class NumberedStore {
    #name = randomUUID();
    #events = [];

    async storeEvent(stream, message) {
        this.#events.push({ stream, message });
        return this.#id(this.#events.length);
    }

    async replayEventsAfter(id, { send }) {
        const last = this.#events.findIndex((_, n) => this.#id(n + 1) === id);
        if (last < 0) return '';
        const { stream } = this.#events[last];
        for (let n = last + 1; n < this.#events.length; n++) {
            if (this.#events[n].stream === stream) await send(this.#id(n + 1), this.#events[n].message);
        }
        return stream;
    }

    #id(number) {
        return `${this.#name}:${number}`;
    }
}

serve(Number(process.argv[2]), () => new NumberedStore());
