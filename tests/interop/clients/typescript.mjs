// The official TypeScript SDK 1.x, over its own Streamable HTTP.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ElicitRequestSchema } from "@modelcontextprotocol/sdk/types.js";

const steps = {};

async function step(name, work) {
  try {
    await work();
    steps[name] = "ok";
  } catch (error) {
    steps[name] = String(error);
  }
}

function expect(good, otherwise) {
  if (!good) throw new Error(otherwise);
}

const options = { timeout: 20_000 };
const client = new Client({ name: "interop", version: "1" }, { capabilities: { elicitation: {} } });
client.setRequestHandler(ElicitRequestSchema, async () => ({ action: "accept", content: { metres: 3 } }));
const transport = new StreamableHTTPClientTransport(new URL(process.argv[2]));

await step("initialize", () => client.connect(transport));
await step("list", async () => {
  const { tools } = await client.listTools();
  expect(tools.some((tool) => tool.name === "climb"), "climb is not listed");
});
for (const [name, rungs] of [["progress", 4], ["resume", 12]]) {
  await step(name, async () => {
    const seen = [];
    const call = { name: "climb", arguments: { steps: rungs, delay: 0.05 } };
    const onprogress = ({ progress }) => seen.push(progress);
    const result = await client.callTool(call, undefined, { ...options, onprogress });
    expect(result.content[0].text === `climbed ${rungs} steps`, `it ended with ${result.content[0].text}`);
    const wanted = Array.from({ length: rungs }, (_, index) => index + 1);
    expect(seen.join() === wanted.join(), `of ${rungs} steps it saw ${seen}`);
  });
}
await step("question", async () => {
  const result = await client.callTool({ name: "ask", arguments: {} }, undefined, options);
  expect(result.content[0].text === "a ladder of 3 m", "the answer was lost");
});
await step("cancellation", async () => {
  const abort = new AbortController();
  const begun = { ...options, signal: abort.signal, onprogress: () => abort.abort("enough") };
  await client.callTool({ name: "linger", arguments: {} }, undefined, begun).catch(() => undefined);
  for (let tries = 0; tries < 40; tries++) {
    const { content } = await client.callTool({ name: "cancellations", arguments: {} }, undefined, options);
    if (content[0].text === "1") return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("the server did not hear of it");
});
console.log(JSON.stringify(steps));
await client.close();
process.exit(0);
