/**
 * MemoryOut in the AI SDK's `providerMetadata`.
 *
 * Rule: it only reads. What a request tells memd goes through {@link Memory.fetch}: provider options have another key
 * for every provider, and `@ai-sdk/openai` takes no metadata of more than 512 characters.
 */
import type { LanguageModelV4Middleware, SharedV4ProviderMetadata } from '@ai-sdk/provider';
import { memoryHeaders, memoryOut, type MemoryOut } from './protocol.ts';

/**
 * A middleware for `wrapLanguageModel` that tells under `providerMetadata.memd` what memd told: the MemoryOut as
 * `memory_out`, which `memoryOut(providerMetadata?.memd)` reads, beside what {@link memoryHeaders} gives. Answers that
 * did not come through memd stay as they are.
 */
export const memoryMiddleware: LanguageModelV4Middleware = {
  specificationVersion: 'v4',

  async wrapGenerate({ doGenerate }) {
    const result = await doGenerate();
    return { ...result, ...told(result.providerMetadata, result.response?.headers, memoryOut(result.response?.body)) };
  },

  async wrapStream({ params, model }) {
    // The provider's own parts have no room for it: it is read from the raw chunks, which the caller need not see.
    const result = await model.doStream({ ...params, includeRawChunks: true });
    let out: MemoryOut | undefined;
    const stream = result.stream.pipeThrough(
      new TransformStream({
        transform(part, passing) {
          if (part.type === 'raw') {
            out ??= memoryOut(part.rawValue);
            if (params.includeRawChunks !== true) return;
          }
          const isLast = part.type === 'finish';
          passing.enqueue(isLast ? { ...part, ...told(part.providerMetadata, result.response?.headers, out) } : part);
        },
      }),
    );
    return { ...result, stream };
  },
};

function told(
  metadata: SharedV4ProviderMetadata | undefined,
  headers: Record<string, string> | undefined,
  out: MemoryOut | undefined,
): { providerMetadata?: SharedV4ProviderMetadata } {
  const memd = { ...memoryHeaders(headers), ...(out && { memory_out: out }) };
  return Object.keys(memd).length > 0 ? { providerMetadata: { ...metadata, memd } } : {};
}
