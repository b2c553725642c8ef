#!/usr/bin/env bash
#SBATCH --job-name=mpmd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --time=24:00:00
#
# sbatch slurm.sh train.py --steps 1000
#
# Starts Ray on all nodes of the job, runs a Python program on the first of them, and stops Ray.
# Slurm runs this file on the first node. The environment that sbatch is called in has to be the same on all
# nodes: a shared file system, or `module load`, or a container.
set -euo pipefail

port=6379
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts%%$'\n'*}
others=$((SLURM_JOB_NUM_NODES - 1))

# The token keeps other users of these nodes from running programs on this Ray.
RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_MODE RAY_AUTH_TOKEN

on_nodes=(srun --overlap --no-kill --kill-on-bad-exit=0)
on_head=("${on_nodes[@]}" --nodes=1 --ntasks=1 --nodelist="$head")
on_others=("${on_nodes[@]}" --nodes="$others" --ntasks="$others" --exclude="$head")

address=$("${on_head[@]}" hostname --ip-address | awk '{ print $1 }')
export RAY_ADDRESS="$address:$port" # mpmd.launch reads it

trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT

"${on_head[@]}" ray start --head --block --node-ip-address="$address" --port="$port" --disable-usage-stats &
ray_on_head=$!
until ray status > /dev/null 2>&1; do
    kill -0 "$ray_on_head" # ends the job where Ray does not start
    sleep 1
done
if [ "$others" -gt 0 ]; then
    "${on_others[@]}" ray start --block --address="$RAY_ADDRESS" --disable-usage-stats &
fi

python "$@"
