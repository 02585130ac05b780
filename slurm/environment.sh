# shellcheck shell=bash
#
# What torch, NCCL and gloo are told about this machine and about failures; train_70b.sh sources it.
# The lines that are commented out are for networks that NCCL does not understand by itself: try
# without them first.
: "${logs:?the folder of the logs of this start}"

# --- the network ----------------------------------------------------------------------------------

# Which Ethernet interface the processes meet on (and gloo talks on). NCCL and gloo take the one of
# the default route, which may be slow, not reach every node, or be reachable from outside: nobody
# asks who connects there, so name a private one. `ip -brief address` lists them; a prefix is
# enough.
# export NCCL_SOCKET_IFNAME=eth0
# export GLOO_SOCKET_IFNAME=eth0

# Which InfiniBand or RoCE adapters carry the data; `ibstat` lists them. Name those next to the GPUs
# where there is one more for storage. NCCL picks for each GPU the one that is nearest.
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_6,mlx5_7,mlx5_8,mlx5_9

# RoCE only: which of an adapter's addresses (`show_gids`; RoCE v2 with IPv4 is often 3), and the
# traffic class that the switches do not drop.
# export NCCL_IB_GID_INDEX=3
# export NCCL_IB_TC=106

# A link that flaps for a moment should delay a run, not end it: wait 4.096 µs · 2^22 = 17 s for an
# answer, seven times.
export NCCL_IB_TIMEOUT=22
export NCCL_IB_RETRY_CNT=7

# Only what goes wrong. INFO, for a job that does not start, says which interfaces, adapters and
# rings were chosen.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# --- hangs and crashes ----------------------------------------------------------------------------

# When a collective has waited for ten minutes (the process group's timeout), or another rank has
# ended so, every rank writes the last so many collectives it began, with the Python lines that
# began them, and then ends its process (3), so that torchrun starts all again. `torchfrtrace
# --prefix flight-recorder-rank- FOLDER` reads what all ranks wrote, and says who came to which
# collective too late or not at all.
export TORCH_FR_BUFFER_SIZE=20000
export TORCH_FR_DUMP_TEMP_FILE=$logs/flight-recorder-rank-
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# The watchdog that does so may itself hang in a call of the driver. Another thread then ends the
# process, after so long.
export TORCH_NCCL_ENABLE_MONITORING=1
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600

# A crash in C++ or CUDA leaves the Python stack too, in the rank's stderr.log.
export PYTHONFAULTHANDLER=1
