#!/usr/bin/env bash
# One run on several nodes of a Slurm cluster: sbatch deploy/slurm.sh
#
# Set the sizes here; the options of rllib at the end have to fit into them. The directory from which
# this is submitted, with its .venv (make setup), has to be the same on all nodes, and so has `runs/`.
#SBATCH --job-name=rerpi
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=1
#SBATCH --time=24:00:00
# SIGTERM makes rllib write a checkpoint and end with code 143; then the job is queued again.
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

# Nodes have other users, too, so Ray asks for a token, on all nodes: `ray start` on its own decides that
# for the head alone, by whether there is one. It is in ~/.ray, the same directory on all nodes.
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null

name=slurm-$SLURM_JOB_ID
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
port=$((10000 + SLURM_JOB_ID % 20000)) # Another job may have a node of its own Ray here.
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):$port

# Ray on each node, in the foreground of a step of its own, which ends with the job.
start=(ray start --block --num-cpus "$SLURM_CPUS_PER_TASK")
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" "${start[@]}" --head --port "$port" &
until ray status --address "$address" > /dev/null 2>&1; do sleep 2; done
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$node" "${start[@]}" --address "$address" &
done

if [[ -d runs/$name ]]; then
  what=(--resume "runs/$name") # The job was queued again.
else
  what=(--algo RERPI --env dm_control/humanoid-run-v0 --storage-path "$PWD/runs" --name "$name")
fi
code=0
rllib train "${what[@]}" --address "$address" --quiet \
  --num-env-runners 50 --num-learners 4 --num-gpus 1 \
  --set num_envs_per_env_runner=4 --set num_replay_shards=4 &
training=$!
trap 'kill -TERM "$training"' TERM
# A signal ends the first wait, not the run.
wait "$training" || code=$?
if kill -0 "$training" 2> /dev/null; then
  code=0
  wait "$training" || code=$?
fi
if [[ $code == 143 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
