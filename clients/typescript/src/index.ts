/**
 * What memd and its client tell each other, and a `fetch` that tells it.
 *
 * @packageDocumentation
 */
export { Memory, type MemoryOptions } from './memory.ts';
export {
  memoryHeaders,
  memoryOut,
  type Correction,
  type InjectedChunk,
  type MemoryFilter,
  type MemoryHeaders,
  type MemoryIn,
  type MemoryOut,
  type Note,
  type NoteOut,
  type Signal,
} from './protocol.ts';
