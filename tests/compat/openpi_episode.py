"""Runs in an environment of its own with openpi's client: one PushT episode, whose robot is on the other end of stdin
and stdout. Lines of JSON: an observation in (hex of the image, the state), a chunk of actions out."""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

host, port, prompt = sys.argv[1:4]
policy = WebsocketClientPolicy(host, int(port))
print(json.dumps(policy.get_server_metadata()), flush=True)
for line in sys.stdin:
    seen = json.loads(line)
    observation = {
        "observation/image": np.frombuffer(bytes.fromhex(seen["image"]), np.uint8).reshape(96, 96, 3),
        "observation/state": np.array(seen["state"], np.float32),
        "observation/block_pose": np.array(seen["pose"], np.float32),
        "prompt": prompt,
    }
    try:
        answer = {"actions": policy.infer(observation)["actions"].tolist()}
    except RuntimeError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
