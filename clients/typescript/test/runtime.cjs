/**
 * memd-client in a runtime, required. Usage: RUNTIME runtime.cjs ASKED; prints one JSON object.
 */
const process = require('node:process');
const ai = { ...require('ai'), ...require('@ai-sdk/openai-compatible') };
const { round } = require('./runtime_round.cjs');

round(require('memd-client'), require('memd-client/ai-sdk'), ai, JSON.parse(process.argv[2])).then((told) =>
  console.log(JSON.stringify(told)),
);
