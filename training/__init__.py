"""What computes a step, and no more.

    sections.py       keys of a configuration file; config.py has all sections, and cross-checks
    load_config.py    YAML + overrides → Config, or one clear error
    build.py          model stages, sharded and initialised
    step.py           one optimizer step, on one screen
    precision.py      which numbers are in which dtype
    gradient.py       the norm of all gradients
    guard.py          which updates are made
    optimizers/       what updates weights; learning_rate.py: how fast

May import `model/`, `parallel/`, `data/` and `costs/`. What keeps a run alive and observed is in
runtime/, and is not known here.
"""
