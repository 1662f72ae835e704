"""Runs in an environment of its own with openpi's client: ``HOST PORT COUNT CAMERAS SIZE JOINTS`` in, and out a line of
JSON: milliseconds of every call as the client sees it, and of the policy's forward pass as the server says."""

import json
import sys
import time

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

host, port, count, cameras, size, joints = sys.argv[1], *map(int, sys.argv[2:])
policy = WebsocketClientPolicy(host, port)
rng, spent, model = np.random.default_rng(0), [], []
for _ in range(count):
    seen = {f"cam{i}": rng.integers(0, 256, (size, size, 3), np.uint8) for i in range(cameras)}
    seen["state"] = rng.normal(size=joints).astype(np.float32)
    began = time.perf_counter()
    answer = policy.infer(seen)
    spent.append(1e3 * (time.perf_counter() - began))
    model.append(answer["policy_timing"]["infer_ms"])
print(json.dumps({"spent": spent, "model": model}))
