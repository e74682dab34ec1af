#!/usr/bin/env python3
"""AWS Lambda Powertools for Python on a Redis server: calls of an idempotent function a second.

  powertools.py SOCKET new|duplicate SECONDS

`new`: each call has a payload of its own. `duplicate`: the same one over and over. The function returns 1 KiB. One thread, without
the library's local cache (a process restart or another process would not have it). Prints {"operations": n, "per_second": x}.
"""
import json
import os
import sys
import time
import uuid
import warnings

warnings.filterwarnings("ignore")  # the layer announces its new name
os.environ.update(POWERTOOLS_SERVICE_NAME="bench", AWS_LAMBDA_FUNCTION_NAME="bench")

import redis  # noqa: E402
from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function  # noqa: E402
from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer  # noqa: E402

socket_path, kind, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
layer = RedisCachePersistenceLayer(client=redis.Redis(unix_socket_path=socket_path, decode_responses=True, socket_timeout=10))
executed = 0


@idempotent_function(data_keyword_argument="payload", persistence_store=layer,
                     config=IdempotencyConfig(expires_after_seconds=600, use_local_cache=False))
def handle(payload):
    global executed
    executed += 1
    return {"answer": "x" * 1024}


same = str(uuid.uuid4())
handle(payload={"id": same})
executed = operations = 0
start = time.perf_counter()
while time.perf_counter() - start < seconds:
    handle(payload={"id": same if kind == "duplicate" else str(uuid.uuid4())})
    operations += 1
elapsed = time.perf_counter() - start
if executed != (0 if kind == "duplicate" else operations):
    sys.exit(f"powertools.py: {executed} of {operations} calls were executed")
print(json.dumps({"operations": operations, "per_second": operations / elapsed}))
