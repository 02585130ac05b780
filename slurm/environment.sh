# shellcheck shell=bash
#
# Settings of torch, NCCL and gloo for the network and for failures; train_70b.sh sources this file.
# The settings that are commented out are for networks that NCCL does not detect correctly: try
# without them first.

# --- the network ----------------------------------------------------------------------------------

# The Ethernet interface for NCCL's bootstrap and for gloo. By default, they take the interface of the
# default route, which may be slow, may not reach every node, or may be reachable from outside. Its
# connections are not authenticated, so name a private interface. `ip -brief address` lists the
# interfaces; a prefix of the name is enough.
# export NCCL_SOCKET_IFNAME=eth0
# export GLOO_SOCKET_IFNAME=eth0

# The InfiniBand or RoCE adapters that carry the data; `ibstat` lists them. If a node has another
# adapter for storage, name only those next to the GPUs. NCCL picks the nearest one for each GPU.
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_6,mlx5_7,mlx5_8,mlx5_9

# RoCE only: the index of the adapter's address (`show_gids`; RoCE v2 with IPv4 is often 3), and the
# traffic class that the switches do not drop.
# export NCCL_IB_GID_INDEX=3
# export NCCL_IB_TC=106

# A link that is down for a moment should delay a run, not end it: wait 4.096 µs · 2^22 = 17 s for a
# reply, seven times.
export NCCL_IB_TIMEOUT=22
export NCCL_IB_RETRY_CNT=7

# Print warnings only. For a job that does not start, INFO prints which interfaces, adapters and rings
# were chosen.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}

# Not here, because each rank sets it, however it was started: the number of queues to the GPU
# (CUDA_DEVICE_MAX_CONNECTIONS, by the layout), the priority of NCCL's streams
# (TORCH_NCCL_HIGH_PRIORITY), the allocator's segments (PYTORCH_CUDA_ALLOC_CONF), the CPUs next to its
# GPU, and the limit of open files. A value that you export here for one of the variables stays. See
# docs/running.md.

# --- hangs and crashes ----------------------------------------------------------------------------

# When a collective has waited for ten minutes (the process group's timeout), or another rank has
# ended for this reason, every rank writes the last collectives that it started (up to the buffer
# size below) with the Python lines that started them, and then ends its process (3), so that
# torchrun restarts all ranks. `torchfrtrace --prefix flight-recorder-rank- FOLDER` reads the files of
# all ranks, and prints which ranks joined a collective too late or not at all. (train_70b.sh sets the
# FOLDER, that of the start's logs.)
export TORCH_FR_BUFFER_SIZE=20000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# The watchdog that does this may itself hang in a call to the driver. Another thread then ends the
# process after this many seconds.
export TORCH_NCCL_ENABLE_MONITORING=1
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=600

# After a crash in C++ or CUDA, also write the Python stack to the rank's stderr.log.
export PYTHONFAULTHANDLER=1
