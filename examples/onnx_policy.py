"""Run an exported policy with onnxruntime and numpy alone: no torch, no Ray, nothing of this package.

    rllib export runs/NAME policy --onnx
    python examples/onnx_policy.py policy/policy.onnx < observations.jsonl

Each line of the input is one observation as a JSON list; each line of the output is its action. With
``--time`` it measures how long a call takes instead.
"""

import argparse
import json
import sys
import time

import numpy as np
import onnxruntime


class OnnxPolicy:
    """A policy that is called with an observation, or with a batch of them."""

    def __init__(self, path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # A small network gains nothing from more.
        self._session = onnxruntime.InferenceSession(
            path, options, providers=["CPUExecutionProvider"]
        )
        self.observation_size = self._session.get_inputs()[0].shape[-1]

    def __call__(self, observation):
        observation = np.asarray(observation, np.float32)
        batch = np.atleast_2d(observation)
        (actions,) = self._session.run(["action"], {"observation": batch})
        return actions[0] if observation.ndim == 1 else actions


def measure(policy, calls=10_000):
    observations = np.random.default_rng(0).standard_normal((calls, policy.observation_size))
    observations = observations.astype(np.float32)
    policy(observations[0])
    started = time.perf_counter()
    for observation in observations:
        policy(observation)
    microseconds = 1e6 * (time.perf_counter() - started) / calls
    print(f"{microseconds:.0f} microseconds per call")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the policy.onnx that `rllib export --onnx` has written")
    parser.add_argument("--time", action="store_true", help="measure how long a call takes")
    arguments = parser.parse_args()
    policy = OnnxPolicy(arguments.file)
    if arguments.time:
        measure(policy)
        return
    for line in sys.stdin:
        print(json.dumps(policy(json.loads(line)).tolist()), flush=True)


if __name__ == "__main__":
    main()
