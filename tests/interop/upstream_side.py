"""Upstream's SDK doing what it is told. Runs in the peer's environment.

Standard input: one JSON object with the connection (``url, http_url, model``) and ``steps``, each
``{action: "store"|"retrieve", tokens, salt, shape, seed}``. Prints one JSON object a step.
"""

import json
import sys

import lmcache.sdk.kvcache as sdk
import samples
import torch

job = json.load(sys.stdin)
context = sdk.connect(job["url"], job["http_url"], job["model"], timeout=60.0)


def call(name, *arguments):
    """Do what the context has a method for, or in 0.5.2 the module a function."""
    if hasattr(context, name):
        return getattr(context, name)(*arguments)
    return getattr(sdk, name)(context, *arguments)


try:
    for step in job["steps"]:
        if step["action"] == "store":
            kv = samples.random_kv(step["shape"], getattr(torch, job["dtype"]), step["seed"])
            answer = {"stored": call("store", kv, step["tokens"], step["salt"])}
        else:
            kv = call("retrieve", step["tokens"], step["salt"])
            found = kv is not None
            answer = {
                "shape": list(kv.shape) if found else None,
                "digest": samples.digest(kv) if found else None,
            }
        print("answer " + json.dumps(answer), flush=True)
finally:
    context.close()
