"""A process group for tests that orders communication as strictly as NCCL does, on CPUs.

gloo forgives what NCCL does not: it buffers small messages, matches them by tags, and needs no
common moment to connect. So code can pass every test over gloo and hang on GPUs. The backend
"strict" (group.py, seat.py) carries its data over gloo, but runs an operation only where NCCL
would:

- Each communicator has one queue, in the order in which its rank posted. An operation begins when
  the one before it has ended (NCCL runs a communicator's kernels on one stream).
- Nothing is buffered: an operation ends on no rank before all ranks that take part have begun it.
- Messages have no tags: between two ranks the first send matches the first receive.
- Sends and receives posted by one `batch_isend_irecv` run together; others run one after another.
- A communicator is made by its first operation, for which all its ranks wait.
- In the backend "strict_shared" all communicators of a rank share one queue, as they share the
  GPU's work queue under CUDA_DEVICE_MAX_CONNECTIONS=1.

A referee (referee.py) in rank 0 sees every operation begin. It reports, on every rank, at once:
operations of one communicator that differ between its ranks (name, shapes, dtypes, reduction,
root; in an all-to-all, rows that one rank sends and another does not expect), a communicator that a
rank uses from two threads, and a deadlock: every rank waits, and no operation that has begun can
end. Random delays before operations vary who comes first.

What it does not see: groups that are made for gloo (agreements between hosts), and streams. A rank
that waits in such a group is not known to wait, so a deadlock there ends in gloo's timeout.

Ranks(8, backend="strict") runs tasks on it (proofs/ranks.py); python -m proofs.parity --strict runs
the parity proof.
"""
