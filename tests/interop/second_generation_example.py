"""A second-generation program, as users of LMCache 0.5.6 write it: keep what queries point at.

Arguments: the server's ZMQ and HTTP addresses, the engine's, the model, a salt, prompt length,
requests, tokens a chunk. The test runs it under upstream's SDK as it is, and under ours with only
the word ``lmcache`` changed in its import lines.
"""

import json
import sys
import urllib.request

import lmcache.sdk as lmc_sdk
import torch
from lmcache.sdk.batch import LMCacheBatchedStream
from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache.sdk.context import LMCacheSDKError
from lmcache.sdk.request import TokenEvent, create_request

url, http_url, engine_url, model, salt = sys.argv[1:6]
prompt_length, num_requests, chunk = map(int, sys.argv[6:9])
KV, QUERY = LMCacheSDKCacheKind.KV, LMCacheSDKCacheKind.QUERY


def post_completion(prompt_token_ids, sampling_params, cache_salt):
    body = {"model": model, "prompt": prompt_token_ids, "stream": True, "cache_salt": cache_salt}
    request = urllib.request.Request(
        engine_url + "/v1/completions",
        json.dumps({**body, **sampling_params}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                text = json.loads(data)["choices"][0]["text"]
                yield TokenEvent(int(text.removeprefix("token_id:")), text)


def keep_half_by_queries(tensors, tokens):
    kv, queries = tensors[KV], tensors[QUERY].float()
    by_token = queries.mean(dim=-1).flatten(0, -2).mean(dim=0)
    scores = by_token.view(-1, chunk).mean(dim=1)
    kept = sorted(torch.topk(scores, len(scores) // 2).indices.tolist())
    positions = [c * chunk + i for c in kept for i in range(chunk)]
    return kv[:, :, torch.tensor(positions)].contiguous(), [tokens[p] for p in positions]


contexts = [
    lmc_sdk.kvcache.connect(url, http_url, model),
    lmc_sdk.connect(kind=QUERY, url=url, http_url=http_url, model_name=model, timeout=30.0),
]
batch = LMCacheBatchedStream()
for number in range(num_requests):
    prompt = [(number * 131 + i * 7) % 1000 for i in range(prompt_length)]
    batch.add(
        create_request(
            contexts=contexts,
            post_completion=post_completion,
            prompt_token_ids=prompt,
            cache_salt=salt,
        )
    )
streams = list(batch.request_streams.values())

reports = {"prefill": batch.prefill(sampling_params={"temperature": 0.0})}
queries = streams[0].retrieve(kind=QUERY, timeout=10.0, poll_interval=0.1)
reports["modify"] = batch.modify(keep_half_by_queries, timeout=10.0, poll_interval=0.1)
reports["decode"] = batch.decode({"temperature": 0.0, "max_tokens": 5})
for report in reports.values():
    report.emit()

result = {
    "metrics": {
        name: {section: sorted(values) for section, values in report.to_dict()["metrics"].items()}
        for name, report in reports.items()
    },
    "config": reports["decode"].to_dict()["metrics"]["config"],
    "counts": [
        reports["prefill"].to_dict()["metrics"]["results"]["input_tokens"],
        reports["decode"].to_dict()["metrics"]["results"]["output_tokens"],
    ],
    "decoded": [stream.decoded_tokens for stream in streams],
    "texts": [stream.output_text for stream in streams],
    "tokens": [stream.tokens for stream in streams],
    "suffixes": [stream.suffix_tokens for stream in streams],
    "done": [stream.is_done for stream in streams],
    "same": batch.get_request_stream(streams[1].request_stream_id) is streams[1],
    "kinds": [context.kind.value for context in contexts],
    "chunk": contexts[0].chunk_size,
    "queries shape": list(queries.shape[-3:]),  # one that a client stored has no first dimension
    "queries sum": float(queries.float().sum()),
}
kv = contexts[0].retrieve(streams[0].tokens, salt, request_configs=None)
result["kv shape"] = list(kv.shape)
result["kv sum"] = float(kv.float().sum())
result["stored again"] = contexts[0].store(kv, streams[0].tokens[: kv.shape[2]], cache_salt=salt)
result["unknown"] = contexts[0].retrieve([1] * chunk, salt)
try:
    contexts[0].store(kv, [1, 2, 3], salt)
except LMCacheSDKError as error:
    result["caught"] = isinstance(error, RuntimeError)
for context in contexts:
    context.close()
print("result " + json.dumps(result))
