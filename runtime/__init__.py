"""Everything around the training step: starting, saving, stopping and measuring a run.

    listener.py        the interface that train.py's loop calls, and its order
    all_listeners.py   the listeners of a run, in order
    next_stage.py      from one stage of a run to the next

    start/             what happens before the first step: the ranks find each other, and mistakes
                       are found before anything is built
    log/               what happened to a run, how it ended, where its time went
    checkpoint/        saving while training continues, and going on from what was saved, exactly
    metrics/           what a run measures of itself, and where it is written
    profiling/         where the time of a step goes
    monitor/           alarms, numbers for Prometheus, a command after each commit: a process of
                       its own
    health/            faulty machines: slow ranks, silent corruption, nodes that are left out
    evaluation/        the loss on held-out text; tasks: the log-likelihood of texts and of choices

    stop.py            planned stops (signals, time, files), agreed on by all ranks
    signals.py         receives signals, from the first line of train.py
    watchdog.py        ends a step that hangs
    messages.py        reports an error once, from one rank
    torchrun.py        ends torchrun when a start is refused: it would only restart
    device.py          threads and clocks of a device
    garbage.py         collects Python's garbage in the same step on all ranks
    schema.py          validation of JSON from outside

May import `training/`, `settings/`, `costs/`, `model/`, `parallel/` and `data/`; imported only by
train.py, the tools, the benchmarks, the tests and docs/.
"""
