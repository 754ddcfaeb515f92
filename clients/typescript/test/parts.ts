/**
 * The parts of a stream as another middleware or a program without `streamText` sees them.
 *
 * Usage: node parts.ts < ASKED.json
 * Prints one JSON object: how many raw chunks came, without and with asking for them, and the metadata at the end.
 */
import { text } from 'node:stream/consumers';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { wrapLanguageModel } from 'ai';
import { Memory } from 'memd-client';
import { memoryMiddleware } from 'memd-client/ai-sdk';

const asked = JSON.parse(await text(process.stdin)) as { base_url: string };
const memd = createOpenAICompatible({ name: 'provider', baseURL: asked.base_url, fetch: new Memory().fetch });
const model = wrapLanguageModel({ model: memd('tiny'), middleware: memoryMiddleware });
const told: object[] = [];
for (const includeRawChunks of [undefined, false, true]) {
  const prompt = [{ role: 'user' as const, content: [{ type: 'text' as const, text: 'Hi.' }] }];
  const { stream } = await model.doStream({ prompt, ...(includeRawChunks !== undefined && { includeRawChunks }) });
  let raw = 0;
  let metadata: unknown;
  for await (const part of stream) {
    if (part.type === 'raw') raw += 1;
    if (part.type === 'finish') metadata = part.providerMetadata;
  }
  told.push({ raw, metadata });
}
console.log(JSON.stringify(told));
