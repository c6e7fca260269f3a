"""A first-generation program, as users of LMCache 0.5.2 write it: drop the middle half, decode on.

Arguments: the server's ZMQ and HTTP addresses, the engine's, the model, prompt length, requests.
The test runs it under upstream's SDK as it is, and under ours with only the import lines changed.
"""

import json
import sys
import urllib.request

import lmcache.sdk.batch as lmc_batch
import lmcache.sdk.kvcache as lmc_sdk
import lmcache.sdk.stream as lmc_stream
import torch

url, http_url, engine_url, model, salt = sys.argv[1:6]
prompt_length, num_requests, chunk = map(int, sys.argv[6:9])


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
                yield lmc_stream.TokenEvent(int(text.removeprefix("token_id:")), text)


def drop_middle_half(kv, tokens):
    chunks = len(tokens) // chunk
    kept = [c for c in range(chunks) if c < chunks // 4 or c >= chunks - chunks // 4]
    positions = [c * chunk + i for c in kept for i in range(chunk)]
    return kv[:, :, torch.tensor(positions)].contiguous(), [tokens[p] for p in positions]


ctx = lmc_sdk.connect(url, http_url, model)
batch = lmc_batch.LMCacheBatchedStream()
streams = []
for number in range(num_requests):
    prompt = [(number * 131 + i * 7) % 1000 for i in range(prompt_length)]
    streams.append(lmc_stream.create_request(ctx, post_completion, prompt, cache_salt=salt))
    batch.add(streams[-1])

reports = {
    "prefill": batch.prefill({"temperature": 0.0}),
    "modify": batch.modify(drop_middle_half),
    "decode": batch.decode({"temperature": 0.0, "max_tokens": 5}),
}
for report in reports.values():
    report.emit()

result = {
    "metrics": {
        name: {section: sorted(values) for section, values in report.to_dict()["metrics"].items()}
        for name, report in reports.items()
    },
    "counts": [
        reports["prefill"].to_dict()["metrics"]["results"]["input_tokens"],
        reports["decode"].to_dict()["metrics"]["results"]["output_tokens"],
    ],
    "decoded": [stream.decoded_tokens() for stream in streams],
    "texts": [stream.output_text() for stream in streams],
    "tokens": [list(stream.tokens) for stream in streams],
    "done": [stream.is_done() for stream in streams],
}
kv = lmc_sdk.retrieve(ctx, streams[0].tokens, salt)
result["kv shape"] = list(kv.shape)
result["kv sum"] = float(kv.float().sum())
result["stored again"] = lmc_sdk.store(ctx, kv, streams[0].tokens[: kv.shape[2]], salt)
lmc_sdk.close(ctx)
print("result " + json.dumps(result))
