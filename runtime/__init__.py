"""Everything around the training step: starting, saving, stopping and measuring a run.

Each module or folder may import only those above it (tests/test_house.py):

    signals.py         receives signals, from the first line of train.py
    output.py          standard output and error: whatever becomes of them, the work goes on
    schema.py          validation of JSON from outside
    device.py          threads and clocks of a device
    files.py           writes a file durably, or replaces it as a whole; locks one
    agreement.py       what one rank knows, known to all: an error, or what rank 0 has read
    exit.py            how a rank exits that cannot continue: what it reports and tells the others

    log/               what happened to a run, how it ended, where its time went
    trainer_state.py   what is saved beside the tensors, and where a run starts from
    watchdog.py        ends a step that hangs
    stop.py            planned stops (signals, time, files), agreed on by all ranks
    listener.py        what train.py's loop calls around its steps, and the services it uses
    garbage.py         collects Python's garbage in the same step on all ranks

    metrics/           what a run measures of itself, and where it is written
    health/            faulty machines: slow ranks, silent corruption, nodes that are left out
    checkpoint/        saving while training continues, and going on from what was saved, exactly
    evaluation/        the loss on held-out text; tasks: the log-likelihood of texts and of choices
    profiling/         where the time of a step goes
    monitor/           alarms, numbers for Prometheus, a command after each commit: a process of
                       its own; start/ checks its settings
    start/             what happens before the first step: the ranks find each other, and mistakes
                       are found before anything is built

    all_listeners.py   the listeners of a run, in order; how it ends, or one data stage of it

May import `training/`, `settings/`, `costs/`, `model/`, `parallel/` and `data/`; imported only by
train.py, the tools, the benchmarks, the tests and docs/.
"""
