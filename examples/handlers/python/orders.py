"""An order service that Semel hands messages to: standard library only, orders in SQLite.

    python3 orders.py [--port 8080] [--db orders.db]

A message is {"orderNo": "A-1", "amount": 12.5, "after": "A-0"}; "after" (optional) is an order that must be there first.
GET /orders shows what was made of them.
"""
import argparse
import json
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    message_id TEXT PRIMARY KEY,       -- the Idempotency-Key: makes a repeated message harmless
    order_no   TEXT NOT NULL UNIQUE,
    amount     REAL NOT NULL,
    attempt    INTEGER NOT NULL,       -- which attempt did it, for people
    token      INTEGER NOT NULL        -- the fencing token it had
)"""


class Orders:
    def __init__(self, path):
        self.lock = threading.Lock()
        self.db = sqlite3.connect(path, check_same_thread=False)
        self.db.execute(SCHEMA)
        self.calls = 0

    def handle(self, message_id, attempt, token, body):
        """Status and answer for one message."""
        with self.lock, self.db:  # one transaction: commits, or rolls back with the exception
            self.calls += 1
            # Done before? Asked first, so that a repeated message is answered as the first time, whatever has changed since.
            done = self.db.execute("SELECT order_no FROM orders WHERE message_id = ?", (message_id,)).fetchone()
            if done:
                return 200, {"orderNo": done[0], "repeated": True}
            try:
                message = json.loads(body)
                order_no, amount, after = message["orderNo"], float(message["amount"]), message.get("after")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                return 422, {"error": f"not an order: {error!r}"}  # no later try can end otherwise: a dead letter
            if not isinstance(order_no, str) or not isinstance(after, (str, type(None))) or not amount >= 0:
                return 422, {"error": "orderNo and after must be strings and amount at least 0"}
            if after and not self.db.execute("SELECT 1 FROM orders WHERE order_no = ?", (after,)).fetchone():
                return 409, {"error": "the order before it is not there yet"}  # not yet: comes again
            if self.db.execute("SELECT 1 FROM orders WHERE order_no = ?", (order_no,)).fetchone():
                return 422, {"error": "another message made an order of this number"}
            self.db.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", (message_id, order_no, amount, attempt, token))
            return 200, {"orderNo": order_no, "repeated": False}

    def shown(self):
        with self.lock:
            rows = self.db.execute("SELECT message_id, order_no, amount, attempt, token FROM orders ORDER BY order_no").fetchall()
            names = ("messageId", "orderNo", "amount", "attempt", "token")
            return {"calls": self.calls, "orders": [dict(zip(names, row)) for row in rows]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open between messages
    disable_nagle_algorithm = True

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))  # always read it: the connection is used again
        if self.path != "/orders":
            return self.answer(404, {"error": "POST /orders"})
        message_id = self.headers.get("Idempotency-Key")
        if not message_id:
            return self.answer(400, {"error": "no Idempotency-Key"})
        if self.headers.get("Semel-Tombstone") == "true":
            return self.answer(200, {"ignored": "tombstone"})
        self.answer(*self.server.orders.handle(message_id, int(self.headers.get("Semel-Attempt", 1)),
                                               int(self.headers.get("Semel-Fencing-Token", 0)), body))

    def do_GET(self):
        if self.path != "/orders":
            return self.answer(404, {"error": "GET /orders"})
        self.answer(200, self.server.orders.shown())

    def answer(self, status, what):
        body = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, default=8080, help="0: any free one")
    options.add_argument("--db", default=":memory:", help="file of the orders; default: in memory")
    given = options.parse_args()
    server = Server(("127.0.0.1", given.port), Handler)
    server.orders = Orders(given.db)
    print(f"listening on http://127.0.0.1:{server.server_port}/orders", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
