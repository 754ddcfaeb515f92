/**
 * Options of a `Memory`, each tried on its own.
 *
 * Usage: node options.ts < ASKED.json
 * Prints one JSON list: the error that each threw, null if none.
 */
import { text } from 'node:stream/consumers';
import { Memory } from 'memd-client';
import type { MemoryOptions } from 'memd-client';

const asked = JSON.parse(await text(process.stdin)) as MemoryOptions[];
const told = asked.map((options) => {
  try {
    new Memory(options);
    return null;
  } catch (error) {
    return error instanceof TypeError ? error.message : `no TypeError: ${String(error)}`;
  }
});
console.log(JSON.stringify(told));
