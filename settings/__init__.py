"""The configuration of a run: loaded, checked and described.

    load.py           YAML + overrides → Config, or one error message; yaml_text.py: our YAML
    config.py         all sections together, and the checks that involve several
    checks.py         the checks of experts and of the learning rate
    sections.py       the sections that have no room of their own
    data_stages.py    the form of `stages`: what changes at a step of the run
    layouts.py        the layout for the number of ranks that there are
    precision.py      the dtypes of a run

A section is declared (declare.py) beside what it configures: `model`, `parallel` and `data` in
their rooms, the others here. May import `costs/`, `model/`, `parallel/` and `data/`.
"""
