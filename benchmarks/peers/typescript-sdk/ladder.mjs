/**
 * The ladder of examples/ladder_server.py for the TypeScript SDK, and the routes that keep its sessions.
 *
 * The routes are those of "Pin a client to a session":
 * https://github.com/modelcontextprotocol/typescript-sdk/blob/main/docs/serving/sessions-state-scaling.md
 */

import { randomUUID } from 'node:crypto';
import { appendFile, readFile } from 'node:fs/promises';
import { setTimeout as sleep } from 'node:timers/promises';

import { createMcpExpressApp } from '@modelcontextprotocol/express';
import { NodeStreamableHTTPServerTransport } from '@modelcontextprotocol/node';
import { McpServer, isInitializeRequest } from '@modelcontextprotocol/server';
import { z } from 'zod';

const JOURNAL = process.env.LADDER_JOURNAL;

function text(string) {
    return { content: [{ type: 'text', text: string }] };
}

function ladderServer() {
    const mcp = new McpServer(
        { name: 'ladder', version: '1.0.0' },
        { capabilities: { logging: {}, tools: { listChanged: true } } }
    );
    const ofNoCall = notification => mcp.server.notification(notification);

    mcp.registerTool(
        'ladder',
        {
            inputSchema: z.object({
                run: z.string(),
                rungs: z.number().int().default(20),
                delay: z.number().default(0.01),
                kinds: z.array(z.enum(['progress', 'log', 'changed', 'stray', 'ask'])).default(['progress', 'log']),
                pad: z.number().int().default(0)
            })
        },
        async ({ run, rungs, delay, kinds, pad }, ctx) => {
            await appendFile(JOURNAL, `${run}\n`);
            const progressToken = ctx.mcpReq._meta?.progressToken;
            const answers = [];
            for (let rung = 1; rung <= rungs; rung++) {
                await sleep(delay * 1000);
                const data = { run, rung, ...(pad ? { pad: '.'.repeat(pad) } : {}) };
                const log = { method: 'notifications/message', params: { level: 'info', logger: 'ladder', data } };
                switch (kinds[(rung - 1) % kinds.length]) {
                    case 'progress':
                        await ctx.mcpReq.notify({
                            method: 'notifications/progress',
                            params: { progressToken, progress: rung, total: rungs, message: run }
                        });
                        break;
                    case 'log':
                        await ctx.mcpReq.notify(log);
                        break;
                    case 'stray':
                        await ofNoCall(log);
                        break;
                    case 'changed':
                        await ofNoCall({ method: 'notifications/tools/list_changed', params: { _meta: { run, rung } } });
                        break;
                    case 'ask': {
                        // Not `elicitInput`: that asks on the standalone stream, as if it belonged to no call.
                        const requestedSchema = { type: 'object', properties: { rung: { type: 'integer' } } };
                        const params = { message: `${run} ${rung}`, requestedSchema };
                        const answer = await ctx.mcpReq.send({ method: 'elicitation/create', params });
                        answers.push(Number(answer.content?.rung ?? 0));
                        break;
                    }
                }
            }
            return text(JSON.stringify({ run, rungs, answers }));
        }
    );

    mcp.registerTool('runs', { inputSchema: z.object({ run: z.string() }) }, async ({ run }) => {
        const lines = (await readFile(JOURNAL, 'utf8').catch(() => '')).split('\n');
        return text(String(lines.filter(line => line === run).length));
    });

    return mcp;
}

/** Serve it on a port of 127.0.0.1, each session with the event store that `storeFor` gives it. */
export function serve(port, storeFor) {
    const sessions = new Map();
    const refuse = (res, status, code, message) =>
        res.status(status).json({ jsonrpc: '2.0', error: { code, message }, id: null });

    const app = createMcpExpressApp();
    app.all('/mcp', async (req, res) => {
        const id = req.headers['mcp-session-id'];
        if (id === undefined && isInitializeRequest(req.body)) {
            const transport = new NodeStreamableHTTPServerTransport({
                sessionIdGenerator: () => randomUUID(),
                eventStore: storeFor(),
                onsessioninitialized: id => sessions.set(id, transport)
            });
            transport.onclose = () => sessions.delete(transport.sessionId);
            await ladderServer().connect(transport);
            await transport.handleRequest(req, res, req.body);
        } else if (id === undefined) {
            refuse(res, 400, -32000, 'Bad Request: Session ID required');
        } else if (sessions.has(id)) {
            await sessions.get(id).handleRequest(req, res, req.body);
        } else {
            refuse(res, 404, -32001, 'Session not found');
        }
    });
    app.listen(port, '127.0.0.1');
}
