/**
 * What every runtime has to do with memd-client, in JavaScript that all of them run: `runtime.mjs` and `runtime.cjs`
 * bring the packages, the one by `import`, the other by `require`.
 */
exports.round = async function ({ Memory, MemdError, memoryHeaders, memoryOut }, { memoryMiddleware }, ai, asked) {
  const { base_url, own_url, note, question, replacement } = asked;
  const memory = new Memory({ topic: 'runtimes', session: 'round', url: own_url });
  const url = `${base_url}/v1/chat/completions`;

  async function ask(content, stream) {
    const init = { method: 'POST', body: JSON.stringify({ model: 'tiny', stream, messages: [{ role: 'user', content }] }) };
    const answer = await (stream ? memory.fetch(new Request(url, init)) : memory.fetch(url, init));
    const text = await answer.text();
    const bodies = stream ? text.match(/(?<=^data: )\{.*$/gm) : [text];
    const out = bodies.map((body) => memoryOut(JSON.parse(body))).find(Boolean);
    return [memoryHeaders(answer.headers)?.status, out?.injected_chunks.map((chunk) => chunk.id)];
  }

  memory.remember({ content: note, title: 'Lamp' });
  const { notes } = await memory.flush();
  const asked_first = [await ask(question, false), await ask(question, true)];
  const [found] = (await memory.search(question)).chunks;
  memory.correct({ chunk_ids: [found.id], action: 'Update', reason: 'it moved', content: replacement });
  const thanked = await ask('Thank you.', true);
  const pending = memory.pending.length;
  const live = (await memory.log()).events.filter((event) => event.live).map((event) => event.content);
  const refused = await memory.search('').catch((error) => [error instanceof MemdError, error.status]);
  const provider = ai.createOpenAICompatible({ name: 'memd', baseURL: `${base_url}/v1`, fetch: memory.fetch });
  const model = ai.wrapLanguageModel({ model: provider('tiny'), middleware: memoryMiddleware });
  const { providerMetadata } = await ai.generateText({ model, prompt: question, maxRetries: 0 });
  const by_ai_sdk = memoryOut(providerMetadata?.memd)?.injected_chunks.map((chunk) => chunk.id);
  let wrong;
  try {
    new Memory({ topic: 'a b' });
  } catch (error) {
    wrong = error.constructor.name;
  }
  const ids = notes.flatMap((one) => one.chunk_ids);
  return { asked_first, found: [found.id, found.content], thanked, pending, live, refused, by_ai_sdk, wrong, ids };
};
