"""What a run needs besides the model and its layout.

    config.py      every key of a configuration file      load_config.py  YAML + overrides → Config, or one clear error
    yaml_text.py   the YAML that it is written in
    join.py        how the processes of a start meet      build.py        model stages, sharded and initialised
    step.py        one optimizer step, on one screen      optimizer.py    AdamW, decay groups, learning rate
    gradient.py    the norm of all gradients              guard.py        which updates are made

    checkpoint.py  where a run starts; load               save.py         save while training goes on
    manifest.py    what a checkpoint consists of          rollback.py     back, and past the batches that spoiled it
    tiling.py      whether pieces make up a tensor        trainer_state.py  trainer.json; schema.py: JSON from outside
    replicas.py    copies that must be equal are compared

    lease.py       one writer per run folder              lease_holder.py   who it is, and whether it is alive
    run_folder.py  which checkpoints there are, `latest`

    stop.py        signals, time, files: all ranks stop   signals.py      hears them, from the first line of train.py on
    watchdog.py    a step that stands still               voice.py        errors: one message from one rank

    metrics.py     what is measured, how a run ended      trackers.py     to metrics.jsonl, console, wandb, TensorBoard
    events.py      what happened when                     ledger.py       where the time went
    profile.py     some steps under torch's profiler      profile_summary.py  what a trace says of a step's time
    trace.py       the pipeline's timeline                memory_report.py    what a rank holds, beside the plan
    progress.py    bars of long work, on a terminal

May import `model/`, `parallel/` and `data/`.
"""
