#!/usr/bin/env bash
#
#   first_failure.sh LOGS JOB_LOG
#
# Finds the rank that failed first, in each try of a start, and writes it at the top of JOB_LOG.
#
# When a rank dies, all other ranks fail too, because it no longer answers. LOGS holds a NODE.log for
# each node, to which torchrun writes, with the time:
#
#   restart_count=1 … global_ranks=[8, 9, …      the rendezvous of its ranks: a try begins
#   Sending process 123 closing signal SIGTERM   a rank has failed: torchrun ends the others
#   failed (exitcode: -9) local_rank: 3          up to 30 s later all have ended; this one failed first
#
# So the first of the latter two lines has the time of a node's first failure, and the earliest of
# all nodes since ranks last began is the job's first failure.
set -euo pipefail
logs=$1
job_log=$(readlink --canonicalize "$2")

# The lines have no year. In a start that has logged in December, January is of the next one.
december=''
if grep -qs '^[A-Z]12[0-3][0-9] ' "$logs"/*.log; then december=yes; fi

failures=$(
  for log in "$logs"/*.log; do
    awk -v node="$(basename "$log" .log)" -v december="$december" '
      {                                                   # E1121 19:07:48.823000: month, day, time
        year = december && substr($1, 2, 2) < "07"
        time = year " " substr($1, 2) " " $2
      }
      match($0, /restart_count=[0-9]+/) {
        print time, "-"
        attempt = substr($0, RSTART + 14, RLENGTH - 14) # the restarts that this node has caused
        noticed = ""
      }
      match($0, /global_ranks=\[[0-9]+/) { first_rank = substr($0, RSTART + 14, RLENGTH - 14) }
      / closing signal / && !noticed { noticed = time }
      match($0, /failed \(exitcode: -?[0-9]+\) local_rank: [0-9]+/) {
        # failed, (exitcode, CODE, local_rank, LOCAL
        split(substr($0, RSTART, RLENGTH), word, /[ ):]+/)
        print noticed ? noticed : time, node, first_rank + word[5], word[5], word[3], attempt
        noticed = ""
      }' "$log"
  done | sort | awk '$4 == "-" { begins = 1; next } begins { print try++, $0; begins = 0 }'
)
if [ -z "$failures" ]; then exit 0; fi

say() {
  while read -r try _ day time node rank local_rank code attempt; do
    how="with status $code"
    if [ "$code" -lt 0 ]; then how="by SIG$(kill -l "${code#-}")"; fi
    words=$(compgen -G "$logs/$node/*/attempt_$attempt/$local_rank/stderr.log" ||
      echo "$logs/$node.log")
    first="rank $rank on $node ended $how, $day $time; see $words"
    echo "FIRST FAILURE of ${logs##*/}, try $try: $first"
  done < <(echo "$failures")
}

say
if [ -f "$job_log" ]; then # in place: Slurm has the file open, and continues to append to it
  { say && cat "$job_log"; } >"$logs/job.log.partial"
  cat "$logs/job.log.partial" >"$job_log"
  rm "$logs/job.log.partial"
fi
