/**
 * The official MCP client with a grant that lacks the right of a tool.
 *
 * Usage: node mcp_step_up.ts URL < ASKED.json
 * Prints one JSON object: what the call brought, and the address that it would open in a browser.
 */
import { text } from 'node:stream/consumers';
import type { OAuthClientProvider } from '@modelcontextprotocol/sdk/client/auth.js';
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import type { OAuthTokens } from '@modelcontextprotocol/sdk/shared/auth.js';

const { tokens, client_id } = JSON.parse(await text(process.stdin)) as { tokens: OAuthTokens; client_id: string };
let kept = tokens;
let opened = '';
const authProvider: OAuthClientProvider = {
  redirectUrl: 'http://localhost:5050/callback',
  clientMetadata: { redirect_uris: ['http://localhost:5050/callback'] },
  clientInformation: () => ({ client_id }),
  tokens: () => kept,
  saveTokens: (given) => void (kept = given),
  redirectToAuthorization: (address) => void (opened = address.href),
  saveCodeVerifier: () => undefined,
  codeVerifier: () => '',
};
const client = new Client({ name: 'memd-tests', version: '1.0.0' });
await client.connect(new StreamableHTTPClientTransport(new URL(process.argv[2] ?? ''), { authProvider }));
const told = await client.callTool({ name: 'remember', arguments: { content: 'The keeper is Ada.' } }).then(
  ({ content }) => (content as { text: string }[])[0]?.text,
  (error: Error) => error.constructor.name,
);
await client.close();
console.log(JSON.stringify({ told, opened }));
