"""What a run needs besides the model and its layout.

    config.py      every key of a configuration file     load_config.py  YAML + overrides → Config, or one clear error
    build.py       model stages, sharded and initialised  step.py        one optimizer step, on one screen
    optimizer.py   AdamW, decay groups, learning rate     gradient.py    the norm of all gradients
    checkpoint.py  where a run starts; load               save.py        save while training goes on
    manifest.py    what a checkpoint consists of          metrics.py     console line, metrics.jsonl, wandb
    stop.py        signals, time, files: all ranks stop   signals.py     hears them, from the first line of train.py on
    replicas.py    copies that must be equal are compared voice.py       errors: one message from one rank

May import `model/`, `parallel/` and `data/`.
"""
