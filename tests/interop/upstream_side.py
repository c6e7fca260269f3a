"""Upstream's SDK doing what it is told. Runs in the peer's environment.

Standard input: one JSON object with the connection (``url, http_url, model``) and ``steps``, each
``{action: "store"|"retrieve", tokens, salt, shape, seed}``. Prints one JSON object a step.
"""

import json
import sys

import lmcache.sdk.kvcache as lmc_sdk
import samples
import torch

job = json.load(sys.stdin)
context = lmc_sdk.connect(job["url"], job["http_url"], job["model"], timeout=60.0)
try:
    for step in job["steps"]:
        if step["action"] == "store":
            kv = samples.random_kv(step["shape"], getattr(torch, job["dtype"]), step["seed"])
            answer = {"stored": context.store(kv, step["tokens"], step["salt"])}
        else:
            kv = context.retrieve(step["tokens"], step["salt"])
            found = kv is not None
            answer = {
                "shape": list(kv.shape) if found else None,
                "digest": samples.digest(kv) if found else None,
            }
        print("answer " + json.dumps(answer), flush=True)
finally:
    context.close()
