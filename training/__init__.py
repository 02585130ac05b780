"""What computes a step, and no more.

    config.py      every key of a configuration file      load_config.py  YAML + overrides → Config, or one clear error
    yaml_text.py   the YAML that it is written in         build.py        model stages, sharded and initialised
    step.py        one optimizer step, on one screen      optimizers/     what updates weights; learning_rate.py
    precision.py   which numbers are in which dtype
    gradient.py    the norm of all gradients              guard.py        which updates are made

May import `model/`, `parallel/` and `data/`. What keeps a run alive and observed is in runtime/,
and is not known here.
"""
