"""What keeps a run alive and observed: starting, saving, stopping, measuring. Computes no step.

    listener.py        what train.py's loop calls: the protocol of what follows
    preconditions.py   what must hold before a run begins
    init_distributed.py  how the processes of a start find each other
    topology.py        which axes lie inside a node

    checkpoint.py      where a run starts; load
    saving.py          when to save; save.py: save while training goes on
    manifest.py        what a checkpoint consists of
    rollback.py        back, and past the batches that spoiled it
    tiling.py          whether pieces make up a tensor
    trainer_state.py   trainer.json; schema.py: JSON from outside
    replicas.py        copies that must be equal are compared

    lease.py           one writer per run folder
    lease_holder.py    who it is, and whether it is alive
    run_folder.py      which checkpoints there are, `latest`
    status.py          how the last start ended: status.json

    stop.py            signals, time, files: all ranks stop
    signals.py         hears them, from the first line of train.py on
    watchdog.py        a step that hangs
    messages.py        errors: one message from one rank

    evaluation.py      the loss on held-out text
    metrics.py         what is measured, how a run ended
    trackers.py        to metrics.jsonl, console, wandb, TensorBoard
    events.py          what happened when
    ledger.py          where the time went
    profile.py         some steps under torch's profiler
    profile_summary.py  what a trace says of a step's time
    trace.py           the pipeline's timeline: when each action of a step began and ended
    chrome.py          timelines as Chrome traces, and back
    memory_report.py   what a rank holds, beside the plan
    progress.py        bars of long work, on a terminal

May import `training/`, `model/`, `parallel/` and `data/`; only train.py, the tools and the tests
import it.
"""
