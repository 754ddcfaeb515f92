/**
 * What memd and its client tell each other, and a `fetch` that tells it.
 *
 * @packageDocumentation
 */
export { Memory, type Flushed } from './memory.ts';
export type { MemoryMode, MemoryOptions } from './options.ts';
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
export {
  MemdError,
  RightMissing,
  TooManyAttempts,
  UnknownToken,
  type FoundChunk,
  type LogEvent,
  type LogPage,
  type LogPart,
  type Origin,
  type SearchAnswer,
  type SearchFilter,
} from './routes.ts';
