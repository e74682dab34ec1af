#!/usr/bin/env python3
"""DBOS on PostgreSQL: workflows a second.

  dbos_workflows.py URL new|duplicate THREADS SECONDS

URL is a database of its own, without tables or with DBOS's. A workflow returns 1 KiB. `new`: each call has an id of its own.
`duplicate`: every thread calls one that is done. Prints {"operations": n, "per_second": x}.
"""
import json
import logging
import os
import sys
import threading
import time
import uuid

logging.disable(logging.CRITICAL)
from dbos import DBOS, SetWorkflowID  # noqa: E402

url, kind, threads, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
DBOS(config={"name": "bench", "system_database_url": url, "run_admin_server": False, "log_level": "CRITICAL"})


@DBOS.workflow()
def work(number):
    return "x" * 1024


DBOS.launch()
counts, failed = [0] * threads, []


def call(workflow_id):
    with SetWorkflowID(workflow_id):
        if len(work(1)) != 1024:
            raise ValueError("another answer")


def run(n, end):
    same = str(uuid.uuid4())
    try:
        call(same)
        while time.perf_counter() < end:
            call(same if kind == "duplicate" else str(uuid.uuid4()))
            counts[n] += 1
    except Exception as failure:  # told at the end, by the main thread
        failed.append(failure)


for _ in range(20):  # connections and caches
    call(str(uuid.uuid4()))
start = time.perf_counter()
all_threads = [threading.Thread(target=run, args=(n, start + seconds)) for n in range(threads)]
for thread in all_threads:
    thread.start()
for thread in all_threads:
    thread.join()
elapsed = time.perf_counter() - start
if failed:
    print(f"dbos_workflows.py: {failed[0]}", file=sys.stderr, flush=True)
    os._exit(1)
print(json.dumps({"operations": sum(counts), "per_second": sum(counts) / elapsed}), flush=True)
os._exit(0)  # its threads do not end
