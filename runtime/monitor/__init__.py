"""Alarms that reach a person, numbers for a cluster, and a command after each commit: in a process
of its own, so that no step waits for a network.

    train.py, rank 0                     process.py, if a key asks for it
    ────────────────                     ────────────────────────────────
    starts it ─ settings in a pipe ───►
    trains ──── what its log says ────►  ├─ sends alarms                  run.on_event
                                         ├─ shows numbers to Prometheus   run.prometheus
                                         └─ runs a command per commit     checkpoint.after_commit
    ends, or dies: the pipe is closed ►  sends what is left, ends

Because it is a process, a rank 0 that hangs or was killed still leads to an alarm: only rank 0
holds the other end of the pipe, so the monitor sees its end.

    rank_0.py        starts the monitor, passes on what the log says, waits for it at the end
    check.py         refuses invalid settings before the run begins
    process.py       the process: hears rank 0, keeps the clock, hands on what happens, ends
    alarms.py        which events are sent, each in a sentence
    send.py          sends alarms to a webhook or a command, with a time limit and retries
    prometheus.py    what the events and records add up to, for Prometheus: a file or an endpoint
    after_commit.py  runs the command, and records on disk for which checkpoints it has succeeded
    command.py       one run of a command, within its time
    rules/           alert rules for Prometheus, and their tests

rank_0.py and check.py belong to rank 0. The other files import only the standard library, and of
this repository only what does so too (prometheus.py: prometheus_client, if it is asked for): the
monitor starts in a tenth of a second.
"""
