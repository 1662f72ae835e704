"""Run by the interpreter of a robot, which has numpy, grpcio and protobuf: plays until so many chunks have taken over.

``python robot.py ADDRESS``; the last line printed is what it saw, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time

import numpy as np

from omni_loop.client import ChunkPlayer, connect
from omni_loop.client.images import resize, to_uint8
from omni_loop.errors import MissingExtra, TensorError


def main(address: str) -> None:
    absent = [name for name in ("torch", "PIL", "pydantic", "zarr") if importlib.util.find_spec(name) is None]
    seen = {"image": np.full((16, 16, 3), 1.2), "agent_pos": np.ones((2, 2), np.float32)}
    actions, until = [], time.monotonic() + 60
    with ChunkPlayer(address, "toy", watchdog="hold") as player:
        while player.stats().chunks < 5 and time.monotonic() < until:
            player.observe(seen)
            played = player.next_action()
            if played.source == "chunk":
                actions.append(float(played.action[0]))
            time.sleep(0.002)
        stats = player.stats()
    with connect(address) as client, client.open("toy") as session:
        image = resize(to_uint8(seen["image"]), 8, 8)
        result = session.infer({"image": image, "agent_pos": seen["agent_pos"]}, 0)
        joined = session.infer({"image": image, "agent_pos": seen["agent_pos"]}, 1, executed_through=2)
        try:
            session.infer({"image": seen["image"], "agent_pos": seen["agent_pos"]}, 2)
        except TensorError as error:
            refused = error.text
        try:
            with client.open("toy", image_encoding="jpeg") as lossy:
                lossy.infer({"image": image, "agent_pos": seen["agent_pos"]}, 0)
            jpeg = "sent"
        except MissingExtra as error:
            jpeg = error.text
    print(
        json.dumps(
            {
                "python": list(sys.version_info[:2]),
                "numpy": np.__version__,
                "absent": absent,
                "actions": actions,
                "chunks": stats.chunks,
                "shape": list(result.chunk.actions.shape),
                "first": joined.chunk.first_step,
                "refused": refused,
                "jpeg": jpeg,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
