#!/usr/bin/env bash
#
#   sbatch slurm/train_70b.sh                                        70B on 32 nodes of 8 GPUs
#   sbatch --nodes 8 slurm/train_70b.sh configs/llama3_70b.yaml parallel.dp_shard=2     on 8 nodes
#   sbatch --nodes 8 slurm/train_70b.sh configs/llama3_8b.yaml parallel.pp=1            another one
#   sbatch --nodes 34 --export ALL,SPARE_NODES=2 slurm/train_70b.sh  the best 32 of 34 nodes
#   sbatch --array 1-3%1 slurm/train_70b.sh                          three links, one after another
#
# Submit it from the root of the repository, which every node must see. Arguments: a configuration
# file, then section.key=value overrides; what sbatch is given wins over the #SBATCH lines below.
#
# The job starts again by itself until the run is finished: before its time is up, after a failure,
# after a node's death. Each start goes on from the newest checkpoint (checkpoint.resume is `auto`).
# docs/slurm.md tells what happens when.

# One task per node: torchrun starts the node's processes itself, one per GPU, and shares the node
# with nobody.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
# A node that dies puts the job back in the queue; its output goes on in the same file.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out

# ┌── edit: your cluster ───────────────────────────────────────────────────────────────────────────
#SBATCH --account=YOUR_ACCOUNT
#SBATCH --partition=YOUR_PARTITION
#SBATCH --job-name=lattice
#SBATCH --nodes=32
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=48:00:00
# So many seconds before its time is up the job is told to save. Give it two steps, a save and a
# minute; 70B writes 0.85 TB.
#SBATCH --signal=B:USR1@300

python=${PYTHON:-}                   # empty: .venv/bin/python, or a container's python3
container_image=${CONTAINER_IMAGE:-} # empty: none; else for pyxis (where srun has it) or Apptainer
# what it sees, HERE:THERE,…: add data and runs that are elsewhere
container_mounts=$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR
device=${DEVICE:-cuda}               # cpu: a rehearsal on a machine without GPUs
spare_nodes=${SPARE_NODES:-0}        # left out of training: the worst, says the preflight
# it may take no longer; on a machine where importing torch takes minutes, more
preflight_seconds=${PREFLIGHT_SECONDS:-55}
# whatever your site needs before Python starts; the network is in slurm/environment.sh
# module load cuda
# └─────────────────────────────────────────────────────────────────────────────────────────────────

max_restarts=3  # of all ranks, in place, when one fails: seconds, where a requeue is minutes
max_fruitless=3 # starts in a row without a new checkpoint; then the job no longer requeues itself

set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # $0 is a copy in Slurm's spool folder
if [ $# -eq 0 ]; then set -- configs/llama3_70b.yaml; fi

restart=${SLURM_RESTART_COUNT:-0}
gpus_per_node=${SLURM_GPUS_PER_NODE:-$SLURM_GPUS_ON_NODE}
gpus_per_node=${gpus_per_node##*:} # of "h100:8"
threads=$((SLURM_CPUS_PER_TASK / gpus_per_node))
export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))

say() { echo "[$(date '+%F %T') job $SLURM_JOB_ID.$restart] $*"; }

# --- signals --------------------------------------------------------------------------------------
#
#   USR1  from Slurm, to this shell only (--signal=B:…), before the time is up. It is passed to
#         every rank: they agree, save and leave with status 0, and the job requeues itself.
#   TERM  scancel, `scontrol requeue`, preemption, or the end of the time: to this shell and to
#         every rank. They save if they can within Slurm's KillWait (30 s). Who sent it decides
#         whether the job runs again.
#
# CONT comes with both, and must not be trapped: bash then loses the other.

stopping=''   # by USR1
terminated='' # by TERM
run_dir=''
timer=''
trap 'stop_in_time' USR1
trap 'terminated=yes' TERM

# shellcheck disable=SC2317 # the trap calls it
stop_in_time() {
  if [ -n "$stopping" ]; then return; fi # a second signal would end the ranks at once
  stopping=yes
  say "USR1: all ranks save, then the job goes back to the queue"
  if [ -z "$run_dir" ]; then return; fi # training has not begun
  # The signal is lost where ranks are just being started again, so the file says it too; the ranks
  # remove it.
  touch "$run_dir/STOP"
  # By the step's name: for a link of an array, scancel by the job's repeats the signal, and a
  # second one would end the ranks.
  for step in $(squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format %i | grep '\.[0-9]*$'); do
    scancel --signal=USR1 "$step"
  done
  local end
  end=$(date --date "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)" +%s)
  last_resort $((end - 30)) &
  timer=$!
}

# Not saved half a minute before the end: better requeued, from the checkpoint before, than ended.
# shellcheck disable=SC2317 # stop_in_time calls it
last_resort() {
  trap 'exit' TERM
  while [ "$(date +%s)" -lt "$1" ]; do sleep 1; done
  say "the ranks have not saved in time"
  go_on
}

# --- on each node ---------------------------------------------------------------------------------

inside=() # what a command runs in
if [ -z "$container_image" ]; then
  python=${python:-.venv/bin/python}
elif srun --help | grep -q -- --container-image; then
  inside=(--container-image="$container_image" --container-mounts="$container_mounts"
    --container-workdir="$PWD")
else
  inside=(apptainer exec --nv --bind "$container_mounts" --pwd "$PWD" "$container_image")
fi
python=${python:-python3}

# `on_nodes SRUN_OPTION… -- COMMAND…`: one task on each node. The shell becomes srun, so it must be
# a subshell. --cpus-per-task again: since Slurm 22.05, srun does not take it over from sbatch.
# torchrun would die of USR1, so it is ignored; ranks inherit that, and then listen themselves
# (runtime/signals.py). Where NODE_LOGS names a folder, each node writes to NODE.log in it, and
# torchrun below NODE/ (PET_LOG_DIR is its --log-dir). The node opens these files itself: in a name
# that srun is given it would expand every %, also those of the run folder's name.
on_nodes() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  # shellcheck disable=SC2016 # the node expands it
  exec srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${options[@]}" \
    "${inside[@]}" bash -c '
    trap "" USR1
    if [ -n "${NODE_LOGS:-}" ]; then
      export PET_LOG_DIR=$NODE_LOGS/$SLURMD_NODENAME
      exec >>"$NODE_LOGS/$SLURMD_NODENAME.log" 2>&1
    fi
    exec "$@"' "$@"
}

# The processes meet at a port of the first node. Whoever can reach it can run code as you: torchrun
# listens on all interfaces, and unpickles what it finds there. Run only where the nodes' network is
# private; docs/slurm.md, "Who can reach the ports", has a line for the firewall, and the preflight
# warns of addresses that are reachable from outside. A restart must not meet what may be left of
# the start before it, nor another job on that node: the port follows from the job and from how
# often it was restarted.
port=$((20000 + (SLURM_JOB_ID * 10 + restart) % 10000))
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste --serial --delimiters=,)
first_node=${nodes%%,*}
say "$SLURM_JOB_NUM_NODES nodes × $gpus_per_node: $SLURM_JOB_NODELIST: $*"

# --- preflight ------------------------------------------------------------------------------------

# Is every node fit, and does the configuration fit? Under a minute; the report goes to this log,
# the answer to standard output: the nodes to train on and the run folder. 1: too few nodes are fit;
# 2: the configuration is refused. Neither would be better the next time, so neither is requeued.
status=0
answer=$(on_nodes --time=$((preflight_seconds / 60 + 3)) -- \
  "$python" -m tools.preflight --meet "$first_node:$((port - 10000))" --node-names "$nodes" \
  --device "$device" --ranks-per-node "$gpus_per_node" --spare-nodes "$spare_nodes" \
  --seconds "$preflight_seconds" "$@") || status=$?
if [ -n "$terminated" ]; then exit 143; fi
if [ -z "$answer" ]; then
  say "the preflight failed (status $status): no training"
  exit $((status > 0 ? status : 1))
fi
read -r nodes run_dir <<<"$answer"
first_node=${nodes%%,*}
num_nodes=$((SLURM_JOB_NUM_NODES - spare_nodes))

logs=$run_dir/logs/$SLURM_JOB_ID.$restart
mkdir -p "$logs"

# --- again ----------------------------------------------------------------------------------------

newest_checkpoint() { cat "$run_dir/checkpoints/latest" 2>/dev/null || true; }
newest_at_start=$(newest_checkpoint)
fruitless=$run_dir/logs/$SLURM_JOB_ID.fruitless
if [ "$restart" = 0 ]; then echo 0 >"$fruitless"; fi

# Back to the queue, where more steps are to do. A link of an array that is not the last leaves them
# to the next one.
go_on() {
  if [ "${SLURM_ARRAY_TASK_ID:-}" != "${SLURM_ARRAY_TASK_MAX:-}" ]; then
    say "the next link of the array goes on"
    return
  fi
  local count=0
  if [ "$(newest_checkpoint)" = "$newest_at_start" ]; then count=$(($(cat "$fruitless") + 1)); fi
  echo "$count" >"$fruitless"
  if [ "$count" -ge "$max_fruitless" ]; then
    say "gives up: $count starts in a row made no checkpoint"
    status=1
    return
  fi
  say "goes back to the queue"
  scontrol requeue "$SLURM_JOB_ID" || say "not requeued, unless Slurm has done so already"
}

# --- training -------------------------------------------------------------------------------------

if [ -n "$stopping" ]; then go_on && exit "$status"; fi # told to stop during the preflight

# shellcheck source=slurm/environment.sh
source slurm/environment.sh

# Each node writes its torchrun's words to NODE.log, and each rank its own to
# NODE/…/attempt_N/LOCAL_RANK/{stdout,stderr}.log. This log follows the former, without what
# torchrun says for slurm/first_failure.sh alone (LOGLEVEL).
export LOGLEVEL=INFO
# shellcheck disable=SC2016 # torchrun expands it
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
for node in ${nodes//,/ }; do touch "$logs/$node.log"; done

status=0
NODE_LOGS=$logs on_nodes --nodes="$num_nodes" --ntasks="$num_nodes" --nodelist="$nodes" \
  --kill-on-bad-exit=1 -- \
  "$python" -m torch.distributed.run \
  --nnodes="$num_nodes" --nproc-per-node="$gpus_per_node" --max-restarts="$max_restarts" \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port" --rdzv-id="$SLURM_JOB_ID.$restart" \
  --redirects=3 --tee=0:3 \
  train.py "$@" &
training=$!
{
  trap '' TERM
  tail --quiet --lines=+1 --follow=name --retry --pid="$training" "$logs"/*.log 2>/dev/null |
    grep --line-buffered -v '^I[0-9]'
} &
follower=$!

# A trap interrupts `wait`, so wait again until srun itself has ended.
while kill -0 "$training" 2>/dev/null; do wait "$training" && status=0 || status=$?; done
if [ -n "$timer" ]; then kill "$timer" 2>/dev/null || true; fi
while kill -0 "$follower" 2>/dev/null; do wait "$follower" || true; done

bash slurm/first_failure.sh "$logs" "/proc/$$/fd/1" || true
state='' # of the run, as rank 0 left it; after a failure it may be that of an earlier start
if [ "$status" = 0 ]; then
  state=$(sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$run_dir/status.json")
fi
say "torchrun ended with status $status${state:+, and the run is $state}"
if [ -n "$stopping" ]; then rm -f "$run_dir/STOP"; fi

if [ -n "$terminated" ]; then
  status=143
elif [ "$status" != 0 ]; then
  if grep -q 'failed (exitcode: 2)' "$logs"/*.log; then # a refusal would be repeated
    status=2
  else
    go_on
  fi
elif [ "$state" = requeue ]; then
  # Where a person made the file STOP, the run stays stopped until it is submitted again.
  if [ -z "$stopping" ] && grep -q 'file STOP' "$run_dir/status.json"; then exit 0; fi
  go_on
elif [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
  scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" # finished: nothing is left for the other links
fi
exit "$status"
