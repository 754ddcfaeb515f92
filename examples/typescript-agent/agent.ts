/**
 * An agent with a memory: it reads files, takes notes, looks things up and corrects what is no longer true.
 *
 *     node agent.ts
 *
 * Rule: all that lasts is in memd. The program keeps nothing but the messages of its own run.
 */
import { readFile } from 'node:fs/promises';
import { relative, resolve } from 'node:path';
import { cwd, env, stdin, stdout } from 'node:process';
import { createInterface } from 'node:readline';
import OpenAI from 'openai';
import { Memory, memoryOut, type InjectedChunk } from 'memd-client';

type Messages = OpenAI.ChatCompletionMessageParam[];
type Tool = {
  description: string;
  /** Each parameter with its description. All are strings; one with a question mark may be left out. */
  parameters: Record<string, string>;
  run: (given: Record<string, string>) => Promise<string>;
};

const STEPS_MAX = 12; // a model that calls tools in circles is stopped
const SYSTEM = `You help with the projects of one person. What they tell you that will matter later, put down with \
remember. Before you say that you do not know, ask search_memory. When something remembered is no longer true, use \
correct_memory with its id: of [mem:a3f9] that is a3f9.`;

const memory = new Memory({ topic: env['MEMD_TOPIC'] ?? 'agent', url: env['MEMD_URL'], token: env['MEMD_AUTH_TOKEN'] });
const openai = new OpenAI({
  baseURL: env['MEMD_BASE_URL'] ?? 'http://127.0.0.1:8765/v1',
  apiKey: env['MEMD_AUTH_TOKEN'] || '-',
  fetch: memory.fetch,
});

const tools: Record<string, Tool> = {
  read: {
    description: 'Read a text file below the folder in which you were started.',
    parameters: { path: 'its path' },
    async run({ path = '' }) {
      if (relative(cwd(), resolve(path)).startsWith('..')) return 'error: only files below this folder can be read';
      return readFile(path, 'utf8');
    },
  },
  search_memory: {
    description: 'What is remembered about a question, with ids. Nothing is changed.',
    parameters: { question: 'in full, as a person would ask it' },
    async run({ question = '' }) {
      const { chunks } = await memory.search(question, { limit: 5 });
      return chunks.map(({ id, content }) => `[mem:${id}] ${content}`).join('\n') || 'Nothing is remembered about it.';
    },
  },
  remember: {
    description: 'Put down a note that will be recalled in later conversations.',
    parameters: { content: 'one or two sentences that can be understood alone', 'title?': 'what it is about' },
    async run({ content = '', title }) {
      memory.remember({ content, source: 'agent', ...(title && { title }) });
      const { notes } = await memory.flush(); // now, to tell the model what became of it
      const ids = notes.flatMap((note) => note.chunk_ids ?? []).map((id) => `mem:${id}`);
      return `${notes.some((note) => note.duplicate) ? 'Known already' : 'Noted'}: ${ids.join(' ')}`;
    },
  },
  correct_memory: {
    description: 'Replace something remembered by what is true now, or take it out.',
    parameters: { id: 'such as a3f9', reason: 'why', 'content?': 'what is true now; without it nothing takes its place' },
    async run({ id = '', reason = '', content }) {
      memory.correct({ chunk_ids: [id], action: 'Update', reason, ...(content && { content }) });
      const { failed } = await memory.flush(); // at once: what a search found was never shown in a prompt
      return failed.length > 0 ? `error: there is nothing live with the id ${id}` : 'Corrected.';
    },
  },
};

const definitions = Object.entries(tools).map(([name, { description, parameters }]): OpenAI.ChatCompletionTool => {
  const properties = Object.entries(parameters).map(([key, meaning]) => [
    key.replace('?', ''),
    { type: 'string', description: meaning },
  ]);
  const required = Object.keys(parameters).filter((key) => !key.endsWith('?'));
  const schema = { type: 'object', properties: Object.fromEntries(properties), required, additionalProperties: false };
  return { type: 'function', function: { name, description, parameters: schema } };
});

/** What a tool says; an error is an answer too, from which the model can learn. */
async function called(name: string, given: string): Promise<string> {
  try {
    const tool = tools[name];
    return tool ? await tool.run(JSON.parse(given) as Record<string, string>) : `error: there is no tool ${name}`;
  } catch (error) {
    return `error: ${error instanceof Error ? error.message : String(error)}`;
  }
}

/** Answer the last message, tool after tool; the chunks that memory showed. */
async function answer(messages: Messages): Promise<InjectedChunk[]> {
  let shown: InjectedChunk[] = [];
  for (let step = 0; step < STEPS_MAX; step += 1) {
    const stream = openai.chat.completions.stream({ model: env['MODEL'] ?? 'local', messages, tools: definitions });
    for await (const chunk of stream) {
      stdout.write(chunk.choices[0]?.delta.content ?? '');
      shown = memoryOut(chunk)?.injected_chunks ?? shown;
    }
    const { content, tool_calls } = await stream.finalMessage();
    messages.push({ role: 'assistant', content, ...(tool_calls?.length && { tool_calls }) });
    if (!tool_calls?.length) return shown;
    for (const call of tool_calls) {
      if (call.type !== 'function') continue;
      const result = await called(call.function.name, call.function.arguments);
      stdout.write(`(${call.function.name}) `);
      messages.push({ role: 'tool', tool_call_id: call.id, content: result });
    }
  }
  return shown;
}

/** `/good ID` and `/wrong ID [WHAT IS TRUE]`; it goes out with the next message. */
function corrected(line: string): boolean {
  const [, word, id, content] = /^\/(good|wrong) (?:mem:)?(\w+) ?(.*)$/.exec(line) ?? [];
  if (!id) return false;
  const said = { chunk_ids: [id], reason: 'the user says so' };
  if (word === 'good') memory.correct({ ...said, action: 'Helpful' });
  else memory.correct({ ...said, action: 'Update', ...(content && { content }) });
  return true;
}

const messages: Messages = [{ role: 'system', content: SYSTEM }];
stdout.write('> ');
for await (const line of createInterface({ input: stdin })) {
  if (line.trim() && !corrected(line)) {
    messages.push({ role: 'user', content: line });
    const shown = await answer(messages);
    stdout.write(`\n${shown.map(({ id }) => `[mem:${id}]`).join(' ')}\n`);
  }
  stdout.write('> ');
}
stdout.write('\n');
