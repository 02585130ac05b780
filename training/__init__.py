"""The computation of a training step.

    sections.py       sections of a configuration file; config.py: all of them, and cross-checks
    stages.py         the form of `stages`: what changes at a step of the run
    layouts.py        the layout for the number of ranks that there are
    load_config.py    YAML + overrides → Config, or one error message
    build.py          builds this rank's model stages, sharded and initialised
    step.py           one optimizer step
    precision.py      the dtypes of a run
    gradient.py       the norm of all gradients
    guard.py          decides which updates are made
    balance.py        the load of experts; check_experts.py: checks of a configuration with experts
    optimizers/       update the weights; learning_rate.py: the learning rate of each step

May import `model/`, `parallel/`, `data/` and `costs/`. The code that starts, saves, stops and
measures a run is in runtime/; this package does not import it.
"""
