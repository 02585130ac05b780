"""The configuration of a run: loaded, checked and described.

    load.py           YAML + overrides → Config, or one error message; yaml_text.py: our YAML
    moved.py          keys of earlier versions, at their old places
    config.py         all sections together, and the dtypes of a run
    sections.py       the sections that have no room of their own
    data_stages.py    Config → its data stages, in which data, lengths, layouts or rates change
    checks.py         the checks that involve several sections or the number of ranks
    layouts.py        the layout for the number of ranks that there are

A section is declared (declare.py) beside what it configures: `model`, `parallel` and `data` in
their rooms, the others here. May import `costs/`, `model/`, `parallel/` and `data/`.
"""
