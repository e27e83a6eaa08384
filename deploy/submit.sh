#!/usr/bin/env bash
# Submits a run to a cluster whose dashboard is at RAY_API_SERVER_ADDRESS: bash deploy/submit.sh
#
# The run goes on when this ends or the connection is lost: `ray job logs ID`, `ray job stop ID`, which
# sends SIGTERM: a run takes some seconds for its last checkpoint, so let it have a minute.
set -euo pipefail
export RAY_API_SERVER_ADDRESS=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}

ray job submit --no-wait \
  --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' \
  -- \
  rllib train --algo RERPI --env dm_control/humanoid-run-v0 \
  --address auto --storage-path /runs --name humanoid-run --quiet \
  --num-env-runners 30 --num-learners 2 --num-gpus 1 \
  --set num_envs_per_env_runner=4 --set num_replay_shards=4
