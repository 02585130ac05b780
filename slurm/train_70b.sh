#!/usr/bin/env bash
#
#   sbatch --nodes 33 --export ALL,SPARE_NODES=1 slurm/train_70b.sh  70B on the best 32 of 33 nodes of 8 GPUs
#   sbatch slurm/train_70b.sh                                        without a spare: a bad node ends the job
#   sbatch --nodes 8 slurm/train_70b.sh configs/llama3_70b.yaml parallel.dp_shard=4     on 8 nodes
#   sbatch --nodes 8 slurm/train_70b.sh configs/llama3_8b.yaml parallel.dp_replicate=8    another model
#   sbatch --nodes 9 --export ALL,SPARE_NODES=1 slurm/train_70b.sh configs/qwen3_30b_a3b.yaml   experts, 8 of 9
#   sbatch --nodes 16-32 --no-kill --export ALL,MIN_NODES=16 slurm/train_70b.sh CONFIG.yaml   as many as there are
#   sbatch --array 1-3%1 slurm/train_70b.sh                          a chain of three jobs
#
# Submit it from the root of the repository, which every node must be able to read. Arguments: a
# configuration file, then section.key=value overrides. Options of sbatch override the #SBATCH lines
# below.
#
# The job requeues itself until the run is finished: before its time is up, after a failure, and after
# a node has died. It ends, with an alarm, if too few nodes pass the preflight. Each start resumes from
# the newest checkpoint (checkpoint.resume is `auto`). docs/slurm.md explains what happens when.

# No other job shares a node. There is one task per node, the default: torchrun starts the node's
# processes, one per GPU. (With --ntasks-per-node=1, Slurm 22.05 gives --nodes=MIN-MAX only MIN nodes.)
#SBATCH --exclusive
#SBATCH --mem=0
# If a node dies, Slurm requeues the job. The next start appends its output to the same file.
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
# Give the task all CPUs of a node (CPUTot of `scontrol show node`). With fewer, Slurm may choose them
# all on one socket, and the ranks of the other socket's GPUs have none near them.
#SBATCH --time=48:00:00
# This many seconds before its time is up, the job receives a signal to save. Allow for two steps, two
# saves (one may just have begun) and a minute; 70B writes 0.85 TB, so 300 needs 8.2 GB/s (`written
# in` in the log).
#SBATCH --signal=B:USR1@300

python=${PYTHON:-}                   # empty: .venv/bin/python, or a container's python3
container_image=${CONTAINER_IMAGE:-} # empty: none; otherwise for pyxis (if srun has it) or Apptainer
# folders that it sees, HERE:THERE,…: add data and runs that are elsewhere
container_mounts=$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR
device=${DEVICE:-cuda}               # cpu: a rehearsal on a machine without GPUs
spare_nodes=${SPARE_NODES:-0}        # this many nodes, the worst in the preflight, do not train
# With parallel.layouts and --no-kill: after a node has died, go on in place with at least this many,
# including spare ones (docs/elastic.md). Empty: Slurm ends the job and requeues it.
min_nodes=${MIN_NODES:-}
# time limit of the preflight; increase it if importing torch takes minutes
preflight_seconds=${PREFLIGHT_SECONDS:-55}
# commands that your site needs before Python starts; network settings: slurm/environment.sh
# module load cuda
# └─────────────────────────────────────────────────────────────────────────────────────────────────

max_restarts=3 # of all ranks, in place, when one fails: takes seconds, a requeue takes minutes

set -euo pipefail
# Every step gets what this script exports, also if the job was submitted with --export=NONE, or a list.
export SLURM_EXPORT_ENV=ALL
cd "$SLURM_SUBMIT_DIR" # $0 is a copy in Slurm's spool folder
if [ $# -eq 0 ]; then set -- configs/llama3_70b.yaml; fi

arguments=("$@")

restart=${SLURM_RESTART_COUNT:-0}
# Not SLURM_JOB_ID, which is also the whole array's id in its last job: Slurm would requeue all of it.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}
gpus_per_node=${SLURM_GPUS_PER_NODE:-$SLURM_GPUS_ON_NODE}
gpus_per_node=${gpus_per_node##*:} # of "h100:8"
cpus_per_task=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
threads=$((cpus_per_task / gpus_per_node))
export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))

# If the disk is full, the job goes on without its log.
say() { echo "[$(date '+%F %T') job $SLURM_JOB_ID.$restart] $*" || true; }

# --- signals --------------------------------------------------------------------------------------
#
#   USR1  from Slurm, to this shell only (--signal=B:…), before the time is up. The script passes it
#         to every rank. The ranks agree on a step, save and exit with status 0, and the job requeues
#         itself.
#   TERM  from scancel, `scontrol requeue`, preemption, or at the end of the time: to this shell and
#         to every rank. The ranks save if they can within Slurm's KillWait (30 s). The sender decides
#         whether the job runs again.
#
# CONT comes with both and must not be trapped, because bash would then lose the other signal.

stopping=''   # by USR1
terminated='' # by TERM
timer=''      # the process of last_resort
follower=''   # training and what shows its output have been started
trap 'stop_in_time' USR1
trap 'terminated=yes' TERM

# No command here may end the script by failing (set -e): the controller may be busy, the disk full.
# shellcheck disable=SC2317 # the trap calls it
stop_in_time() {
  if [ -n "$stopping" ]; then return; fi # a second signal would end the ranks at once
  stopping=yes
  say "USR1: all ranks save, then the job requeues itself"
  # Earlier, $! below would be the process that ask_to_save starts; it is then called below.
  if [ -n "$follower" ]; then ask_to_save; fi
}

ask_to_save() {
  # The signal is lost if the ranks are being restarted at this moment, so also create a file for this
  # start (runtime/stop.py). No other start looks at it, and it is not the user's file STOP.
  { touch "$logs/STOP" || say "only by a signal"; } & # the file system may hang
  last_resort &
  timer=$!
  # Signal each job step by its id: scancel with the job's id may send the signal twice, and a second
  # signal would end the ranks.
  for step in $(squeue --noheader --steps --jobs "$job" --format %i | grep '\.[0-9]*$'); do
    scancel --signal=USR1 "$step" || say "step $step was not signalled"
  done
}

# If the ranks have not saved half a minute before the end, requeue the job anyway: it resumes from the
# checkpoint before.
# shellcheck disable=SC2317 # ask_to_save calls it
last_resort() {
  trap 'exit' TERM
  local now said end
  now=$(date +%s)
  # When Slurm ends the job: as the controller says; if that says nothing, as a newer Slurm says when
  # the job begins; or else the time of --signal above.
  said=$(timeout 60 squeue --noheader --jobs "$job" --format %e) || said=''
  said=$(date --date "$said" +%s) || said='' # it may be N/A; nothing is last midnight
  for end in "$said" "${SLURM_JOB_END_TIME:-}" $((now + 300)); do
    if [[ $end =~ ^[0-9]+$ && $end -gt $now ]]; then break; fi
  done
  local before=$((end - now < 60 ? (end - now) / 2 : 30))
  local limit=$((before / 2 + 1)) # of the question in go_on; the controller needs time, too
  while [ "$(date +%s)" -lt $((end - before)) ]; do sleep 1; done
  say "the ranks have not saved in time"
  go_on
}

# --- on each node ---------------------------------------------------------------------------------

inside=() # the container command
here=()   # what runs a command in it on this node
if [ -z "$container_image" ]; then
  python=${python:-.venv/bin/python}
elif [[ $(srun --help) == *--container-image* ]]; then
  inside=(--container-image="$container_image" --container-mounts="$container_mounts"
    --container-workdir="$PWD")
  here=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" --time=5 "${inside[@]}")
else
  inside=(apptainer exec --nv --bind "$container_mounts" --pwd "$PWD" "$container_image")
  here=("${inside[@]}")
fi
python=${python:-python3}

# `on_nodes SRUN_OPTION… -- COMMAND…` runs one task on each node. The shell becomes srun (exec), so call
# it in a subshell. --cpus-per-task is repeated because, since Slurm 22.05, srun does not inherit it
# from sbatch. USR1 would kill torchrun, so it is ignored; the ranks inherit this, and then install
# their own handler (runtime/signals.py). If NODE_LOGS names a folder, each node writes to NODE.log in
# it, and torchrun writes below NODE/ (PET_LOG_DIR is its --log-dir). The node opens these files
# itself, because srun would expand every % in a file name, including those in the run folder's name.
on_nodes() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1") && shift; done
  # shellcheck disable=SC2016 # the node expands it
  exec srun --ntasks-per-node=1 --wait=0 --cpus-per-task="$cpus_per_task" "${options[@]}" \
    "${inside[@]}" bash -c '
    trap "" USR1
    ulimit -Sn "$(ulimit -Hn)" || true # each rank holds a socket to the store in torchrun
    if [ -n "${NODE_LOGS:-}" ]; then
      export PET_LOG_DIR=$NODE_LOGS/$SLURMD_NODENAME
      exec >>"$NODE_LOGS/$SLURMD_NODENAME.log" 2>&1
    fi
    exec "$@"' "$@"
}

# A step's standard output also has what a site's TaskProlog prints, and SLURM_LABELIO adds to each
# line. So `"${marked[@]}" COMMAND…` marks what the command prints, and `unmarked` passes only that.
# shellcheck disable=SC2016 # the node expands it
marked=(bash -o pipefail -c '"$@" | sed "s/^/lattice answers: /"' marked)
unmarked() { sed -n 's/^.*lattice answers: //p'; }

# Tell a person that the job gives up, if run.on_event says how: no rank is left that could.
alarm() {
  "${here[@]}" "$python" -m tools.alarm "Slurm job $SLURM_JOB_ID.$restart $1" "${arguments[@]}" ||
    say "no alarm was sent"
}

# The rendezvous uses a port of the first node. Anyone who can reach it can run code as you: torchrun
# listens on all interfaces, and unpickles what it reads there. Use it only if the nodes' network is
# private. docs/running.md has a rule for the firewall, and the preflight warns of addresses that are
# reachable from outside. The port depends on the job and on its restart count, so that a start does
# not reach processes left over from an earlier start, or another job.
port=$((20000 + (SLURM_JOB_ID * 10 + restart) % 10000))
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste --serial --delimiters=,)
first_node=${nodes%%,*}
say "$SLURM_JOB_NUM_NODES nodes × $gpus_per_node: $SLURM_JOB_NODELIST: $*"

# --- preflight ------------------------------------------------------------------------------------

# shellcheck source=slurm/environment.sh
source slurm/environment.sh # the preflight measures the network that training will use

# Check every node and the configuration, in less than a minute. The report goes to this log, and the
# answer to standard output: the nodes to train on and the run folder. Status 1: too few nodes passed;
# status 2: the configuration is refused. A new try would not help, so neither is requeued.
status=0
answer=$(on_nodes --kill-on-bad-exit=0 --time=$((preflight_seconds / 60 + 3)) -- \
  "${marked[@]}" "$python" -m tools.preflight \
  --meet "$first_node:$((port - 10000))" --node-names "$nodes" \
  --device "$device" --ranks-per-node "$gpus_per_node" --spare-nodes "$spare_nodes" \
  ${min_nodes:+--min-nodes "$min_nodes"} --seconds "$preflight_seconds" "$@" | unmarked) || status=$?
if [ -n "$terminated" ]; then exit 143; fi
if [ -z "$answer" ]; then
  say "the preflight failed (status $status): training does not start"
  alarm "ends: the preflight failed (status $status)"
  exit $((status > 0 ? status : 1))
fi
read -r nodes run_dir < <(echo "$answer") # an older bash writes <<< to a disk, which may be full
first_node=${nodes%%,*}
num_nodes=$(echo "$nodes" | tr ',' '\n' | wc --lines)

# --- what becomes of the job ----------------------------------------------------------------------

# Do what tools/slurm_next.py decides from the run folder and, if it is given, the status with which
# training ended. If it cannot be asked, requeue, unless this start has finished the run, or a user
# has stopped it.
go_on() {
  local answer next
  answer=$(timeout --kill-after 2 "${limit:-60}" "${here[@]}" "${marked[@]}" \
    "$python" -m tools.slurm_next "$logs" "$@" | unmarked) || answer=''
  if [ -z "$answer" ]; then
    answer="${1:-0} requeue: tools.slurm_next does not say what is next"
    if [ -n "${1:-}" ] && [ "$run_dir/status.json" -nt "$logs/nodes" ] &&
      grep -qE '"state": "finished"|the file STOP was found' "$run_dir/status.json"; then
      answer="0 stopped: the run has finished, or a user has stopped it"
    fi
  fi
  read -r status next < <(echo "$answer")
  say "$next"
  case $next in
    finished | stopped:*) # cancel the remaining jobs of the array
      if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
        scancel --state=PENDING "$SLURM_ARRAY_JOB_ID" || say "the array's other jobs are not cancelled"
      fi ;;
    refused:*) alarm "ends: the start was refused" ;;
    'give up: '*) give_up "${next#*: }" ;;
    requeue:*)
      for pause in 5 20 60 120 0; do # the controller may be restarting
        if scontrol requeue "$job"; then return; fi
        sleep "$pause"
      done
      give_up "Slurm does not requeue it" ;;
  esac
}

give_up() {
  say "gives up: $1"
  alarm "gives up: $1"
  status=1
}

# --- training -------------------------------------------------------------------------------------

logs=$run_dir/logs/$SLURM_JOB_ID.$restart
export LATTICE_STOP_FILE=$logs/STOP
if ! mkdir -p "$logs" || ! echo "$nodes" >"$logs/nodes"; then # over quota, which no preflight sees
  say "$logs cannot be written: training does not start"
  alarm "ends: $logs cannot be written"
  exit 1
fi
cp "$run_dir/checkpoints/latest" "$logs/newest" 2>/dev/null || true
if [ -n "$stopping" ]; then go_on && exit "$status"; fi # USR1 came during the preflight

export TORCH_FR_DUMP_TEMP_FILE=$logs/flight-recorder-rank- # see environment.sh
# The output of each node's torchrun goes to NODE.log, and that of each rank to
# NODE/…/attempt_N/LOCAL_RANK/{stdout,stderr}.log. This log follows the NODE.log files, without the
# INFO lines that only slurm/first_failure.sh needs (LOGLEVEL).
export LOGLEVEL=INFO
# shellcheck disable=SC2016 # torchrun expands it
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='${rank}: '
nnodes=$num_nodes
on_failure=(--kill-on-bad-exit=1)
if [ -n "$min_nodes" ]; then
  nnodes=$((min_nodes < num_nodes ? min_nodes : num_nodes)):$num_nodes
  on_failure=(--no-kill --kill-on-bad-exit=0)
  # torch 2.13: after the number of nodes has changed, agents would look for a store that is gone
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
for node in ${nodes//,/ }; do touch "$logs/$node.log" || true; done # the quota of files

status=0
NODE_LOGS=$logs on_nodes --nodes="$num_nodes" --ntasks="$num_nodes" --nodelist="$nodes" \
  "${on_failure[@]}" -- \
  "$python" -m torch.distributed.run \
  --nnodes="$nnodes" --nproc-per-node="$gpus_per_node" --max-restarts="$max_restarts" \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:$port" --rdzv-id="$SLURM_JOB_ID.$restart" \
  --redirects=3 --tee=0:3 \
  train.py "$@" &
training=$!
{
  trap '' TERM
  # tail keeps a file of each node open; the soft limit is often 1,024
  ulimit -Sn "$(ulimit -Hn)" || true
  tail --quiet --lines=+1 --follow=name --retry --pid="$training" "$logs"/*.log 2>/dev/null |
    grep --line-buffered -v '^I[0-9]'
} &
follower=$!
if [ -n "$stopping" ] && [ -z "$timer" ]; then ask_to_save; fi # USR1 came since the preflight

# A trap interrupts `wait`, so wait again until srun itself has ended, and then for its status: it may
# have ended while the trap ran.
while kill -0 "$training" 2>/dev/null; do wait "$training" || true; done
wait "$training" || status=$?
if [ -n "$timer" ]; then kill "$timer" 2>/dev/null || true; fi
while kill -0 "$follower" 2>/dev/null; do wait "$follower" || true; done

timeout --kill-after 2 60 bash slurm/first_failure.sh "$logs" "/proc/$$/fd/1" || true
say "training ended with status $status"
if [ -n "$terminated" ]; then exit 143; fi
go_on "$status"
exit "$status"
