// An order service that Semel hands messages to: Node's standard library only, orders in memory.
//
//     node orders.mjs [--port 8080]
//
// A message is {"orderNo": "A-1", "amount": 12.5, "after": "A-0"}; "after" (optional) is an order that must be there first.
// GET /orders shows what was made of them. In a real service both maps are tables, written in one transaction.
import { createServer } from 'node:http';
import { parseArgs } from 'node:util';

const { values } = parseArgs({ options: { port: { type: 'string', default: '8080' } } });

const byMessage = new Map(); // Idempotency-Key -> order: makes a repeated message harmless
const byNumber = new Map();
let calls = 0;

/** Status and answer for one message. */
function handle(messageId, attempt, token, body) {
  calls += 1;
  // Done before? Asked first, so that a repeated message is answered as the first time, whatever has changed since.
  const done = byMessage.get(messageId);
  if (done) return [200, { orderNo: done.orderNo, repeated: true }];
  let message;
  try {
    message = JSON.parse(body.toString('utf8'));
  } catch {
    return [422, { error: 'not JSON' }]; // no later try can end otherwise: a dead letter
  }
  const { orderNo, amount, after } = message ?? {};
  const afterIsValid = after == null || typeof after === 'string';
  if (typeof orderNo !== 'string' || typeof amount !== 'number' || amount < 0 || !afterIsValid) {
    return [422, { error: 'orderNo and after must be strings and amount a number of at least 0' }];
  }
  if (after && !byNumber.has(after)) return [409, { error: 'the order before it is not there yet' }]; // not yet: comes again
  if (byNumber.has(orderNo)) return [422, { error: 'another message made an order of this number' }];
  const order = { messageId, orderNo, amount, attempt, token };
  byMessage.set(messageId, order);
  byNumber.set(orderNo, order);
  return [200, { orderNo, repeated: false }];
}

function answer(response, status, what) {
  const body = Buffer.from(JSON.stringify(what));
  response.writeHead(status, { 'Content-Type': 'application/json', 'Content-Length': body.length });
  response.end(body);
}

const server = createServer(async (request, response) => {
  const parts = [];
  try {
    for await (const part of request) parts.push(part); // always read it: the connection is used again
  } catch {
    return; // the caller is gone
  }
  if (request.url !== '/orders') return answer(response, 404, { error: 'POST or GET /orders' });
  if (request.method === 'GET') {
    const orders = [...byNumber.values()].sort((a, b) => (a.orderNo < b.orderNo ? -1 : 1));
    return answer(response, 200, { calls, orders });
  }
  if (request.method !== 'POST') return answer(response, 405, { error: 'POST or GET /orders' });
  const messageId = request.headers['idempotency-key'];
  if (!messageId) return answer(response, 400, { error: 'no Idempotency-Key' });
  if (request.headers['semel-tombstone'] === 'true') return answer(response, 200, { ignored: 'tombstone' });
  // The token stays below 2^53: a number holds it exactly.
  const attempt = Number(request.headers['semel-attempt'] ?? 1);
  const token = Number(request.headers['semel-fencing-token'] ?? 0);
  answer(response, ...handle(messageId, attempt, token, Buffer.concat(parts)));
});
server.keepAliveTimeout = 75_000; // connections stay open between messages
server.listen(Number(values.port), '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}/orders`);
});
