#!/usr/bin/env bash
#
#   sbatch slurm/train_70b.sh                                                           70B on 256 GPUs
#   sbatch --nodes 8 slurm/train_70b.sh configs/llama3_70b.yaml parallel.dp_shard=2     the same on 64
#   sbatch --nodes 1 slurm/train_70b.sh configs/llama3_8b.yaml run.dir=runs/my_8b       another file, another folder
#
# Submit it from the root of the repository, which every node must see. Arguments: a configuration file, then
# section.key=value overrides.

# One task per node: torchrun starts the node's processes itself.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# A node that dies puts the job back in the queue; its output goes on in the same file.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

# ┌── edit: your cluster ─────────────────────────────────────────────────────────────────────────────────────────────────────
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=lattice
#SBATCH --nodes=32
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=48:00:00

gpus_per_node=8         # as above
python=.venv/bin/python # or python3, where the machine brings its own torch
# module load cuda      # whatever your site needs before Python starts
# export NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5   # only where NCCL does not find the network by itself
# └──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # $0 would be a copy in Slurm's spool folder

if [ $# -eq 0 ]; then set -- configs/llama3_70b.yaml; fi

# The processes meet at a port of the first node. A restart must not meet what may be left of the start before it, nor another
# job on that node: the port follows from the job and from how often it was restarted.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
restart=${SLURM_RESTART_COUNT:-0}
port=$((20000 + (SLURM_JOB_ID * 10 + restart) % 10000))

export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / gpus_per_node))
echo "job $SLURM_JOB_ID, start $restart: $SLURM_JOB_NUM_NODES nodes × $gpus_per_node GPUs, meeting at $first_node:$port: $*"

# The run goes on from its newest checkpoint by itself: checkpoint.resume is `auto` unless the configuration says otherwise.
# --cpus-per-task again: since Slurm 22.05, srun does not take it over from sbatch.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
  "$python" -m torch.distributed.run \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus_per_node" \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port" --rdzv-id="$SLURM_JOB_ID.$restart" \
  train.py "$@"
