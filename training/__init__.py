"""The computation of a training step.

    build.py          builds this rank's model stages, sharded and initialised
    step.py           one optimizer step
    gradient.py       the norm of all gradients
    guard.py          decides which updates are made
    balance.py        the load of experts
    optimizers/       update the weights; learning_rate.py: the learning rate of each step
    update.py         the update of all weights, in groups if their states are on a disk
    qk_clip.py        limits attention logits after an update

May import `settings/`, `model/` and `parallel/`. The code that starts, saves, stops and measures a
run is in runtime/; this package does not import it.
"""
