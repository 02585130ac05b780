"""Everything around the training step: starting, saving, stopping and measuring a run.

    listener.py        the interface that train.py's loop calls, and its order
    all_listeners.py   the listeners of a run, in order
    preconditions.py   checks before a run begins
    spares.py          which of the launcher's ranks train; the others wait
    rendezvous.py      how the ranks of one start find each other
    init_distributed.py  joins the launcher's world of processes
    device.py          threads and clocks of a device
    connections.py     how many queues the host has to a GPU, by the layout
    numa.py            binds a rank to the CPUs next to its GPU
    notices.py         what a start says about its configuration
    topology.py        which mesh axes lie inside a node, and what it costs where tp does not

    checkpoint.py      finds the checkpoint that a run starts from, and loads it
    history.py         checks that a checkpoint's run had the stages of the configuration
    next_stage.py      from one stage of a run to the next
    saving.py          when to save; save.py: saves while training continues
    save_interval.py   how often to save, if the run decides
    host_copies.py     where a save copies a rank's tensors
    manifest.py        lists and verifies the contents of a checkpoint
    rollback.py        goes back to a checkpoint and skips the bad batches
    tiling.py          whether pieces make up a whole tensor
    trainer_state.py   trainer.json; schema.py: validation of JSON from outside
    replicas.py        compares copies that must be equal

    lease.py           allows one writer per run folder
    lease_holder.py    who holds the lease, and whether that process is alive
    checkpoint_names.py  the names in a folder of checkpoints
    run_folder.py      lists the checkpoints of a run, and writes `latest`
    status.py          status.json: how the last start ended

    alerts/            alarms, numbers for Prometheus, a command after each commit: a process of
                       its own
    health/            faulty machines: slow ranks, silent corruption, nodes that are left out

    stop.py            planned stops (signals, time, files), agreed on by all ranks
    signals.py         receives signals, from the first line of train.py
    watchdog.py        ends a step that hangs
    messages.py        reports an error once, from one rank

    evaluation.py      the loss on held-out text
    tasks/             the log-likelihood of texts and of choices, on every layout
    metrics.py         the measurements of each logged step, and how a run ended
    expert_load.py     how evenly tokens spread over experts
    trackers.py        writes them to metrics.jsonl, console, wandb, TensorBoard
    events.py          events.jsonl: what happened, and when
    ledger.py          where a run's time went
    start_parts.py     the parts of a start, and when they end; start_times.py: writes them down
    goodput.py         how much time saves and failures cost: closed forms
    profile.py         runs some steps under torch's profiler
    profile_summary.py  a profile as seconds of compute, communication and idle time
    trace.py           records when each pipeline action of a step began and ended
    chrome.py          converts timelines to Chrome traces and back
    memory_report.py   what a rank holds in memory
    garbage.py         collects Python's garbage in the same step on all ranks
    progress.py        progress bars on a terminal

May import `training/`, `costs/`, `model/`, `parallel/` and `data/`; imported only by train.py, the
tools, the benchmarks and the tests.
"""
